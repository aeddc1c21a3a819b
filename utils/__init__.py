"""What stands around the algorithm files. CONTRIBUTING.md lists the modules that these import."""

"""One algorithm per file."""

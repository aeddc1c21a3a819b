"""The exception that tells a user what to change."""


class UsageError(ValueError):
    """Bad input. The message names the flag, what it got and what it takes."""

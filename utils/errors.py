"""The exceptions that tell a user what to change."""


class UsageError(ValueError):
    """Bad input. The message names the flag, what it got and what it takes."""


class NotFinite(UsageError, FloatingPointError):
    """The environment returned NaN or infinity. A diverged policy may have made it do so."""

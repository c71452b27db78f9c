"""The error that bad input of a user raises."""


class ConfigError(ValueError):
    """Bad input; the message is one sentence that names the values and the fix. It ends the command with exit code
    2."""

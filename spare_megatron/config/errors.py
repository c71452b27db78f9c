"""The one error that a user's input can raise."""


class ConfigError(ValueError):
    """Bad input: one sentence that names the values and the fix. Ends the command with exit code 2."""

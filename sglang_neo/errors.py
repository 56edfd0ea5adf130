"""The one exception that stands for a mistake of the user: its message is shown alone, without a traceback."""


class UsageError(ValueError):
    """Bad flags, model or environment. The message says what is wrong and what to do, in one line."""

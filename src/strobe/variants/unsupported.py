"""The error of what strobe cannot do."""


class Unsupported(RuntimeError):
    """What was asked for cannot be done: by the backend that was named, or by any. The message says why."""

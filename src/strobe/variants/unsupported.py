"""`Unsupported`, the error of whatever asks for something that this library does not do."""

from __future__ import annotations


class Unsupported(NotImplementedError):
    """What was asked for makes sense, and is refused: by a backend that was named, or by all of them. The message says
    why."""

"""A function of another library, ours while somebody is in the block: blocks may be nested, and be in several threads."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Patch:
    """`put(True)` puts ours in the place of theirs, `put(False)` takes it back."""

    def __init__(self, put: Callable[[bool], None]) -> None:
        self._put, self._blocks, self._lock = put, 0, threading.Lock()

    @property
    def active(self) -> bool:
        return self._blocks > 0

    def __enter__(self) -> None:
        self._count(1)

    def __exit__(self, *_: object) -> None:
        self._count(-1)

    def _count(self, step: int) -> None:
        with self._lock:
            self._blocks += step
            self._put(self.active)

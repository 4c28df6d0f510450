"""Options that all commands have in common: numbers of tokens such as 4K, flags in the help, progress off a terminal.
No torch here: help and usage errors do not wait for it."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup


class UserError(Exception):
    """Something the user can put right: shown as a line, without a traceback."""


_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20}
TOKENS = "N|4K"  # how help shows a number of tokens


def tokens(text: str) -> int:
    """5000, 4K or 1M; K is 1,024."""
    match = re.fullmatch(r"(\d+)([KM]?)", str(text), re.IGNORECASE)
    if match is None:
        raise typer.BadParameter(f"must be an integer such as 5000, 4K or 1M (K is 1,024), got {text!r}")
    number = int(match[1]) * _UNITS[match[2].upper()]
    if number < 1:
        raise typer.BadParameter(f"must be at least 1, got {text}")
    return number


# ---- flags -----------------------------------------------------------------------------------------------------------


def _without_types(params: list[Any]) -> list[Any]:
    """A flag takes no value, so its help shows no type; newer versions of typer show <bool>."""
    for param in params:
        if getattr(param, "is_flag", False):
            param.display_type_rich = lambda ctx: None
    return params


class Command(TyperCommand):
    def get_params(self, ctx: Any) -> Any:
        return _without_types(super().get_params(ctx))


class Group(TyperGroup):
    def get_params(self, ctx: Any) -> Any:
        return _without_types(super().get_params(ctx))


# ---- progress --------------------------------------------------------------------------------------------------------

_EVERY_S = 5.0  # between two lines


def progress() -> Any:
    """A bar on a terminal; elsewhere a line at the beginning and every few seconds, on stderr as well. Both are used as
    `rich.progress.Progress` is: `add_task`, `update`, `advance`."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        return Lines(lambda text: print(text, file=console.file, flush=True))
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, transient=True)


class Lines:
    """One task, as lines of text: how much is done, how long the rest takes, what is being done."""

    def __init__(self, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._say, self._clock = say, clock
        self._what, self._done = "", 0.0
        self._total: float | None = None
        self._begun = self._last = clock()

    def __enter__(self) -> Lines:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def add_task(self, description: str, total: float | None = None) -> int:
        self._what, self._total = description, total
        if total:
            self._say(f"{description}: {total:.0f} in all")
        return 0

    def advance(self, task: int, steps: float = 1) -> None:
        self.update(task, advance=steps)

    def update(
        self,
        task: int,
        *,
        description: str | None = None,
        completed: float | None = None,
        total: float | None = None,
        advance: float = 0,
    ) -> None:
        self._what = self._what if description is None else description
        self._total = self._total if total is None else total
        self._done = self._done + advance if completed is None else completed
        now = self._clock()
        if now - self._last < _EVERY_S:
            return
        self._last = now
        of = f" of {self._total:.0f}" if self._total else ""
        left = ""
        if self._total and self._done:
            left = f", about {_duration((now - self._begun) * (self._total / self._done - 1))} left"
        self._say(f"{self._done:.0f}{of}{left}: {self._what}")


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"

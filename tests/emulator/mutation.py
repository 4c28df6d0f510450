"""One thing wrong with a kernel: a replacement in its flattened source."""

from __future__ import annotations


class Mismatch(Exception):
    """A source does not have what a mutation replaces. No AssertionError: those are what mutations are caught by."""


def replaced(mutation: str, source: str, old: str, new: str, times: int = 1) -> str:
    """The source with `new` in the place of `old`, which it must have `times` times."""
    if (found := source.count(old)) != times:
        raise Mismatch(f"mutation {mutation}: its text occurs {found} times in the source, not {times}:\n{old}")
    return source.replace(old, new)

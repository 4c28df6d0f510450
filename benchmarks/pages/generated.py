"""Parts of documents that code writes: what stands between two lines that say so."""

from __future__ import annotations


def marks(name: str) -> tuple[str, str]:
    """The lines around a block."""
    return f"<!-- {name}: begin (python -m benchmarks.pages --write) -->", f"<!-- {name}: end -->"


def replace_between(text: str, begin: str, end: str, block: str) -> str:
    """The text with `block` between the lines `begin` and `end`, in place of whatever was there."""
    before, found_begin, rest = text.partition(begin)
    _, found_end, after = rest.partition(end)
    if not found_begin or not found_end:
        raise ValueError(f"the text has no lines {begin!r} and {end!r}")
    return f"{before}{begin}\n{block}{end}{after}"

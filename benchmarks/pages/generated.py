"""Parts of documents that code writes: what stands between two lines that say so."""

from __future__ import annotations

from pathlib import Path


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


def outdated(texts: dict[Path, str]) -> dict[Path, str]:
    """Path -> what it should hold, of every text that differs."""
    return {
        path: text for path, text in texts.items() if not path.is_file() or path.read_text(encoding="utf-8") != text
    }


def update(texts: dict[Path, str], root: Path, write: bool) -> int:
    """Write the texts that differ, or say which these are. Returns the exit status."""
    late = outdated(texts)
    for path, text in late.items():
        print(f"{'wrote' if write else 'out of date, see `make docs`:'} {path.relative_to(root)}")
        if write:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    return 1 if late and not write else 0

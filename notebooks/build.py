"""The notebooks as .ipynb, from the scripts beside this file (jupytext's percent format).

    python notebooks/build.py build/learn

A cell begins at `# %%`, a text cell at `# %% [markdown]`; what stands before the first cell is for tools and left out.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
SCRIPTS = tuple(sorted(HERE.glob("[0-9]*.py")))
_CELL = re.compile(r"^# %%(?P<rest>.*)$", re.MULTILINE)


def cells(text: str) -> list[tuple[str, str]]:
    """("markdown" or "code", source) of each cell."""
    starts = list(_CELL.finditer(text))
    if not starts:
        raise ValueError("no cell: a line that starts with `# %%` is missing")
    found = []
    for start, following in zip(starts, [*starts[1:], None], strict=True):
        body = text[start.end() + 1 : following.start() if following else len(text)].strip("\n")
        rest = start["rest"].strip()
        if rest not in ("", "[markdown]"):
            raise ValueError(f"`{start[0]}`: a cell starts with `# %%` or `# %% [markdown]`")
        if rest:
            lines = body.splitlines()
            if wrong := [line for line in lines if not line.startswith("#")]:
                raise ValueError(f"{wrong[0]!r} in a markdown cell does not start with #")
            body = "\n".join(line[2:] for line in lines)
        found.append(("markdown" if rest else "code", body))
    return found


def notebook(text: str, name: str) -> dict[str, Any]:
    """Jupyter's format 4.5, without outputs; a T4 is asked for on Colab."""

    def cell(index: int, kind: str, source: str) -> dict[str, Any]:
        made = {
            "cell_type": kind,
            "id": f"{name[:2]}-{index:03d}",
            "metadata": {},
            "source": source.splitlines(keepends=True),
        }
        return made | ({"execution_count": None, "outputs": []} if kind == "code" else {})

    return {
        "cells": [cell(i, kind, source) for i, (kind, source) in enumerate(cells(text))],
        "metadata": {
            "accelerator": "GPU",
            "colab": {"gpuType": "T4", "name": f"{name}.ipynb", "provenance": []},
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        },
        "nbformat": 4,
        "nbformat_minor": 5,
    }


def build(directory: Path) -> list[Path]:
    directory.mkdir(parents=True, exist_ok=True)
    written = []
    for script in SCRIPTS:
        path = directory / f"{script.stem}.ipynb"
        content = notebook(script.read_text(encoding="utf-8"), script.stem)
        path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        written.append(path)
    return written


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python notebooks/build.py DIRECTORY")
    for path in build(Path(sys.argv[1])):
        print(path)

"""Docstrings of the library begin with a subject or a verb, so that they read without the name they stand under."""

from __future__ import annotations

import ast
import re
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[2] / "src" / "strobe"

# Prepositions, conjunctions and question words that continue a name ("Of both directions.") instead of beginning a sentence.
CONTINUATIONS = set(
    "after among as at before behind between but by for from how if in into like nor of on or so through to under until "
    "what when where whether which while who whose why with within without".split()
)


def first_word(docstring: str) -> str:
    return re.split(r"[\s,:.;(]", docstring, maxsplit=1)[0].lower()


def test_docstrings_do_not_continue_a_name() -> None:
    continued = []
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                docstring = ast.get_docstring(node) or ""
                if first_word(docstring) in CONTINUATIONS or docstring.startswith("The same"):
                    continued.append(f"{path.relative_to(SOURCE)}: {docstring.splitlines()[0]}")
    assert not continued, "\n".join(continued)

"""The table of families in docs/plug-in.md is that of the committed results, and none of them is wrong."""

from __future__ import annotations

import json

from compat import families

DATA = json.loads(families.DATA.read_text())


def test_the_page_and_the_data_agree() -> None:
    text = families.PAGE.read_text()
    assert families.page(text, DATA) == text, "run python tests/compat/families.py --write"


def test_no_family_is_wrong_without_a_word() -> None:
    assert len(DATA["families"]) > 50
    for name, found in DATA["families"].items():
        assert found["result"] in ("same", "own", "refused"), name
        assert found["result"] == "refused" or found["error"] <= families.TOLERANCE, name


def test_every_result_has_its_row() -> None:
    made = families.table({"transformers": "5", "torch": "2", "families": {"a": {"result": "raises", "why": "?"},
                           "b": {"result": "differs"}, "c": {"result": "refused", "why": "A passes x= to"}}})  # fmt: skip
    assert "does not run (1) | a |" in made and "**differs** (1) | b |" in made and "choose keys" in made

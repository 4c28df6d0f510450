"""Parameters for every day and thorough ones: a name that nobody has is an error, not a test that is left out."""

from __future__ import annotations

import pytest
from everyday import everyday


def test_what_is_not_named_is_thorough() -> None:
    found = everyday([8, "b", "c"], ["b", "8"])
    assert [(p.id, p.values, [m.name for m in p.marks]) for p in found] == [
        ("8", (8,), []),
        ("b", ("b",), []),
        ("c", ("c",), ["thorough"]),
    ]


def test_a_name_that_is_none_is_refused() -> None:
    with pytest.raises(LookupError, match="everyday: d, e; must be among b, c"):
        everyday(["b", "c"], ["e", "c", "d"])

"""What a mask function of transformers is put together from: the usual ones are conjunctions of a few functions of
`transformers.masking_utils`, which are recognised by their names."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any


def leaves(function: Callable[..., Any]) -> Iterator[tuple[str | None, dict[str, Any]]]:
    """The functions of transformers whose conjunction this is, by name, with what they captured; None for others."""
    if getattr(function, "__module__", None) != "transformers.masking_utils":
        yield None, {}
        return
    name = function.__qualname__.split(".")[0]
    code, cells = getattr(function, "__code__", None), getattr(function, "__closure__", None) or ()
    captured = dict(zip(code.co_freevars, (c.cell_contents for c in cells), strict=True)) if code is not None else {}
    if name != "and_masks":
        yield name, captured
        return
    for part in captured.get("mask_functions", (None,)):
        yield from leaves(part)

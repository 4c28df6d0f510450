"""The interval of a mask as the kernels compute it: the text of `struct Mask`. Its numbers are `Mask.constants`."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator

from strobe.variants.expression import OPERATIONS, Expr
from strobe.variants.mask import Mask

# The divisor is greater than 0. C++ rounds towards zero.
_ROUNDED_DOWN = "(({0} < 0 ? {0} - ({1} - 1) : {0}) / {1})"


@functools.lru_cache(maxsize=256)
def struct(mask: Mask, positions: bool = False) -> str:
    """Two masks of the same shape print the same text, whatever their constants: a new window size needs no new kernel.
    `positions`: rows and keys of the call lie somewhere in the whole sequence."""
    fields, keys = "int len_q, len_k;\n  const int* c;", "len_k"
    if positions:
        fields, keys = f"{fields}\n  int offset_q, offset_k, keys;", "keys"
    constants = itertools.count()

    def end(expr: Expr | None, where_open: str) -> str:
        if expr is None:
            return where_open
        text = _text(expr, constants)
        return f"q += offset_q, max(0, min(keys, {text} - offset_k))" if positions else f"max(0, min(len_k, {text}))"

    return (
        "struct Mask {\n"
        f"  static constexpr bool kHasLo = {str(mask.lo is not None).lower()}, "
        f"kHasHi = {str(mask.hi is not None).lower()};\n"
        f"  {fields}\n"
        f"  STROBE_DEVICE int lo(int q) const {{ return {end(mask.lo, '0')}; }}\n"
        f"  STROBE_DEVICE int hi(int q) const {{ return {end(mask.hi, keys)}; }}\n"
        "};\n"
    )


def _text(e: Expr, constants: Iterator[int]) -> str:
    if e.op == "const":
        return f"c[{next(constants)}]"
    if not e.operands:
        return f"{e.args[0]}"
    text = _ROUNDED_DOWN if e.op == "//" else OPERATIONS[e.op].cpp
    return text.format(*(_text(a, constants) for a in e.args))

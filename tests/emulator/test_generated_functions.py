"""Score and mask functions drawn at random, in the kernels of both families, against plain torch in fp64. A program has one
function for each of six heads: to compile it takes much longer than to run it."""

from __future__ import annotations

from random import Random

import generated_functions
import pytest
from everyday import everyday

from strobe.emulator import compiler

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
PROGRAMS = [f"{family} {number}" for family in ("sm80", "sm90") for number in range(20)]
# Of every day: those in which numbers are equal to the scale, its inverse and one another, and one with a factor of 0.
EVERYDAY = ("sm80 10", "sm90 7")


@pytest.mark.parametrize("program", everyday(PROGRAMS, EVERYDAY))
def test_against_plain_torch(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounding in fp16 hides less of the gradients than in bf16. Every other program learns."""
    family, number = program.split()
    monkeypatch.setenv("STROBE_EMULATE", family)
    drawn = generated_functions.generated(Random(program), functions=6, learning=int(number) % 2 == 0)
    print(drawn.options, drawn.score, drawn.mask, sep="\n")  # which pytest shows of a failure
    case = drawn.case(len_q=20, len_k=33, heads=6, heads_k=3)
    generated_functions.check(drawn, case, "cpu", "emulator")

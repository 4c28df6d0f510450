"""Score and mask functions drawn at random, in the kernels, against plain torch in fp64. STROBE_FUZZ_FUNCTIONS: how many
programs of six functions (40)."""

from __future__ import annotations

import os
from random import Random

import generated_functions
import pytest
from gpu.kernels import hopper

PROGRAMS = int(os.environ.get("STROBE_FUZZ_FUNCTIONS", "40"))
BACKENDS = [pytest.param("sm90", marks=pytest.mark.skipif(not hopper(), reason="not a Hopper GPU")), "sm80"]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("number", range(PROGRAMS))
def test_against_plain_torch(number: int, backend: str) -> None:
    drawn = generated_functions.generated(Random(f"{backend} {number}"), functions=6, learning=number % 2 == 0)
    print(drawn.options, drawn.score, drawn.mask, sep="\n")  # which pytest shows of a failure
    case = drawn.case(len_q=100 + number, len_k=200 + 3 * number, heads=6, heads_k=3)
    generated_functions.check(drawn, case, "cuda", backend)

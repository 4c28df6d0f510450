"""Score and mask functions drawn at random, by PyTorch in tiles, against plain torch. All of it is in fp64."""

from __future__ import annotations

from random import Random

import function_cases
import generated_functions
import hypothesis
import pytest
import torch
from hypothesis import strategies as st


def check(r: Random, learning: bool) -> None:
    drawn = generated_functions.generated(r, learning=learning)
    hypothesis.note(f"{drawn.options}\n{drawn.score}{drawn.mask}")
    case = drawn.case(len_q=9, len_k=21, dim=8)
    function_cases.check(case, drawn.tensors(case, "cpu", torch.float64), "tiled", 1e-6)


@hypothesis.settings(max_examples=30)
@hypothesis.given(st.randoms(use_true_random=False), st.booleans())
def test_against_plain_torch(r: Random, learning: bool) -> None:
    check(r, learning)


@pytest.mark.thorough
@hypothesis.settings(max_examples=250)
@hypothesis.given(st.randoms(use_true_random=True), st.booleans())
def test_many_against_plain_torch(r: Random, learning: bool) -> None:
    check(r, learning)

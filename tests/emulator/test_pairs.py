"""Biases, mask tensors and captured tensors in every kernel and direction."""

from __future__ import annotations

import pair_cases
import pytest
from everyday import everyday

from strobe.emulator import compiler

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
EVERYDAY = ("bias", "bias_far", "bias_wide", "mask", "alibi")


@pytest.mark.parametrize("family", ["sm80", "sm90"])
@pytest.mark.parametrize("name", everyday(list(pair_cases.CASES), EVERYDAY))
def test_against_fp64(name: str, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STROBE_EMULATE", family)
    case = pair_cases.CASES[name]
    pair_cases.check(case, case.tensors(), "emulator")

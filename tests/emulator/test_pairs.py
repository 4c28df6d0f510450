"""Biases, mask tensors and captured tensors in every kernel and direction."""

from __future__ import annotations

import pair_cases
import pytest
from everyday import everyday

from strobe.emulator import compiler

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
COPIED = ("bias", "bias_softcap_dropout")
EVERYDAY = ("sm90 bias", "sm90 bias_far", "sm90 bias_wide", "sm90 mask", "sm90 alibi", "sm80 bias_far", "sm80 mask")


@pytest.mark.parametrize(
    "name", everyday([f"{f} {case}" for case in pair_cases.CASES for f in ("sm80", "sm90")], EVERYDAY)
)
def test_against_fp64(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    family, of_case = name.split()
    monkeypatch.setenv("STROBE_EMULATE", family)
    case = pair_cases.CASES[of_case]
    pair_cases.check(case, case.tensors(), "emulator")


@pytest.mark.parametrize("name", COPIED)
def test_copies_of_a_bias_are_awaited(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its gradient takes the place of its entries, where those are copied ahead: not beside a score that is no sum."""
    monkeypatch.setenv("STROBE_EMULATE", "sm90")
    monkeypatch.setenv("STROBE_EMULATOR_MODE", "async")
    case = pair_cases.CASES[name]
    pair_cases.check(case, case.tensors(), "emulator")

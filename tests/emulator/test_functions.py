"""Users' score and mask functions in the kernels, both directions."""

from __future__ import annotations

import function_cases
import pytest
from everyday import everyday

from strobe.emulator import compiler

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
EVERYDAY = ("packed", "mask_causal_document", "mask_neighbourhood")
ON_SM80 = ("relative", "rounding", "packed", "tempered_varlen", "mask_late", "mask_both")


@pytest.mark.parametrize("name", everyday(list(function_cases.CASES), EVERYDAY))
def test_against_plain_torch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STROBE_EMULATE", "sm90")
    case = function_cases.CASES[name]
    function_cases.check(case, case.tensors(), "emulator")


@pytest.mark.parametrize("name", everyday(ON_SM80, ("relative",)))
def test_on_sm80(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STROBE_EMULATE", "sm80")
    case = function_cases.CASES[name]
    function_cases.check(case, case.tensors(), "emulator")

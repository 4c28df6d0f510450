"""Users' score and mask functions in the kernels, both directions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import function_cases
import pytest
import torch
from emulator.mutation import replaced
from everyday import everyday

import strobe
from strobe.backends import dispatch
from strobe.cuda.runtime import jit
from strobe.emulator import backend, compiler

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


# ---- captured tensors that learn -------------------------------------------------------------------------------------

LEARNT_ON_SM80 = ("relative", "alibi", "tempered_varlen", "several", "gaussian", "swin")
RELATIVE = function_cases.CASES["relative"]


@pytest.fixture
def only_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """No backward pass may go to another backend, as those do that the kernels refuse."""

    def choose(problem: Any, forward: Any) -> Any:
        assert forward.supports(problem) is None
        return forward

    monkeypatch.setattr(dispatch, "choose_backward", choose)


def check_learning(name: str, case: function_cases.FunctionCase) -> None:
    x, captured = case.tensors()
    function_cases.check(case, (x, function_cases.learning(name, captured)), "emulator")


@pytest.mark.parametrize("name", everyday(list(function_cases.LEARNING), ("relative", "tempered_varlen")))
@pytest.mark.usefixtures("only_kernels")
def test_gradients_of_captured_tensors(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STROBE_EMULATE", "sm90")
    check_learning(name, function_cases.CASES[name])


@pytest.mark.parametrize("name", everyday(LEARNT_ON_SM80, ("relative",)))
@pytest.mark.usefixtures("only_kernels")
def test_gradients_of_captured_tensors_on_sm80(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STROBE_EMULATE", "sm80")
    check_learning(name, function_cases.CASES[name])


@pytest.mark.usefixtures("only_kernels")
def test_gradients_of_captured_tensors_that_are_not_contiguous(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transposed, with gaps, and repeated along an axis: the kernel is that of the contiguous one."""
    monkeypatch.setenv("STROBE_EMULATE", "sm90")
    x, captured = RELATIVE.tensors()
    table = captured["table"]
    for t in (table.t().contiguous().t(), torch.stack([table, table], 2)[:, :, 1], table[:1].expand(4, 63)):
        assert not t.is_contiguous()
        function_cases.check(RELATIVE, (x, {"table": t.requires_grad_()}), "emulator")


@pytest.mark.thorough
@pytest.mark.usefixtures("only_kernels")
def test_learning_in_blocks_that_a_condition_lets_through(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels have a map of blocks, and more keys than those for which turns are taken. The last pairs lie beyond
    the table."""
    monkeypatch.setenv("STROBE_EMULATE", "sm90")
    both = function_cases.CASES["mask_both"]
    check_learning("mask_both", replace(both, len_q=160, len_k=1100, batch=1, heads=2, heads_k=1))


@pytest.mark.thorough
@pytest.mark.parametrize("family", ["sm90", "sm80"])
@pytest.mark.usefixtures("only_kernels")
def test_learning_beside_a_bias(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STROBE_EMULATE", family)
    monkeypatch.setenv("STROBE_EMULATOR_MODE", "async")
    torch.manual_seed(0)
    tensors = [torch.randn(2, n, h, 64).bfloat16() for n, h in ((70, 4), (90, 2), (90, 2))]
    given = [*tensors, torch.randn(2, 4, 70, 90).bfloat16(), torch.randn(4, 9)]

    def gradients(backend: str, dtype: Any) -> tuple[torch.Tensor, ...]:
        *x, bias, table = leaves = [t.detach().to(dtype or t.dtype).requires_grad_() for t in given]
        score = strobe.score_function(lambda s, b, h, q, k: 2.0 * torch.tanh(s * table[h, (k - q) // 16 + 4]))
        out = strobe.attention(*x, bias=bias, score=score, backend=backend)
        return torch.autograd.grad((out.double() * torch.arange(64)).sum(), leaves)

    for found, exact in zip(gradients("emulator", None), gradients("tiled", torch.float64), strict=True):
        assert (found.double() - exact).abs().max() <= 0.02 * exact.abs().max()


# Name -> what is replaced in the kernels, and by what.
MISTAKES = {
    "sums_of_other_places": ("add_unless_zero(tensor + place, sum);\n      place", "place"),
    "sums_left_over": ("if (any(place != first)) add_unless_zero(tensor + place, sum);", "if (any(place != first));"),
    "sums_of_one_lane": ("for (int i = 1; i < 32; i *= 2) x += shfl_xor(x, i);", ""),
    "every_lane_adds": ("if (thread_idx() % 32 == 0) add_unless_zero(to, x);", "add_unless_zero(to, x);"),
    "one_place_for_all": ("if (x != 0.f && at != place) {", "if (x != 0.f && place < 0) {"),
}


@pytest.mark.parametrize("name", everyday(list(MISTAKES), ("sums_left_over",)))
@pytest.mark.usefixtures("only_kernels")
def test_mistakes_in_learning_are_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STROBE_EMULATE", "sm90")
    build = backend.build

    def damaged(source: str, **names: str) -> Any:
        text = jit.flatten(source, "emu")
        return build(replaced(mistake, text, *MISTAKES[mistake]) if "add_gradients(Sums" in text else text, **names)

    mistake = name
    monkeypatch.setattr(backend, "build", damaged)
    with pytest.raises(AssertionError, match="dtable: off by"):
        check_learning("relative", RELATIVE)

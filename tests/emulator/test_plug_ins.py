"""Plug-ins ask for masks and positions that only they make; here the kernels compute them on the emulator. On a GPU
these calls go to the kernels, in the other tests on CPU tensors they never do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tolerance
import torch

from strobe.backends import dispatch
from strobe.backends.backend import Backend
from strobe.call import bound_call
from strobe.compat import flash_attn, flash_attn_interface as fa3
from strobe.problem import Problem

HEADS, HEADS_K, DIM = 4, 2, 32
Call = Callable[[torch.dtype], torch.Tensor]


@pytest.fixture(params=["sm80", "sm90"])
def emulated(request: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[[Call], torch.Tensor]:
    """Makes a call whose attention the emulated kernels compute, all of it."""

    def emulator(problem: Problem) -> Backend:
        found = dispatch.get("emulator")
        assert found.supports(problem) is None, found.supports(problem)
        return found

    def run(call: Call) -> torch.Tensor:
        with monkeypatch.context() as patch:
            patch.setenv("STROBE_EMULATE", request.param)
            patch.setattr(dispatch, "_fastest", emulator)
            patch.setattr(bound_call, "remembered", bound_call._Remembered())
            return call(torch.bfloat16)

    return run


def judge(call: Call, emulated: Callable[[Call], torch.Tensor]) -> None:
    exact, plain = call(torch.float64), call(torch.bfloat16)
    tolerance.check("out", emulated(call), exact, plain)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    """Exact in bf16, so that every dtype sees the same inputs."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16().double()


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"causal": True, "window_size": (20, 0)}], ids=str)
@pytest.mark.parametrize("function", [flash_attn.flash_attn_with_kvcache, fa3.flash_attn_with_kvcache])
@pytest.mark.parametrize("len_q", [1, 5])
def test_a_cache_in_use_up_to_different_lengths(
    len_q: int, function: Any, options: dict[str, Any], emulated: Callable[[Call], torch.Tensor]
) -> None:
    used = [70, 5, 100]
    caches = [random(3, 100, HEADS_K, DIM, seed=s) for s in (1, 2)]
    for cache in caches:
        for i, n in enumerate(used):
            cache[i, n:] = torch.nan
    q = random(3, len_q, HEADS, DIM)

    def call(dtype: torch.dtype) -> torch.Tensor:
        seqlens = torch.tensor(used, dtype=torch.int32)
        return function(q.to(dtype), *(c.to(dtype) for c in caches), cache_seqlens=seqlens, **options)

    judge(call, emulated)


def test_packed_sequences_of_which_the_first_rows_are_used(emulated: Callable[[Call], torch.Tensor]) -> None:
    cu = torch.tensor([0, 40, 110], dtype=torch.int32)
    used = torch.tensor([33, 70], dtype=torch.int32)
    q, k, v = (random(110, h, DIM, seed=s) for s, h in enumerate((HEADS, HEADS_K, HEADS_K)))

    def call(dtype: torch.dtype) -> torch.Tensor:
        x = (t.to(dtype) for t in (q, k, v))
        out = fa3.flash_attn_varlen_func(*x, cu, cu, 70, 70, seqused_k=used, causal=True)
        return out[0] if isinstance(out, tuple) else out

    judge(call, emulated)


def test_gradients_of_packed_sequences_whose_last_queries_are_not_in_use(
    emulated: Callable[[Call], torch.Tensor],
) -> None:
    cu = torch.tensor([0, 40, 110], dtype=torch.int32)
    used = torch.tensor([3, 65], dtype=torch.int32)
    x = [random(110, h, DIM, seed=s) for s, h in enumerate((HEADS, HEADS_K, HEADS_K))]
    dout = random(110, HEADS, DIM, seed=4)

    def call(dtype: torch.dtype) -> torch.Tensor:
        q, k, v = (t.to(dtype).requires_grad_() for t in x)
        out = fa3.flash_attn_varlen_func(q, k, v, cu, cu, 70, 70, seqused_q=used, causal=True)
        dq, dk, dv = torch.autograd.grad(out, (q, k, v), dout.to(dtype))
        assert not out[3:40].any() and not dq[3:40].any()
        return torch.cat((out, dq, dk, dv), dim=1).detach()

    judge(call, emulated)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("window", [None, 16])
def test_padded_batches_of_transformers(
    window: int | None, side: str, emulated: Callable[[Call], torch.Tensor]
) -> None:
    pytest.importorskip("transformers")
    from transformers import masking_utils

    from strobe.compat.transformers import masks
    from strobe.compat.transformers.attention import attention

    length, tokens = 70, torch.ones(3, 70, dtype=torch.bool)
    for i, n in enumerate((0, 9, 64)):
        tokens[i, slice(0, n) if side == "left" else slice(length - n, length)] = False
    function = (
        masking_utils.sliding_window_causal_mask_function(window) if window else masking_utils.causal_mask_function
    )
    mask = masks.mask(3, length, length, mask_function=function, attention_mask=tokens)
    assert mask.positions is not None and mask.padding is None
    q, k, v = (random(3, h, length, DIM, seed=s) for s, h in enumerate((HEADS, HEADS_K, HEADS_K)))

    def call(dtype: torch.dtype) -> torch.Tensor:
        return attention(torch.nn.Module(), *(t.to(dtype) for t in (q, k, v)), mask)[0][tokens]

    judge(call, emulated)

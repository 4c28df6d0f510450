"""Measure what the way through transformers costs beside the call itself."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import strobe  # noqa: E402
from strobe.compat.transformers import masks  # noqa: E402
from strobe.compat.transformers.attention import attention  # noqa: E402

MOST = 25e-6  # seconds a layer
SHARE = 0.5  # of the call itself, on a machine on which everything takes longer: 0.32 to 0.40 beside another test


def timed(function: Callable[[], Any], calls: int = 50) -> float:
    """CPU time, because other tests run beside this one."""
    start = time.thread_time()
    for _ in range(calls):
        function()
    return (time.thread_time() - start) / calls


@pytest.mark.parametrize("with_mask", [True, False])
def test_a_layer_costs_little_more_than_the_call(with_mask: bool) -> None:
    q = torch.randn(1, 4, 4, 8)
    k, v = torch.randn(2, 1, 2, 4, 8)
    layer = torch.nn.Module()
    mask = masks.mask(1, 4, 4) if with_mask else None

    def through_transformers() -> None:
        attention(layer, q, k, v, mask, dropout=0.0, scaling=0.35)

    def called() -> None:
        strobe.attention(*(t.transpose(1, 2) for t in (q, k, v)), mask=strobe.causal, scale=0.35)

    with torch.no_grad():
        found = [(timed(through_transformers), timed(called)) for _ in range(100)]
    ours, plain = (min(times) for times in zip(*found, strict=True))
    assert ours - plain <= max(MOST, SHARE * plain), f"{1e6 * ours:.1f} µs against {1e6 * plain:.1f} µs"

"""Kernels that read a bias, a mask tensor or captured tensors compile, and at most a few registers do not fit."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import cubins
import pytest
import torch
from everyday import everyday
from fake_gpu import H200

import strobe
from strobe.cuda.parts.kernel import KernelSpec
from strobe.cuda.parts.plan import Launch
from strobe.cuda.plans.families import FAMILIES
from strobe.cuda.runtime import jit
from strobe.problem import supposed
from strobe.variants.score import identity

pytestmark = pytest.mark.skipif(jit.nvrtc_status() is not None, reason=str(jit.nvrtc_status()))

IDS = torch.empty(2, 1024, dtype=torch.int32, device="meta")
SLOPES = torch.empty(8, device="meta")
DOCUMENTS = identity.hiding(strobe.mask_function(lambda b, h, q, k: (IDS[b, q] == IDS[b, k]) & ((q - k) // 5 % 3 != 1)))
CALLS: dict[str, dict[str, Any]] = {
    "bias": {"bias": (2, 8, 1024, 1024)},
    "bias_of_keys": {"bias": (2, 1, 1, 1024), "mask": strobe.causal},
    "mask": {"mask": (2, 1, 1024, 1024)},
    "documents": {"score": DOCUMENTS},  # with a map of blocks
    "alibi": {"score": strobe.alibi(SLOPES), "mask": strobe.causal},
    "learnt_alibi": {"score": strobe.alibi(SLOPES), "mask": strobe.causal},
    "learnt_table": {"score": strobe.relative_bias(torch.empty(8, 511, device="meta"))},
    "learnt_decay": {"score": strobe.score_function(lambda s, b, h, q, k: s * SLOPES[h] ** (q - k).abs())},
}
EVERYDAY = [
    "sm90 64 bias",
    "sm90 128 documents",
    "sm80 128 bias",
    "sm90 128 learnt_table",
]


def spills(arch: str, kernel: KernelSpec) -> bool:
    return stack(arch, kernel) > 0


@functools.cache
def stack(arch: str, kernel: KernelSpec) -> int:
    return cubins.inspect(jit.get(kernel.source, arch, name=kernel.name).cubin)[kernel.entry].stack_frame


def launches(family: str, dim: int, call: str) -> list[Launch]:
    machine = replace(H200, arch="sm_80" if family == "sm80" else H200.arch)
    machine = replace(machine, spills=functools.partial(spills, machine.arch))
    shape, strides = (2, 1024, 8, dim), (1024 * 8 * dim, dim, 8 * dim)
    given: tuple[Any, ...] = (torch.device("cuda"), torch.bfloat16, shape, shape, shape)
    plain = supposed(*given, **CALLS[call])
    forward = FAMILIES[family].planner(plain).plan(plain, {"o": strides}, machine)
    more = {"bias": "bias", "bias_of_keys": "bias", **dict.fromkeys((c for c in CALLS if "learnt" in c), "score0")}
    gradients = ("q", "k", "v", *([more[call]] if call in more else []))
    problem = supposed(*given, gradients=gradients, **CALLS[call])
    if "learnt" in call and (family, dim) == ("sm90", 256):
        assert "head dim" in str(FAMILIES[family].limits(problem))
        return list(forward.launches)
    assert FAMILIES[family].limits(problem) is None
    of: dict[str, Any] = dict.fromkeys(("o", "d_o", "dq", "dk", "dv"), strides)
    of["dbias"] = (0, 0, 0, 1)
    return [*forward.launches, *FAMILIES[family].planner(problem).plan(problem, of, machine).launches]


@pytest.mark.parametrize(
    "name", everyday([f"{f} {d} {c}" for f in ("sm90", "sm80") for d in (64, 128, 256) for c in CALLS], EVERYDAY)
)
def test_they_compile(name: str) -> None:
    family, dim, call = name.split()
    for launch in launches(family, int(dim), call):
        assert stack("sm_80" if family == "sm80" else "sm_90a", launch.kernel) <= 64, launch.kernel.name
        launch.kernel.params.pack(
            {
                **dict.fromkeys((f.name for f in launch.kernel.params.fields if f.is_address), 0),
                **launch.values,
            }
        )

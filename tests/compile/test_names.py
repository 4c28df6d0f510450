"""A cubin holds one kernel, under the name that profilers show; a table of hashes does not depend on that name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import cubins
import pytest
import replay
import torch
from fake_gpu import H200

import strobe
from strobe.cuda import append, merge
from strobe.cuda.parts.kernel import KernelSpec
from strobe.cuda.plans.families import FAMILIES
from strobe.cuda.runtime import jit
from strobe.problem import supposed
from strobe.variants.score import identity

pytestmark = pytest.mark.skipif(jit.nvrtc_status() is not None, reason=str(jit.nvrtc_status()))


def of_a_call(family: str, dtype: torch.dtype = torch.bfloat16, **options: Any) -> list[KernelSpec]:
    shape, strides = (1, 1024, 2, 64), (1024 * 128, 64, 128)
    problem = supposed(torch.device("cuda"), dtype, shape, shape, shape, **options)
    machine = replace(H200, arch="sm_80") if family == "sm80" else H200
    planner = FAMILIES[family].planner(problem)
    of = dict.fromkeys(("o", "d_o", "dq", "dk", "dv"), strides)
    return [launch.kernel for launch in planner.plan(problem, of, machine).launches]


def of_small_calls() -> list[KernelSpec]:
    new, pool, lse = torch.empty(3, 2, 64).half(), torch.empty(5, 4, 2, 64).half(), torch.empty(2, 3)
    plans = [
        append.plan(new, new, pool, pool, torch.zeros(3).long(), None, "sm_80"),
        merge.plan([new], [lse], None, new, lse, "sm_80"),
    ]
    return [launch.kernel for plan in plans if plan is not None for launch in plan.launches]


THIRDS = identity.hiding(strobe.mask_function(lambda b, h, q, k: (q - k) % 3 == 0))
CALLS = {
    "forward": (lambda: of_a_call("sm80", mask=strobe.causal), ["strobe_forward_sm80_bf16_d64_causal"]),
    "backward": (
        lambda: of_a_call("sm80", mask=strobe.causal, gradients=("q", "k", "v")),
        ["strobe_backward_delta", "strobe_backward_sm80_bf16_d64_causal", "strobe_convert_dq_sm80"],
    ),
    "function": (
        lambda: of_a_call("sm90", score=THIRDS),
        ["strobe_block_map", "strobe_forward_sm90_bf16_d64_sparse_function"],
    ),
    "small": (of_small_calls, ["strobe_append", "strobe_merge"]),
}


@pytest.mark.parametrize("call", CALLS)
def test_the_kernel_of_a_cubin_has_the_name(call: str) -> None:
    kernels, names = CALLS[call]
    found = [set(cubins.inspect(jit.get(k.source, k.arch, name=k.name).cubin)) for k in kernels()]
    assert found == [{name} for name in names]


def test_a_rename_does_not_change_the_hash() -> None:
    (kernel,) = of_a_call("sm80", mask=strobe.causal)
    (other,) = of_a_call("sm80")
    hashes = {}
    for source, entry in ((kernel.source, kernel.entry), (other.source, other.entry)):
        for name in (entry, "kernel", "a_longer_name_than_" + entry):
            renamed = source.replace(f" {entry}(", f" {name}(")
            hashes[name, entry] = replay.code_hash(jit.compile(renamed, "sm_80").cubin, name)
    assert len(hashes) == 6 and len(set(hashes.values())) == 2

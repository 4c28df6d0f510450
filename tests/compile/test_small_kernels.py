"""The kernels beside attention compile for every architecture, and nothing spills."""

from __future__ import annotations

import cubins
import pytest
import torch
from everyday import everyday

from strobe.cuda import append, merge
from strobe.cuda.parts.kernel import KernelSpec
from strobe.cuda.runtime import jit
from strobe.paged import Rotary

pytestmark = pytest.mark.skipif(jit.nvrtc_status() is not None, reason=str(jit.nvrtc_status()))
ARCHS = ("sm_80", "sm_89", "sm_90a", "sm_100", "sm_120")


def kernels(arch: str) -> list[KernelSpec]:
    new, pool, slots = torch.empty(3, 2, 64).half(), torch.empty(5, 4, 2, 64).half(), torch.zeros(3).long()
    tables = [torch.empty(9, 16), torch.empty(9, 16).half()]
    rotary = [None, *(Rotary(t, t, at, i) for t in tables for i in (False, True) for at in (slots, slots.int()))]
    plans = [append.plan(new, new, pool, pool, slots, turn, arch) for turn in rotary]
    lse, sinks = torch.empty(2, 3), torch.empty(2)
    for parts, sink, dtype in ((1, None, torch.float16), (2, sinks, torch.float32), (8, sinks.half(), torch.float32)):
        outs = [new.to(dtype)] * parts
        plans += [merge.plan(outs, [lse] * parts, sink, out, lse, arch) for out in (new, new.float())]
    return [launch.kernel for plan in plans if plan is not None for launch in plan.launches]


@pytest.mark.parametrize("arch", everyday(ARCHS, ["sm_80", "sm_90a"]))
def test_they_compile(arch: str) -> None:
    found = kernels(arch)
    assert len(found) == 15
    for kernel in found:
        cubin = jit.get(kernel.source, arch, name=kernel.name).cubin
        assert not cubins.inspect(cubin)[kernel.entry].stack_frame, kernel.name

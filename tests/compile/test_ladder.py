"""Every rung compiles for the GPUs that it is made for, and spills nothing."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import cubins
import pytest

from strobe.cuda.parts.architecture import SMEM_BYTES
from strobe.cuda.runtime import jit, ptxas_log
from strobe.learn.ladder.rung import PARAMS, Rung
from strobe.learn.ladder.rungs import RUNGS

pytestmark = pytest.mark.skipif(jit.nvrtc_status() is not None, reason=str(jit.nvrtc_status()))
WANTED = [(rung, "sm_90a" if rung.hopper else "sm_80", dim) for rung in RUNGS if not rung.library for dim in (64, 128)]


def test_rungs_compile_without_spills() -> None:
    def build(wanted: tuple[Rung, str, int]) -> jit.Artifact:
        rung, arch, dim = wanted
        return jit.get(rung.source(dim), arch, name=rung.name)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        built = list(pool.map(build, WANTED))
    for (rung, arch, dim), artifact in zip(WANTED, built, strict=True):
        info = cubins.inspect(artifact.cubin)["kernel"]
        what = f"{rung.name}, {arch}, head dim {dim}"
        assert not info.stack_frame and not ptxas_log.spills(artifact.log), what
        assert not ptxas_log.warnings(artifact.log), f"{what}: {ptxas_log.warnings(artifact.log)}"
        assert [size for _, size in info.params] == [PARAMS.size], what
        assert rung.smem(dim) <= SMEM_BYTES["sm_90" if rung.hopper else "sm_80"], what
        assert info.registers * rung.threads <= 65536, what

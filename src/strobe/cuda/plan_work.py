"""The work of paged calls, planned on the device before the kernel that does it: a list of items in memory, so that neither
lengths nor tables are ever read back (kernels/plan_work.cuh).

`strobe.paged.Plan` keeps lists for several calls; without one each call makes its own.
"""

from __future__ import annotations

from strobe.cuda.features import Features
from strobe.cuda.kernel import TemplateKernel
from strobe.cuda.params import COUNTERS, Field, params
from strobe.cuda.plan import Launch
from strobe.cuda.rows import Rows
from strobe.cuda.scores import Scores
from strobe.cuda.shared_memory import Region, SharedMemory
from strobe.problem import Problem

THREADS = 1024
RECORD = 32  # bytes
FIELDS = [Field("work", "const int*")]  # of the kernel that follows
_OWN = [Field("work", "u32*"), Field("pieces", "int")]
NAME = "plan_work"


def pieces(sms: int, consumers: int) -> int:
    """One for each block of the kernel that follows: as many as run at once, with a counter for each consumer of a slot."""
    return min(sms, (COUNTERS - 1) // (2 * consumers))


def launch(
    problem: Problem, features: Features, arch: str, block_m: int, block_n: int, pack: int, count: int
) -> Launch:
    """For tiles of `block_m` rows and blocks of `block_n` keys, cut into `count` pieces."""
    kernel = _kernel(features, arch, block_m, block_n, pack)
    own = {"mask": Scores.values(problem)["mask"], "pieces": count}
    return Launch(kernel, problem.heads, {**features.rows.values(problem, tma=False), **own})


def list_bytes(problem: Problem, block_m: int, count: int) -> int:
    """A record for each piece, and for each item: tiles, of which each sequence may end with one that is not full, and cuts."""
    rows = problem.q.total // block_m + problem.batch
    return RECORD * (2 * count + problem.heads * rows)


def _kernel(features: Features, arch: str, block_m: int, block_n: int, pack: int) -> TemplateKernel:
    config = {**features.rows.config(pack), "kBlockM": block_m, "kBlockN": block_n, "kThreads": THREADS}
    mask = [f for f in Scores.FIELDS if f.name == "mask"]
    return TemplateKernel(
        name=f"plan_work[{features.scores.mask.name} {block_m}x{block_n} {features.rows.queries}]",
        arch=arch,
        params=params(Rows.fields(tma=False, paged=True), mask, _OWN),
        threads=THREADS,
        smem=256,
        header=NAME,
        template=NAME,
        element=features.element,
        config=tuple(config.items()),
        memory=SharedMemory([Region("sums", 128, 2)]),
        types=features.types()[:1],  # the mask
    )

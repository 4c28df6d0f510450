"""`strobe bench --suite context-parallel`: every method of `strobe.distributed.attention` on the ranks there are, beside
one process that does it all; and what cutting costs by itself, without any transfer.

    torchrun --nproc-per-node 4 -m strobe bench --suite context-parallel

Without torchrun there is one rank: then the methods show what they add to `strobe.attention`.
"""

from __future__ import annotations

import contextlib
import functools
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import strobe
from strobe.distributed import Counted, ShardPlan, attention, shard
from strobe.distributed.choose_method import rank_of
from strobe.distributed.cost import Shape, possible, sent
from strobe.distributed.method import Task
from strobe.distributed.step import Keys, Rest, State
from strobe.distributed.transport import GroupTransport
from strobe.measure import units
from strobe.problem.arguments import Arguments

ALONE = "one process"
TIMEOUT = timedelta(minutes=5)


@dataclass(frozen=True)
class Size:
    length: int
    heads: int
    heads_k: int
    dim: int
    dtype: torch.dtype
    shards: int = 4  # of the measurement without transfers

    @property
    def shape(self) -> Shape:
        return Shape(self.heads, self.heads_k, self.dim, self.dim, self.dtype.itemsize)


SIZES = {
    "cpu": Size(2048, 8, 2, 64, torch.float32),
    "cuda": Size(32768, 32, 8, 128, torch.bfloat16),
}


@dataclass(frozen=True)
class Row:
    method: str
    ranks: int
    forward_ms: float  # of the slowest rank, the median of several calls
    both_ms: float  # with the backward pass
    sent: int = 0  # bytes of the rank that sends most, forward and backward, counted
    on_paper: int = 0  # what `strobe.distributed.cost` says


@dataclass(frozen=True)
class Cut:
    """All steps of all ranks, one after the other on one device, against one call."""

    shards: int
    forward: float  # time of one call by time of the steps: 1 is no loss
    both: float


@contextlib.contextmanager
def group_of(device: torch.device) -> Iterator[Any]:
    """The process group of torchrun, or one of this process alone."""
    if dist.is_initialized():
        yield dist.group.WORLD
        return
    backend = "nccl" if device.type == "cuda" else "gloo"
    if dist.is_torchelastic_launched():
        dist.init_process_group(backend, timeout=TIMEOUT)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=TIMEOUT)
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def measure(group: Any, device: torch.device, size: Size, seed: int = 0, calls: int = 5) -> list[Row]:
    """Measure, and return the same rows on every rank; `ALONE` is timed by the first rank while the others wait."""
    ranks, plan = group.size(), ShardPlan(size.length, ranks=group.size(), mask=strobe.causal)
    whole = _inputs(size, device, seed)
    rows = [_alone(group, whole, calls)]
    inner = 2 if ranks >= 4 and ranks % 2 == 0 else None
    names = [(name, None) for name in possible(plan, size.shape)]
    for name, across in [*names, *([("hybrid", inner)] if inner else [])]:
        mesh = init_device_mesh(device.type, (ranks // across, across)) if across else None
        groups = [group] if mesh is None else [mesh.get_group(i) for i in range(2)]
        counted = [Counted(GroupTransport(g)) for g in groups]
        mine = shard(plan, *whole, rank=rank_of(counted))

        def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, name: str = name, over: Any = counted) -> Any:
            mesh = tuple(over) if len(over) == 2 else over[0]
            return attention(q, k, v, mesh=mesh, plan=plan, method=name, check=False)

        forward, both = (_time(group, device, _passes(call, mine, g), calls) for g in (False, True))
        most = _largest(group, _bytes(counted, _passes(call, mine, True)))
        paper = max(s.forward + s.backward for s in sent(plan, size.shape, name, inner=across))
        rows.append(Row(name, ranks, forward, both, int(most), paper))
    return rows


def _inputs(size: Size, device: torch.device, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    heads = (size.heads, size.heads_k, size.heads_k)
    return [torch.randn(1, size.length, h, size.dim, generator=generator).to(device, size.dtype) for h in heads]


def _passes(call: Callable[..., Any], tensors: Any, gradients: bool) -> Callable[[], Any]:
    if not gradients:
        return lambda: call(*tensors)
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    dout = torch.ones_like(leaves[0])
    return lambda: torch.autograd.grad(call(*leaves), leaves, dout)


def _alone(group: Any, whole: list[torch.Tensor], calls: int) -> Row:
    times = [0.0, 0.0]
    if group.rank() == 0:
        call = lambda q, k, v: strobe.attention(q, k, v, mask=strobe.causal)  # noqa: E731
        times = [_median(whole[0].device, _passes(call, whole, gradients), calls) for gradients in (False, True)]
    forward, both = (_largest(group, t) for t in times)
    return Row(ALONE, 1, forward, both)


def _time(group: Any, device: torch.device, call: Callable[[], Any], calls: int) -> float:
    return _largest(group, _median(device, call, calls, lambda: _largest(group, 0.0)))


def _median(
    device: torch.device, call: Callable[[], Any], calls: int, before: Callable[[], Any] = lambda: None
) -> float:
    """Milliseconds, after one call that nobody counts. `before` each call ranks meet."""
    times = []
    for _ in range(calls + 1):
        before()
        wait_for(device)
        start = time.perf_counter()
        call()
        wait_for(device)
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times[1:])


def wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _bytes(transports: list[Counted], call: Callable[[], Any]) -> int:
    before = sum(t.sent for t in transports)
    call()
    return sum(t.sent for t in transports) - before


def _largest(group: Any, value: float) -> float:
    """Return the largest value of all ranks; whoever is early waits."""
    device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    largest = torch.tensor([value], dtype=torch.float64, device=device)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    return float(largest)


def cut(device: torch.device, size: Size, seed: int = 0) -> Cut:
    """Measure what many smaller calls, their merges and their sums cost on one device. All of them run back to back, as
    in a model: a call for which the host waits would count the host's way to its first launch."""
    whole = _inputs(size, device, seed)
    plan = ShardPlan(size.length, ranks=size.shards, mask=strobe.causal)
    attend: Callable[..., Any] = functools.partial(strobe.attention, mask=strobe.causal)
    with torch.no_grad():
        shards = [shard(plan, *whole, rank=rank) for rank in range(plan.ranks)]  # untimed: ranks hold their shards
        out, lse = attend(*whole, return_lse=True)
        rest = Rest(out, lse, torch.ones_like(out), None)
        forward, backward = (lambda: _forward(plan, shards)), (lambda: _backward(plan, whole, rest))
        one, steps, steps_back = _back_to_back(device, (lambda: attend(*whole), forward, backward))
    (one_both,) = _back_to_back(device, (_passes(attend, whole, True),))
    return Cut(size.shards, one / steps, one_both / (steps + steps_back))


def _back_to_back(device: torch.device, calls: Sequence[Callable[[], Any]]) -> list[float]:
    """Milliseconds of each call: medians over turns of half a second, after a first one that nobody counts."""
    times: list[list[float]] = [[] for _ in calls]
    ahead = 10 if device.type == "cuda" else 1  # by so many calls the host may be ahead
    for _ in range(4):
        for call, turns in zip(calls, times, strict=True):
            wait_for(device)
            start, done = time.perf_counter(), 0
            while not done or time.perf_counter() - start < 0.5:
                for _ in range(ahead):
                    call()
                wait_for(device)
                done += ahead
            turns.append(1e3 * (time.perf_counter() - start) / done)
    return [statistics.median(turns[1:]) for turns in times]


def _steps(plan: ShardPlan, rank: int) -> tuple[Task, Any]:
    """Return the steps of a rank, each with the shard that its keys come from, in the order of a ring."""
    task = Task(plan, rank, Arguments(None, None, None))
    sources = [(rank - distance) % plan.ranks for distance in range(plan.ranks)]
    return task, [(source, task.step(plan.shards[source])) for source in sources]


def _forward(plan: ShardPlan, shards: list[tuple[torch.Tensor, ...]]) -> None:
    for rank, (q, _, _) in enumerate(shards):
        task, steps = _steps(plan, rank)
        state = State(q, q.shape[-1])
        last = task.last_calls([step for _, step in steps])
        for (source, step), calls in zip(steps, last, strict=True):
            step.forward(task.steps, q, Keys(*shards[source][1:]), state, calls)
        task.finished(state)


def _backward(plan: ShardPlan, whole: list[torch.Tensor], rest: Rest) -> None:
    for rank in range(plan.ranks):
        q, out, dout = shard(plan, whole[0], rest.out, rest.dout, rank=rank)
        (lse,) = shard(plan, rest.lse, rank=rank, dim=2)
        task, steps = _steps(plan, rank)
        dq = torch.zeros_like(q, dtype=torch.float32)
        for source, step in steps:
            keys = Keys(*shard(plan, *whole[1:], rank=source))
            dkeys = Keys(*(torch.zeros_like(t, dtype=torch.float32) for t in keys))
            step.backward(task.steps, q, keys, Rest(out, lse, dout, None), dq, dkeys)


def run(device: torch.device, out: Path | None = None, seed: int = 0) -> Iterator[str]:
    """Measures, writes `out` as JSON, and gives a table; nothing on all ranks but the first."""
    size = SIZES[device.type]
    with group_of(device) as group:
        if device.type == "cuda":
            device = torch.device("cuda", dist.get_node_local_rank(0))
            torch.cuda.set_device(device)
        rows = measure(group, device, size, seed)
        if group.rank():
            return
        steps = cut(device, size, seed)
    if out is not None:
        content = {"size": asdict(size) | {"dtype": str(size.dtype)}, "rows": [asdict(r) for r in rows]}
        out.write_text(json.dumps(content | {"cut": asdict(steps), "torch": torch.__version__}, indent=1) + "\n")
    yield table(size, rows, steps)


def table(size: Size, rows: list[Row], steps: Cut) -> str:
    heads = f"{size.heads} heads on {size.heads_k}, dim {size.dim}, {str(size.dtype).removeprefix('torch.')}"
    lines = [
        f"{size.length:,} tokens, causal, {heads}; {_ranks(rows[-1].ranks)}",
        f"{'method':>12}  {'forward':>9}  {'and backward':>12}  {'sent':>9}  {'on paper':>9}",
    ]
    for r in rows:
        times = f"{units.milliseconds(r.forward_ms):>9}  {units.milliseconds(r.both_ms):>12}"
        lines.append(f"{r.method:>12}  {times}  {units.traffic(r.sent):>9}  {units.traffic(r.on_paper):>9}")
    kept = f"{100 * steps.forward:.1f} % forward, {100 * steps.both:.1f} % forward and backward"
    lines.append(f"all steps of {steps.shards} shards on one device run at {kept} of the speed of one call")
    return "\n".join(lines) + "\n"


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"

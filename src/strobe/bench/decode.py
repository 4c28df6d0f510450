"""`strobe bench --suite decode`: attention to caches, in one piece and in pages, against the time that reading their bytes
takes.

Reading is a sum over the whole cache by PyTorch, in the same turns: 100 %. On a GPU each way is one CUDA graph that goes
through several caches, more than fit into the L2, and graphs are replayed in turns. Each way's result is compared with
float64 first.
"""

from __future__ import annotations

import contextlib
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from strobe.bench.decode_cases import Batch, Cache, Size, Way, batches, ways
from strobe.bench.provider import Refusal
from strobe.measure import provenance, units
from strobe.measure.tolerance import Verdict, compare, summation_floor
from strobe.variants.mask import causal

READ = "read only"
SIZES = {
    "cpu": Size(4, 2, 32, torch.float32, divisor=32),
    "cuda": Size(32, 8, 128, torch.bfloat16, rotated=2 << 30),
}
TURNS = {"cpu": 5, "cuda": 50}
CALL_LIMIT_S = 3.0  # whoever takes longer for one call is not timed


@dataclass(frozen=True)
class Row:
    batch: str
    way: str
    us: float | None = None  # the median of the turns
    tb_per_s: float | None = None  # of the keys and values that the way has to read, each once
    of_reading: float | None = None  # share of the bandwidth of `READ`
    error: float | None = None  # the largest, against float64
    note: str | None = None  # why there is no time


# ---- exactness


def _textbook(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """(queries, heads, dim), causal, by PyTorch in the dtype of the inputs; a key head at a time."""
    group = q.shape[1] // k.shape[1]
    hidden = ~causal.dense(len(q), len(k), device=q.device)
    outs = []
    for head in range(k.shape[1]):
        rows = q[:, head * group : (head + 1) * group].transpose(0, 1)
        s = (rows @ k[:, head].T / math.sqrt(q.shape[-1])).masked_fill_(hidden, -torch.inf)
        outs.append(s.softmax(-1) @ v[:, head])
    return torch.cat(outs).transpose(0, 1)


def checked(out: torch.Tensor, cache: Cache, batch: Batch, page: int) -> Verdict:
    """A result (total, heads, dim) against float64."""
    results, exact, same = out.split(list(batch.queries)), [], []
    for i, q in enumerate(cache.q.split(list(batch.queries))):
        k, v = cache.keys(batch, page, i)
        exact.append(_textbook(q.double(), k.double(), v.double()))
        same.append(_textbook(q, k, v))
    # A batch may have so few numbers that PyTorch's largest error among them is a lucky one.
    return compare("out", results, exact, same, floor=summation_floor(exact, 4, torch.float32))


# ---- time


class _Calls:
    """One call after the other. A graph replays addresses, so whatever it reads is kept as long as it lives: the calls, and
    with them the tables."""

    def __init__(self, calls: Sequence[Callable[[], Any]], device: torch.device) -> None:
        self.calls, self.device, self.graph = list(calls), device, None
        if device.type != "cuda":
            self.run()
            return
        beside = torch.cuda.Stream(device)
        beside.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(beside):
            self.run()
        torch.cuda.synchronize(device)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.results = [call() for call in self.calls]

    def run(self) -> None:
        for call in self.calls:
            call()

    def microseconds(self) -> float:
        """Run once and return the time of one call, on average."""
        if self.graph is None:
            start = time.perf_counter()
            self.run()
            return 1e6 * (time.perf_counter() - start) / len(self.calls)
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        self.graph.replay()
        after.record()
        after.synchronize()
        return 1e3 * before.elapsed_time(after) / len(self.calls)


def _one_call(call: Callable[[], Any], device: torch.device) -> float:
    """Seconds, host included, of a call that has been made before."""
    start = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def _in_turns(ready: dict[str, _Calls], turns: int) -> dict[str, float]:
    """Medians, after two turns that nobody counts. The order alternates."""
    samples: dict[str, list[float]] = {name: [] for name in ready}
    for turn in range(turns + 2):
        for name in list(ready) if turn % 2 else reversed(list(ready)):
            us = ready[name].microseconds()
            if turn >= 2:
                samples[name].append(us)
    return {name: statistics.median(times) for name, times in samples.items()}


def _compiled(chosen: Sequence[Way], cache: Cache) -> None:
    """One call of each way, side by side, since kernels are compiled in it. What fails does so again when it is measured."""

    def one(way: Way) -> None:
        with contextlib.suppress(Exception), torch.no_grad():
            way.call(cache)()

    if cache.q.device.type == "cuda":
        with ThreadPoolExecutor(len(chosen)) as pool:
            list(pool.map(one, chosen))
        torch.cuda.synchronize(cache.q.device)


@torch.no_grad()
def measure(batch: Batch, size: Size, device: torch.device, seed: int = 0, turns: int = 5) -> list[Row]:
    whole = batch.rows * size.row_bytes
    caches = [Cache.of(batch, size, device, seed + i) for i in range(max(1, -(-size.rotated // whole)))]
    ready = {READ: _Calls([c.kv.view(torch.float32).sum for c in caches], device)}
    verdicts: dict[str, Verdict] = {}
    notes: dict[str, str] = {}
    chosen = ways(batch, size)
    _compiled(chosen, caches[0])
    for way in chosen:
        try:
            calls = [way.call(c) for c in caches]
            verdicts[way.name] = verdict = checked(calls[0](), caches[0], batch, way.page)
            if not verdict.passed:
                raise Refusal("wrong", f"wrong: {verdict}")
            if (seconds := _one_call(calls[0], device)) > CALL_LIMIT_S:
                raise Refusal("slow", f"not timed: a call takes {seconds:.1f} s, more than {CALL_LIMIT_S:.0f} s")
            ready[way.name] = _Calls(calls, device)
        except Refusal as refused:
            notes[way.name] = refused.reason
        except Exception as error:  # a peer's, or out of memory: a result to record
            notes[way.name] = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
    times = _in_turns(ready, turns)
    reading = whole / times[READ]
    return [Row(batch.name, READ, times[READ], reading / 1e6, 1.0)] + [
        _row(batch, way, size, times.get(way.name), reading, verdicts.get(way.name), notes.get(way.name))
        for way in chosen
    ]


def _row(
    batch: Batch, way: Way, size: Size, us: float | None, reading: float, verdict: Verdict | None, note: str | None
) -> Row:
    error = None if verdict is None or verdict.problem else verdict.largest
    if us is None:
        return Row(batch.name, way.name, error=error, note=note)
    rate = way.read * size.row_bytes / us
    return Row(batch.name, way.name, us, rate / 1e6, rate / reading, error)


# ---- what it says


def comparisons(rows: Sequence[Row]) -> dict[str, float]:
    """Ratios that people ask for; those whose times are missing are left out."""
    by = {(r.batch, r.way): r for r in rows if r.us is not None}
    ratios: dict[str, float] = {}

    def ratio(title: str, better: tuple[str, str], worse: tuple[str, str], what: str = "us") -> None:
        if better in by and worse in by:
            ratios[title] = getattr(by[worse], what) / getattr(by[better], what)

    for name in dict.fromkeys(r.batch for r in rows):
        ratio(f"{name}: contiguous against cuDNN, speed", (name, "contiguous"), (name, "cuDNN, contiguous"))
        for page in (1, 16, 64, 256):
            ratio(f"{name}: page {page} against contiguous, speed", (name, f"page {page}"), (name, "contiguous"))
        ratio(f"{name}: 4 queries against 1, page 64, speed", (f"{name}-4-queries", "page 64"), (name, "page 64"))
    ratio("skewed against uniform lengths, bandwidth", ("uniform", "page 64"), ("skewed", "page 64"), "tb_per_s")
    ratio("mixed batch against two calls, time", ("mixed", "two calls, page 64"), ("mixed", "page 64"))
    for name in dict.fromkeys(r.batch for r in rows):
        ratio(f"{name}: invariant against default, time", (name, "page 64"), (name, "invariant, page 64"))
    for apart in ("in each table", "a copy for each"):
        ratio(f"gain of sharing a prompt: {apart}", ("cascade", "shared, page 64"), ("cascade", f"{apart}, page 64"))
    return ratios


def _heading(size: Size) -> str:
    heads = f"{size.heads} heads on {size.heads_k}, dim {size.dim}, {str(size.dtype).removeprefix('torch.')}"
    return f"{heads}; bandwidth of keys and values, each read once; 100 % is a sum over the same cache\n"


def _table(batch: Batch, rows: Sequence[Row]) -> str:
    shared = f" and {batch.shared:,} that all have in front" if batch.shared else ""
    lines = [f"{batch.name}: {sum(batch.queries):,} queries, {sum(batch.lengths):,} keys{shared}"]
    for r in rows:
        if r.us is None:
            lines.append(f"  {r.way:>22}  {r.note}")
            continue
        assert r.tb_per_s is not None and r.of_reading is not None
        rate = f"{r.tb_per_s:.2f} TB/s" if r.tb_per_s >= 0.1 else units.bandwidth(1e3 * r.tb_per_s)
        lines.append(f"  {r.way:>22}  {units.milliseconds(r.us / 1e3):>9}  {rate:>10}  {100 * r.of_reading:5.1f} %")
    return "\n".join(lines) + "\n"


def run(device: torch.device, out: Path | None = None, seed: int = 0) -> Iterator[str]:
    """Measures; gives a table of each batch and writes `out` as JSON as soon as it is there."""
    size = SIZES[device.type]
    rows: list[Row] = []
    about = {"provenance": provenance.collect(device, seed), "size": asdict(size) | {"dtype": str(size.dtype)}}
    yield _heading(size)
    for batch in batches(size.divisor):
        rows += (measured := measure(batch, size, device, seed, TURNS[device.type]))
        if out is not None:
            all_of_it = about | {"rows": [asdict(r) for r in rows], "comparisons": comparisons(rows)}
            out.write_text(json.dumps(all_of_it, indent=1) + "\n")
        yield _table(batch, measured)
    yield "".join(f"{title}: {ratio:.2f}\n" for title, ratio in comparisons(rows).items())

"""`strobe tune`: time the Hopper kernel's tiles on this machine and write down which is best.

What is best depends on ptxas as much as on the GPU. The table in cuda/tiles.py was swept like this on an H200; another
compiler may want another. STROBE_TILES=FILE makes the library use what was found.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from strobe.bench import provenance
from strobe.bench.measure import Contender, Settings, Stopwatch, interleave
from strobe.bench.statistics import geometric_mean
from strobe.cuda import backend, jit, plan
from strobe.cuda.tiles import DIMS, TileSm90, choose_sm90, tile_name
from strobe.mask import Mask, causal, full
from strobe.problem import check

TOKENS, HIDDEN = 16384, 2048  # as in the grid of the benchmark
MASKS = (full, causal)
Report = Callable[[str, int, int], None]  # what is done, step, of how many


def candidates(dim: int, dim_v: int, mask: Mask) -> list[TileSm90]:
    """The tile that is used now, and its neighbours: one switch changed at a time."""
    best = choose_sm90(dim, dim_v, mask.hi is not None)
    near = [replace(best, hold=hold) for hold in (0, 4, 8, 16, 24, 32, 40) if hold != best.hold]
    near += [replace(best, ping_pong=not best.ping_pong)]
    near += [replace(best, stages=stages) for stages in (2, 3) if stages != best.stages]
    near += [replace(best, block_n=best.block_n + step) for step in (-32, -16, 16, 32)]
    near += [replace(best, consumers=consumers) for consumers in (2, 3) if consumers != best.consumers]
    return [best, *(tile for tile in near if tile.block_n >= 32 and tile.smem(dim, dim_v) <= 227 << 10)]


def compiles(variant: plan.Variant) -> str | None:
    """None, or why a candidate is out of the question: it does not compile, or spills registers."""
    from strobe.cuda import cubin

    try:
        artifact = jit.get(variant.source, variant.arch, name=variant.name)
    except jit.CompileError:
        return "does not compile"
    warnings = cubin.warnings(artifact.log)
    return "spills" if cubin.spills(artifact.log) else warnings[0] if warnings else None


def sweep(
    dims: Sequence[tuple[int, int]],
    lengths: Sequence[int],
    device: torch.device,
    report: Report,
    settings: Settings | None = None,
) -> dict[str, Any]:
    """Every candidate at every length, full and causal, beside cuDNN; results with their provenance."""
    watch = Stopwatch(device, settings or Settings(budget_ms=40, rounds=8))
    rows: list[dict[str, Any]] = []
    total, done = len(dims) * len(lengths) * 2, 0
    for dim, dim_v in dims:
        for mask in MASKS:
            tiles = candidates(dim, dim_v, mask)
            report(f"compiling {len(tiles)} tiles for head dim {dim}/{dim_v}, {mask.name}", done, total)
            shape, whole = plan.shape_of(mask), dim % 64 == 0
            variants = [plan.Variant("sm_90a", "bf16", t, dim, dim_v, shape, whole_dims=whole) for t in tiles]
            with ThreadPoolExecutor() as pool:
                reasons = dict(zip(tiles, pool.map(compiles, variants), strict=True))
            able = [tile for tile in tiles if reasons[tile] is None]
            rows += [
                {"dim": dim, "dim_v": dim_v, "mask": mask.name, "tile": str(t), "reason": r} for t, r in reasons.items() if r
            ]
            for length in lengths:
                report(f"head dim {dim}/{dim_v}, {mask.name}, {length}", done, total)
                rows += _time(able, dim, dim_v, mask, length, watch)
                done += 1
    return {"provenance": provenance.collect(device, seed=0), "rows": rows, "best": best_tiles(rows)}


def _time(tiles: list[TileSm90], dim: int, dim_v: int, mask: Mask, length: int, watch: Stopwatch) -> list[dict[str, Any]]:
    batch, heads = max(1, TOKENS // length), max(1, HIDDEN // dim)
    q, k, v = (torch.randn(batch, length, heads, d, device=watch.device).bfloat16() for d in (dim, dim, dim_v))
    out = torch.empty_like(v)
    problem, _ = check(q, k, v, mask=mask)
    sms = torch.cuda.get_device_properties(watch.device).multi_processor_count
    contenders: dict[str, Contender] = {}
    wrong: list[dict[str, Any]] = []
    expected: torch.Tensor | None = None
    for tile in tiles:
        made = plan.plan_sm90(problem, out.transpose(1, 2).stride()[:3], sms, tile)
        call = backend.Call(made, watch.device.index or 0)
        addresses = (q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), 0, 0, 0, 0)
        out.fill_(torch.nan)
        call(*addresses)
        if expected is None:
            expected = out.clone()  # of the tile that is used now, which the tests check
        elif not torch.allclose(out, expected, rtol=0.02, atol=0.02):
            wrong.append({"dim": dim, "dim_v": dim_v, "mask": mask.name, "tile": str(tile), "reason": f"wrong at {length}"})
            continue
        contenders[str(tile)] = Contender(functools.partial(call, *addresses))
    queries, keys, values = (t.transpose(1, 2) for t in (q, k, v))
    contenders["cudnn"] = Contender(
        lambda: F.scaled_dot_product_attention(queries, keys, values, is_causal=mask is causal),
        scope=lambda: sdpa_kernel(SDPBackend.CUDNN_ATTENTION),
    )
    interleave(list(contenders.values()), watch)
    medians = {name: c.summary().median for name, c in contenders.items() if c.problem is None}
    return wrong + [
        {
            "dim": dim, "dim_v": dim_v, "mask": mask.name, "length": length, "tile": name, "ms": ms,
            "tflops": problem.flops() / ms / 1e9, "vs_cudnn": medians["cudnn"] / ms if "cudnn" in medians else None,
        }
        for name, ms in medians.items()
    ]  # fmt: skip


def best_tiles(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """For each head dim and mask the tile with the best geometric mean over the lengths, as cuda/tiles.py reads it."""
    best = {}
    masks = {mask.name: mask for mask in MASKS}
    for dim, dim_v, mask in dict.fromkeys((row["dim"], row["dim_v"], row["mask"]) for row in rows):
        timed = [row for row in rows if (row["dim"], row["dim_v"], row["mask"]) == (dim, dim_v, mask) and "ms" in row]
        cells = {row["length"] for row in timed}
        names = {str(tile): tile for tile in candidates(dim, dim_v, masks[mask])}
        means = {}
        for name in names:
            speeds = [row["tflops"] for row in timed if row["tile"] == name]
            if len(speeds) == len(cells):
                means[name] = geometric_mean(speeds)
        if means:
            winner = max(means, key=means.__getitem__)
            best[tile_name(dim, dim_v, masks[mask].hi is not None)] = asdict(names[winner])
    return best


def write(result: dict[str, Any], out: Path) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n")


def dims_of(head_dims: Sequence[int] | None) -> list[tuple[int, int]]:
    return [pair for pair in DIMS["sm90"] if not head_dims or pair[0] in head_dims]

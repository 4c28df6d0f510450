"""The table of docs/design/hopper-forward.md: what each change to the Hopper kernel was expected to bring and what it
brought, from the measurements committed beside the benchmark's results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from strobe.bench import studies
from strobe.bench.tile_speeds import means as tile_means
from strobe.measure.statistics import geometric_mean

BEGIN, END = "<!-- ledger: begin (python -m strobe.bench.docs --write) -->", "<!-- ledger: end -->"
DIMS = (64, 128, 256)
MASKS = ("full", "causal")


def means(rows: list[dict[str, Any]], dim: int, mask: str) -> dict[str, float]:
    """Tile -> the geometric mean over all lengths of its speed over cuDNN's."""
    mine = [row for row in rows if (row["dim"], row["mask"]) == (dim, mask)]
    return {row["tile"]: geometric_mean(row["vs_cudnn"]) for row in mine}


def block(root: Path) -> str:
    found = studies.load(root, "hopper-forward")
    if found is None:
        return ""
    lines = [
        f"{found['gpu']}, driver {found['driver']}, NVRTC {found['nvrtc']}, torch {found['torch']}; {found['method']}. "
        "Each cell: the best tile of that run, speed over cuDNN's in the same run, geometric mean over 512 to 16k. Runs differ "
        "by a few percent, with the clock.",
        "",
        "| change | expected | " + " | ".join(f"d{dim} {mask}" for dim in DIMS for mask in MASKS) + " |",
        "|---|---|" + "---|" * (len(DIMS) * len(MASKS)),
    ]
    for stage in found["stages"]:
        cells = [means(stage["rows"], dim, mask) for dim in DIMS for mask in MASKS]
        best = [f"{max(cell.values()):.3f}" if cell else "" for cell in cells]
        lines.append(f"| {stage['change']} | {stage['predicted']} | {' | '.join(best)} |")
    lines += ["", "One switch at a time, each pair in one run:", ""]
    lines += ["| switch | tile | mask | with | without |", "|---|---|---|---|---|"]
    for name, marker in (("skip: lazy rescaling", " skip"), ("pp: ping-pong scheduling", " pp")):
        for stage in found["stages"][1:]:
            for dim in DIMS:
                for mask in MASKS:
                    speeds = means(stage["rows"], dim, mask)
                    for tile in [t for t in speeds if marker in t and t.replace(marker, "") in speeds]:
                        other = tile.replace(marker, "")
                        lines.append(f"| {name} | d{dim} {other} | {mask} | {speeds[tile]:.3f} | {speeds[other]:.3f} |")
    method = found["experiments_method"]
    lines += ["", f"One idea at a time, speed with it over speed without, in one run ({method});"]
    lines += ["the geometric mean over the lengths that were timed, and the range:", ""]
    lines += ["| idea | expected | kept | " + " | ".join(f"d{dim} {mask}" for dim in DIMS for mask in MASKS) + " |"]
    lines += ["|---|---|---|" + "---|" * (len(DIMS) * len(MASKS))]
    others = []
    for experiment in found["experiments"]:
        begin = f"| {experiment['idea']} | {experiment['expected']} | {'yes' if experiment['kept'] else 'no'} | "
        gains = [_gain(experiment["rows"], dim, mask) for dim in DIMS for mask in MASKS]
        if any(gains):
            lines.append(f"{begin}{' | '.join(gains)} |")
        for dim in sorted({row["dim"] for row in experiment["rows"]} - set(DIMS)):
            others.append(f"{begin}{dim} | {' | '.join(_gain(experiment['rows'], dim, mask) for mask in MASKS)} |")
    lines += ["", "At other head dims, 16 heads or, in the last rows, heads x dim near 2048:", ""]
    lines += ["| idea | expected | kept | head dim | full | causal |", "|---|---|---|---|---|---|", *others]
    limit = (_sustained(root, *what) for what in (TILES, IDEAS))
    tables = (_tiles(root), *limit, studies.inputs_table(root), *studies.variants_tables(root))
    for table in (*tables, _caches(found["caches"]), _one_query(found["one_query"]), _cycles(found["cycles"])):
        lines += ["", *table] if table else []
    return "\n".join(lines) + "\n"


def _tiles(root: Path) -> list[str]:
    """What `strobe tune` found for each head dim and kind of kernel."""
    found = studies.load(root, "tiles")
    if found is None:
        return []
    lines = [
        "Tiles in use among their neighbours, one switch changed at a time (`strobe tune`); means over all its cases:",
        "",
    ]
    lines += [
        "| kernel | head dim | in use | tiles timed | speed over the best's | the best |",
        "|---|---|---|---|---|---|",
    ]
    for dim, dim_v, kind in dict.fromkeys((row["dim"], row["dim_v"], row["kind"]) for row in found["rows"]):
        speeds = tile_means(found["rows"], dim, dim_v, kind)
        in_use, best = next(iter(speeds)), max(speeds, key=speeds.__getitem__)
        other, share = "" if best == in_use else best, speeds[in_use] / speeds[best]
        lines.append(f"| {kind} | {_dims(dim, dim_v)} | {in_use} | {len(speeds)} | {share:.3f} | {other} |")
    return lines


_BETTER = 0.01  # sustained speed that a tile has to bring, of which short turns may take half


BOUND = "bound: "  # before the name of an idea with wrong results, which shows what something could bring at most
# The study, its heading, and how many are shown; None: all, and why others did not run.
TILES = ("tiles", "Tiles at the power limit (`strobe tune --method sustained`), over the tile in use", 3)
IDEAS = ("ideas", "Ideas at the power limit (`python -m strobe.tools.ideas`), over the kernel in use", None)


def _sustained(root: Path, study: str, heading: str, most: int | None) -> list[str]:
    """Tiles or ideas that are faster at the power limit than what is in use, and what they do in short turns."""
    found, turns = studies.load(root, f"{study}-sustained"), studies.load(root, study)
    if found is None:
        return []
    tried = study.removesuffix("s")
    lines = [
        f"{heading}, the best sustained speed first.",
        f"One is better if it brings {_BETTER:.0%} and short turns lose less than half of that:",
        "",
        f"| kernel | head dim | in use | {tried} | sustained speed | energy per FLOP | short turns | better |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for dim, dim_v, kind in dict.fromkeys((row["dim"], row["dim_v"], row["kind"]) for row in found["rows"]):
        speeds, joules = (tile_means(found["rows"], dim, dim_v, kind, of) for of in ("tflops", "joules_per_tflop"))
        short = {} if turns is None else tile_means(turns["rows"], dim, dim_v, kind)
        if not speeds:
            continue
        in_use = next(iter(speeds))
        for tile in sorted(speeds, key=lambda tile: -speeds[tile])[:most]:
            gain = speeds[tile] / speeds[in_use]
            energy = f"{joules[tile] / joules[in_use]:.3f}" if tile in joules and in_use in joules else ""
            kept = short[tile] / short[in_use] if tile in short and in_use in short else None
            right = not tile.startswith(BOUND)
            better = right and gain >= 1 + _BETTER and kept is not None and 1 - kept < (gain - 1) / 2
            cells = (
                kind,
                _dims(dim, dim_v),
                in_use,
                tile,
                f"{gain:.3f}",
                energy,
                "" if kept is None else f"{kept:.3f}",
            )
            lines.append(f"| {' | '.join(cells)} | {'yes' if better else ''} |")
        if most is None:
            mine = [row for row in found["rows"] if (row["dim"], row["dim_v"], row["kind"]) == (dim, dim_v, kind)]
            reasons = {row["tile"]: row["reason"] for row in mine if "reason" in row}
            lines += [f"| {kind} | {_dims(dim, dim_v)} | {in_use} | {t} | | | | {why} |" for t, why in reasons.items()]
    return lines


def _dims(dim: int, dim_v: int) -> str:
    return f"{dim}" if dim == dim_v else f"{dim}, values {dim_v}"


def _caches(rows: list[dict[str, Any]]) -> list[str]:
    """Few queries against many keys, with and without what the kernel does about it."""
    lines = [
        "Few queries against a long cache, 8 query heads to a key head, head dim 128, bf16; microseconds, in turns:",
        "",
    ]
    lines += ["| queries | keys | as it is | without split-KV | without packed GQA |", "|---|---|---|---|---|"]
    for row in rows:
        times = " | ".join(f"{1e3 * row['ms'][way]:.0f}" for way in ("now", "no split", "no fold"))
        lines.append(f"| {row['shape']} | {row['keys']} | {times} |")
    return lines


def _one_query(rows: list[dict[str, Any]]) -> list[str]:
    """Beside cuDNN, with a cold cache and, where launches are short, one after the other from a graph."""
    lines = [
        "One query, 64 heads to 8 key heads, bf16; microseconds, in turns: launched one by one, with the L2 overwritten"
    ]
    lines += ["before each, and 20 of them in a graph with a warm L2:", ""]
    lines += ["| head dim | keys | `strobe-sm90` | `torch-cudnn` | `strobe-sm90`, graph | `torch-cudnn`, graph |"]
    lines += ["|---|---|---|---|---|---|"]
    for row in rows:
        times = [row[how][who] if how in row else None for how in ("cold", "graph") for who in ("now", "cudnn")]
        cells = " | ".join("" if ms is None else f"{1e3 * ms:.1f}" for ms in times)
        lines.append(f"| {_dims(row['dim'], row['dim_v'])} | {row['keys']} | {cells} |")
    return lines


def _cycles(rows: list[dict[str, Any]]) -> list[str]:
    """How much of the matrix units the kernel uses, whatever the clock is."""
    lengths = sorted({row["length"] for row in rows})
    lines = ["Cycles the matrix units need over cycles taken, counted inside the kernel before it guessed the maximum;"]
    lines += ["in brackets the clock in GHz:", ""]
    lines += ["| head dim, mask | " + " | ".join(map(str, lengths)) + " |", "|---|" + "---|" * len(lengths)]
    for dim, mask in sorted({(row["dim"], row["mask"]) for row in rows}, key=lambda key: (key[0], MASKS.index(key[1]))):
        mine = [row for row in rows if (row["dim"], row["mask"]) == (dim, mask)]
        found = {row["length"]: f"{row['use']:.3f} ({row['ghz']:.2f})" for row in mine}
        lines.append(f"| {dim}, {mask} | " + " | ".join(found.get(n, "") for n in lengths) + " |")
    return lines


def _gain(rows: list[dict[str, Any]], dim: int, mask: str) -> str:
    gains = [gain for row in rows if (row["dim"], row["mask"]) == (dim, mask) for gain in row["gain"]]
    if not gains:
        return ""
    spread = f" ({min(gains):.2f}-{max(gains):.2f})" if len(gains) > 1 else ""
    return f"{geometric_mean(gains):.3f}{spread}"

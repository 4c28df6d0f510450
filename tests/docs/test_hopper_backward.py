"""What docs/design/hopper-backward.md and docs/use.md say in words, against the committed measurements. The page's tables
are generated."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from benchmarks.pages import backward_page, comparisons, tried
from strobe.bench import read_results

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks/results/h200"


def load(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


IDEAS, TRAINING, SECTIONS = (load(f"studies/{name}.json") for name in ("ideas-backward", "training", "sections-tried"))
PAGE = (ROOT / backward_page.PAGE).read_text(encoding="utf-8")


def test_the_table_is_what_was_measured() -> None:
    """From the file alone, without the code that writes the table."""
    ms: dict[str, dict[str, float]] = {}
    for row in load("grid36-backward.json")["rows"]:
        ms.setdefault(row["case"]["label"], {})[row["provider"]] = row["timing"]["summary"]["median"]
    lines = PAGE.split("| head dim, mask |")[1].split("\n\n")[0].splitlines()
    lengths = [cell.strip().lower() for cell in lines[0].strip("|").split("|")]
    shown = {}
    for line in lines[2:]:
        name, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        dim, mask = name.split(", ")
        shown |= {f"d{dim}-{mask}-{n}": cell for n, cell in zip(lengths, cells, strict=True)}
    assert shown == {case: f"{x['torch-cudnn'] / x['strobe-sm90']:.2f}" for case, x in ms.items()}


def test_the_order_of_sums_costs_what_the_documents_say() -> None:
    slower = 1 - min(backward_page.speeds(TRAINING, "deterministic"))
    assert slower <= 0.15  # the bound
    assert f"up to {math.ceil(100 * slower)} %" in (ROOT / "docs/use.md").read_text(encoding="utf-8")


def test_only_causal_heads_of_128_are_slower_in_groups() -> None:
    behind = backward_page.speeds(TRAINING, "grouped", dim=128, mask="causal")
    assert min(behind) >= 0.92  # the bound
    assert all(ratio > 1 for ratio in backward_page.speeds(TRAINING, "grouped") if ratio not in behind)


def of_idea(name: str, lengths: tuple[str, ...] = ("512", "1024", "4096", "16384")) -> str:
    """Its speed over that of the kernels in use then, over all cells: from, to."""
    ms = {(row["dim"], row["case"], row["tile"]): row["ms"] for row in IDEAS["rows"] if "ms" in row}
    found = [ms[(*cell, "in use")] / t for (*cell, tile), t in ms.items() if tile == name and cell[1].endswith(lengths)]
    return f"{min(found):.2f} to {max(found):.2f}"


def test_ideas_brought_what_the_page_says() -> None:
    turns = of_idea("sums of dQ by turns", ("512", "1024"))
    assert f"{turns} times as fast" in PAGE
    whole, half = (f"{many}exponentials above the wait for dP" for many in ("", "half of the "))
    assert f"{of_idea(whole)} of the speed; half of them: {of_idea(half)}" in PAGE


def test_the_cell_closest_to_cudnn_is_long_causal_and_wide() -> None:
    grid = read_results.load(RESULTS / "grid36-backward.json")
    ahead = comparisons.ratios(grid, "grid36", backward_page.OURS, backward_page.CUDNN, "backward")
    least = min(ahead, key=ahead.__getitem__)
    (case,) = {row.case.label: row.case for row in grid.rows if row.case.key == least}.values()
    assert case.dim == 256 and case.mask.name == "causal" and case.len_k >= 8192


def test_stages_take_what_the_page_says() -> None:
    studies = (load(f"studies/backward-stages{name}.json") for name in ("", "-rounds"))
    rows = {(row["case"], row["idea"]): row for study in studies for row in study["rows"]}

    def consumers(length: int, heads: str, idea: str = "stamped") -> list[dict[str, float]]:
        cycles = rows[f"causal, {length}, head dim 128, {heads}", idea]["cycles"]
        return [cycles["consumer 0"], cycles["consumer 1"]]

    plain = [x for length in (4096, 16384) for x in consumers(length, "16 heads on 16")]
    assert all(abs(x["a block of queries"] - 3660) < 15 and 545 < x["hand dQ over"] < 635 for x in plain)
    for slow, few, more, less in ((4096, "64 heads on 8", 1.085, 1.075), (16384, "64 heads on 8", 1.025, 1.015),
                                  (4096, "32 heads on 8", 1.015, 1.0), (16384, "32 heads on 8", 1.015, 1.0)):  # fmt: skip
        for x, base in zip(consumers(slow, few), consumers(slow, "16 heads on 16"), strict=True):
            assert less < x["a block of queries"] / base["a block of queries"] < more
            waits = sum(x[stage] - base[stage] for stage in ("wait for Q", "wait for dO"))
            assert few != "64 heads on 8" or waits > (x["a block of queries"] - base["a block of queries"]) / 2

    def busy(idea: str) -> list[float]:
        return [row["cycles"]["a multiprocessor"]["busy"] for (_, name), row in rows.items() if name == idea]

    assert min(busy("stamped")) > 0.98 and max(busy("stamped, by turns")) < 0.92
    rounds = [x for n in (4096, 16384) for x in consumers(n, "16 heads on 16", "stamped, the last block rounds")]
    assert all(720 < x["hand dQ over"] < 1100 for x in rounds)
    for heads, clock in (("16 heads on 16", 1.5e6), ("64 heads on 8", 1.4e6)):
        row = rows[f"causal, 16384, head dim 128, {heads}", "stamped"]
        assert abs(row["cycles"]["a multiprocessor"]["cycles"] / row["ms"]["stamped"] - clock) < 0.05e6


def test_other_sums_lost() -> None:
    study = load("studies/backward-sums.json")
    for idea in ("the last block rounds", "by turns, another warp waits for them"):
        assert len(tried.gains(study, idea)) == 24 and max(tried.gains(study, idea)) < 0.99
    *others, best = sorted(tried.gains(study, "sums in any order") + tried.gains(study, "by turns"))
    assert others[-1] < 1.01 and tried.gains(study, "by turns", dim=64, case="causal, 2048") == [best]
    assert "turns bring 1.4 % at 2,048 keys" in PAGE and f"{best:.3f}" == "1.014"
    long = "causal, 16384, head dim 128, 16 heads on 16"
    in_use = {r["idea"]: r["ms"]["in use"] for r in load("studies/backward-stages.json")["rows"] if r["case"] == long}
    slow, fast = in_use["stamped, by turns"], in_use["stamped"]
    assert f"{slow:.2f} ms against\n{fast:.2f} at 16k" in PAGE


def test_what_was_tried_and_lost() -> None:
    kept = [x for row in load("studies/dropout-tried.json")["rows"] for x in row["of_plain"].values()]
    assert f"had {min(kept):.2f} to {max(kept):.2f} (`dropout-tried.json`)" in PAGE

    tried = load("studies/order-tried.json")

    def short(data: dict[str, Any]) -> list[float]:
        rows = [row for row in data["rows"] if row["what"] == "deterministic" and row["mask"] == "causal"]
        return [row["ms"]["deterministic"] for row in rows if row["length"] <= 1024]

    speeds = [ours / other for ours, other in zip(short(tried["in_use"]), short(tried), strict=True)]
    assert f"{min(speeds):.2f} to {max(speeds):.2f} of the speed under a causal mask at 512 and 1,024 keys" in PAGE
    inside = [row["ms"]["head by head, 4"] / row["ms"]["inside, 4"] for row in SECTIONS["heads_inside"]]
    wide, narrow = (", ".join(f"{x:.2f}" for x in part) for part in (inside[:3], inside[3:]))
    assert f"head dim 128: {wide} of the speed at 2k, 4k, 8k; head dim 64: {narrow}" in PAGE

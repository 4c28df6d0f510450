"""What docs/design/hopper-forward.md says in words of ideas that were not kept, against the committed measurements. The page's
tables are generated."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.pages import tried
from strobe.measure.statistics import geometric_mean

STUDIES = Path(__file__).resolve().parents[2] / "benchmarks/results/h200/studies"
SHARED, HALF = "clusters of two share K and V", "bound: half the loads of K and V"


def load(name: str) -> dict[str, Any]:
    return json.loads((STUDIES / f"{name}.json").read_text(encoding="utf-8"))


CLUSTERS, TILES, DROPOUT, PROMOTIONS = map(load, ("clusters", "tiles-and-row-sums", "dropout-ideas", "promotions"))


def keeps_the_rule(found: list[float]) -> bool:
    return geometric_mean(found) >= 1.01 and min(found) >= 0.99


@pytest.mark.parametrize(("dim", "sustained", "bound", "lost"), [(256, 3, 8, 1), (128, 1, 6, 2), (64, 0, 5, 5)])
def test_clusters_bring_what_the_page_says(dim: int, sustained: int, bound: int, lost: int) -> None:
    def percent(name: str, method: str) -> int:
        return int(100 * (geometric_mean(tried.gains(CLUSTERS, name, dim=dim, method=method)) - 1) // 0.5 + 1) // 2

    assert (percent(SHARED, "sustained"), percent(HALF, "sustained")) == (sustained, bound)
    turns = geometric_mean(tried.gains(CLUSTERS, SHARED, dim=dim, method="turns"))
    assert abs(100 * (1 - turns) - lost) < 0.6
    assert geometric_mean(tried.gains(CLUSTERS, HALF, dim=dim, method="turns")) < 1.005  # loads cost no time


def test_clusters_give_the_same_bits_and_come_nearest_to_the_rule_in_one_case() -> None:
    assert not any(CLUSTERS["checked"].values()) and len(CLUSTERS["checked"]) == 6
    least = {
        (dim, kind): min(tried.gains(CLUSTERS, SHARED, dim=dim, kind=kind))
        for dim in (64, 128, 256)
        for kind in ("full", "bounded")
    }
    assert max(least, key=least.__getitem__) == (256, "full") and round(100 * (1 - least[256, "full"]), 2) == 1.05


def test_no_other_tile_and_no_row_sum_brings_one_percent() -> None:
    for of in ("tiles", "row sums"):
        for dim in {row["dim"] for row in TILES["rows"] if row["of"] == of}:
            for name in tried.names(TILES, of=of, dim=dim):
                assert geometric_mean(tried.gains(TILES, name, of=of, dim=dim)) < 1.01, name


def test_two_ways_to_hash_pass_for_one_head_dim_each() -> None:
    passed = {
        (dim, name)
        for dim in (64, 128, 256)
        for name in tried.names(DROPOUT, dim=dim)
        if not name.startswith("bound") and keeps_the_rule(tried.gains(DROPOUT, name, dim=dim))
    }
    at_128 = "beside Q K^T, fewer instructions, the tile of no dropout"
    assert passed == {(64, "fewer instructions"), (128, at_128)}
    lost = (min(tried.gains(DROPOUT, at_128)), min(tried.gains(DROPOUT, "fewer instructions")))
    assert [f"{100 * (1 - x):.0f} %" for x in lost] == ["2 %", "4 %"]


def test_the_l2s_fetches_make_no_difference() -> None:
    for direction in ("forward", "backward"):
        study = tried.fetches(PROMOTIONS, direction)
        for name in ("k and v", "q and do", "all"):
            assert abs(geometric_mean(tried.gains(study, name)) - 1) < 0.002

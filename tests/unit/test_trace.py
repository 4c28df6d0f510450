"""`strobe.trace` records what the library does: golden numbers, every mask's tiles, the bytes of the simple model."""

from __future__ import annotations

import itertools
import json
import math
import re
from pathlib import Path

import pytest
import torch
from trace_sample import sample
from typer.testing import CliRunner

import strobe
from benchmarks.pages import measured_page
from strobe.learn import explain_page, measured, story, worked_example
from strobe.tile_trace import Trace, trace
from strobe.tiled import block_sizes
from strobe.tools import cli

PAPERS = {
    f"https://arxiv.org/abs/{number}"
    for number in ("1805.02867", "2112.05682", "2205.14135", "2307.08691", "2407.08608")
}
MASKS = [strobe.full, strobe.causal, strobe.window(2, 0), strobe.window(1, 2)]


def worked(**arguments: object) -> Trace:
    return trace(*worked_example.inputs(), block_q=2, block_k=2, **arguments)  # type: ignore[arg-type]


def test_golden_numbers() -> None:
    first, second = worked().rows[0]
    assert first.s == pytest.approx([2.474874, 6.717514], abs=1e-6) and first.m_old is None
    assert first.m_new == pytest.approx(6.717514, abs=1e-6) and first.alpha == 0
    assert first.p == pytest.approx([0.0143696, 1], abs=1e-7) and first.l == pytest.approx(1.0143696, abs=1e-7)
    assert [x / first.l for x in first.o] == pytest.approx([0.2971668, 0.3971668], abs=1e-7)
    assert second.s == pytest.approx([10.960155, 15.202796], abs=1e-6)
    assert second.alpha == pytest.approx(2.064853e-4, rel=1e-6) and second.l == pytest.approx(1.014579048, abs=1e-9)
    other = worked().rows[1][1]
    assert other.alpha == pytest.approx(2.520043e-9, rel=1e-6) and other.l == pytest.approx(1.000050203, abs=1e-9)
    golden = [[0.697084216, 0.797084216], [0.699989959, 0.799989959], [0.699999965, 0.799999965], [0.7, 0.8]]
    for row, wanted in zip(worked().out, golden, strict=True):
        assert row == pytest.approx(wanted, abs=1e-9)
    assert worked().lse == pytest.approx([15.217269591, 35.001835870, 54.800775717, 74.599765416], abs=1e-9)


@pytest.mark.parametrize("mask", MASKS, ids=repr)
@pytest.mark.parametrize(("n", "d", "block_q", "block_k"), [(8, 4, 2, 2), (11, 3, 4, 3), (5, 2, 8, 2), (7, 5, 1, 7)])
def test_every_visible_score_is_met_once(n: int, d: int, block_q: int, block_k: int, mask: strobe.Mask) -> None:
    q, k, v = sample(n, d)
    found = trace(q, k, v, block_q=block_q, block_k=block_k, mask=mask)
    scores = (q @ k.T / math.sqrt(d)).masked_fill(~mask.dense(n, n), -math.inf)
    for row, met in enumerate(found.rows):
        seen = {key: s for tile in met for key, s in zip(range(*tile.keys), tile.s, strict=True)}
        assert len(seen) == sum(len(tile.s) for tile in met), "a key was met twice"
        for key in range(n):
            s = seen.get(key)
            assert (s is None) == (scores[row, key] == -math.inf)
            assert s is None or s == pytest.approx(scores[row, key].item(), abs=1e-12)
    assert torch.allclose(torch.tensor(found.out, dtype=torch.float64), scores.softmax(-1) @ v, atol=1e-12)


@pytest.mark.parametrize("mask", MASKS, ids=repr)
def test_each_tile_follows_from_the_one_before(mask: strobe.Mask) -> None:
    q, k, v = sample(9, 3, seed=1)
    for met in trace(q, k, v, block_q=4, block_k=2, mask=mask).rows:
        l, o = 0.0, [0.0] * 3  # noqa: E741
        for before, tile in itertools.pairwise([None, *met]):
            assert tile is not None and tile.m_old == (before.m_new if before else None)
            if tile.m_old is not None and tile.m_new is not None:
                assert tile.alpha == pytest.approx(math.exp(tile.m_old - tile.m_new), rel=1e-12)
            l = tile.alpha * l + sum(tile.p)  # noqa: E741
            values = v[tile.keys[0] : tile.keys[1]]
            o = [tile.alpha * x + y for x, y in zip(o, (torch.tensor(tile.p).double() @ values).tolist(), strict=True)]
            assert tile.l == pytest.approx(l, rel=1e-12) and tile.o == pytest.approx(o, abs=1e-6)


def test_tiles_are_skipped_masked_or_whole_as_the_mask_says() -> None:
    q, k, v = sample(6, 2)
    kinds = {
        (s.block, s.tile): (s.kind, s.masked)
        for s in trace(q, k, v, block_q=2, block_k=2, mask=strobe.causal).steps
        if s.kind in ("skip", "add")
    }
    assert kinds == {
        (0, 0): ("add", True),
        (0, 1): ("skip", True),
        (0, 2): ("skip", True),
        (1, 0): ("add", False),
        (1, 1): ("add", True),
        (1, 2): ("skip", True),
        (2, 0): ("add", False),
        (2, 1): ("add", False),
        (2, 2): ("add", True),
    }


@pytest.mark.parametrize(("n", "d", "block"), [(64, 8, 16), (32, 16, 4), (48, 4, 12)])
def test_bytes_follow_the_simple_model(n: int, d: int, block: int) -> None:
    """Flash moves 2 N² d / Br elements for K and V, besides Q, O and the LSE; standard 4 N² besides Q, K, V and O."""
    found = trace(*(t.float() for t in sample(n, d)), block_q=block, block_k=block).totals()
    flash, standard = found["flash"], found["standard"]
    assert flash.hbm_read == 4 * (2 * n * n * d // block + n * d) and flash.hbm_written == 4 * (n * d + n)
    assert standard.hbm_read + standard.hbm_written == 4 * (4 * n * n + 4 * n * d)
    assert flash.shared_written == flash.hbm_read, "whatever is read arrives in shared memory"


def test_a_mask_saves_flash_bytes_and_standard_none() -> None:
    every, causal = worked().totals(), worked(mask=strobe.causal).totals()
    assert causal["flash"].hbm_read < every["flash"].hbm_read and causal["standard"] == every["standard"]


def test_it_is_data() -> None:
    text = json.dumps(worked(mask=strobe.causal).to_dict(), allow_nan=False)
    assert json.loads(text)["rows"][0][0]["s"][1] is None


def test_large_scores_stay_finite() -> None:
    q, k, v = (30 * t for t in sample(8, 4))
    assert all(map(math.isfinite, itertools.chain(*trace(q, k, v, block_q=2, block_k=2).out)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"block_q": 0, "block_k": 2}, "block_q must be an int of at least 1, got 0"),
        ({"block_q": 2, "block_k": True}, "block_k must be an int of at least 1, got True"),
    ],
)
def test_wrong_blocks_are_named(arguments: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        trace(*sample(4, 2), **arguments)


def test_only_matrices_are_traced() -> None:
    q = torch.zeros(1, 4, 1, 2)
    with pytest.raises(ValueError, match="q has 4 axes"):
        trace(q, q, q, block_q=2, block_k=2)


def test_an_observer_changes_no_number() -> None:
    q, k, v = (t.float() for t in sample(12, 4))
    with block_sizes(4, 3):
        plain = strobe.attention(q, k, v, mask=strobe.causal, backend="tiled")
    assert torch.equal(torch.tensor(trace(q, k, v, block_q=4, block_k=3, mask=strobe.causal).out).float(), plain)


def test_the_page_is_one_file_with_nothing_from_outside(tmp_path) -> None:
    result = CliRunner().invoke(cli.app, ["explain-page", "-o", str(tmp_path / "made" / "page.html")])
    assert result.exit_code == 0, result.output
    text = (tmp_path / "made" / "page.html").read_text(encoding="utf-8")
    assert 100_000 < len(text.encode()) < 300_000
    assert not re.findall(r"/\*[A-Z-]+\*/|<!--[A-Z]+-->", text), "a part is missing"
    for foreign in ('<link rel="stylesheet', " src=", "@import", "url(", "fetch("):
        assert foreign not in text
    assert set(re.findall(r"https?://[^\s\"']+", text)) == PAPERS | {"http://www.w3.org/2000/svg"}


def test_presets_name_every_setting() -> None:
    for preset in explain_page.presets():
        assert {"n", "d", "blockQ", "blockK", "dtype", "mask", "left", "right", "about"} <= preset.keys()
        assert math.ceil(preset["n"] / preset["blockQ"]) * math.ceil(preset["n"] / preset["blockK"]) <= 4096


def test_the_story_has_the_scores_that_it_promises() -> None:
    """Halves that can be checked by hand, weights that can be seen, a maximum that rises twice in the row that is followed."""
    told = story.story()
    scores = [s for row in told["trace"].rows for tile in row for s in tile.s]
    assert all(s is not None and math.isclose(2 * s, round(2 * s), abs_tol=1e-9) for s in scores)
    assert all(0.05 <= weight <= 0.5 for row in told["p"] for weight in row)
    maxima = [tile.m_new for tile in told["trace"].rows[story.ROW]]
    assert maxima == sorted(set(maxima)) and len(maxima) == 3
    others = [tile.alpha for row in told["trace"].rows for tile in row[1:]]
    assert 1 in others and min(others) < 0.5, "some rows are rescaled, some are not"


def test_the_measured_excerpt_is_current() -> None:
    root = Path(__file__).resolve().parents[2]
    assert measured_page.excerpt(root) == measured.load(), "run `make docs`"
    assert measured_page.main([], root) == 0

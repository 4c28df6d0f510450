"""`strobe bench --suite decode`: what it measures, and that it finds mistakes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from strobe.bench import decode, decode_cases
from strobe.bench.decode_cases import Batch, Cache, Size, batches, ways
from strobe.tools import cli

CPU = torch.device("cpu")
TINY = Size(4, 2, 8, torch.float32, divisor=64)


def test_batches_of_a_gpu() -> None:
    found = {b.name: b for b in batches()}
    assert list(found) == [
        "b1-32k", "b16-8k", "b128-4k", "b1-32k-4-queries", "b16-8k-4-queries", "skewed", "uniform", "mixed", "cascade",
    ]  # fmt: skip
    assert found["b128-4k"].lengths == (4096,) * 128 and found["b128-4k"].pages == (1, 16, 64, 256)
    skewed, uniform = found["skewed"], found["uniform"]
    assert (min(skewed.lengths), max(skewed.lengths), len(skewed.lengths)) == (128, 32768, 64)
    assert len(set(skewed.lengths)) == 64 and skewed.lengths != tuple(sorted(skewed.lengths))
    assert abs(uniform.keys() / skewed.keys() - 1) < 0.001
    assert found["mixed"].queries == (2048,) + (1,) * 64 and found["mixed"].lengths == (8192,) + (4096,) * 64
    assert found["cascade"].shared == 8192 and found["cascade"].lengths == (1024,) * 64


def test_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(decode.SIZES, "cpu", TINY)
    monkeypatch.setitem(decode.TURNS, "cpu", 1)
    out = tmp_path / "decode.json"
    environment = {"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"}
    done = CliRunner().invoke(
        cli.app, ["bench", "--suite", "decode", "--device", "cpu", "--out", str(out)], env=environment
    )
    assert done.exit_code == 0, done.output
    found = json.loads(out.read_text(encoding="utf-8"))
    others = ("cuDNN", "flash", "invariant")
    ours = [r for r in found["rows"] if not any(name in r["way"] for name in others)]
    assert all(r["us"] > 0 and r["of_reading"] > 0 and r["note"] is None for r in ours)
    assert all(r["error"] < 1e-5 for r in ours if r["way"] != decode.READ)
    notes = {r["way"].split(",")[0]: r["note"] for r in found["rows"] if r not in ours}
    assert notes.pop("invariant") == "tensors on cpu; the kernels run on NVIDIA GPUs"
    assert set(notes.values()) == {"needs an NVIDIA GPU"}
    by = {(r["batch"], r["way"]) for r in ours}
    assert by >= {("b16-8k", f"page {n}") for n in (1, 16, 64, 256)} | {("b16-8k", "contiguous")}
    assert by >= {
        ("cascade", "shared, page 64"),
        ("cascade", "in each table, page 64"),
        ("cascade", "a copy for each, page 64"),
        ("mixed", "two calls, page 64"),
    }
    titles = "".join(found["comparisons"])
    for part in ("page 1 against contiguous", "4 queries against 1", "skewed against uniform", "two calls", "sharing"):
        assert part in titles
    assert found["provenance"]["torch"] == torch.__version__ and found["size"]["dtype"] == "torch.float32"
    assert "b128-4k: " in done.output and "4 heads on 2, dim 8, float32" in done.output
    done = CliRunner().invoke(cli.app, ["bench", "--suite", "decode", "--suite", "quick"], env=environment)
    assert done.exit_code == 2 and "runs by itself" in done.output


def test_bytes_are_counted_once() -> None:
    """A prompt that is shared counts once, one in every table as often as it is read."""
    batch = Batch("x", (1, 1, 1), (10, 10, 10), shared=64)
    assert [w.read for w in ways(batch, TINY)] == [30 + 64, 30 + 3 * 64, 30 + 3 * 64]
    rows = decode.measure(batch, TINY, CPU, turns=1)
    for row, keys in zip(rows[1:], (94, 222, 222), strict=True):
        assert row.us is not None and row.tb_per_s == pytest.approx(keys * TINY.row_bytes / row.us / 1e6)


@pytest.mark.parametrize("page", (1, 16, 0))
def test_a_wrong_result_is_not_timed(page: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each way is compared with its own keys: those of another sequence do not pass."""
    batch = Batch("x", (2, 2), (40, 40), (1, 16))
    cache = Cache.of(batch, TINY, CPU, 1)
    way = next(w for w in ways(batch, TINY) if w.page == page)
    out = way.call(cache)()
    assert decode.checked(out, cache, batch, page).passed
    assert not decode.checked(out.roll(2, 0), cache, batch, page).passed
    monkeypatch.setattr(decode_cases, "_paged", lambda c, **_: lambda: c.q)
    rows = {r.way: r for r in decode.measure(batch, TINY, CPU, turns=1)}
    assert rows["page 16"].us is None and "wrong" in (rows["page 16"].note or "")
    assert rows["contiguous"].us is not None


def test_a_slow_way_and_one_that_raises_are_rows_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = Batch("x", (1,), (40,), (1, 16))

    def broken(c: Cache, page: int, **_: object) -> object:
        raise RuntimeError(f"no pages of {page}\nmore")

    monkeypatch.setattr(decode_cases, "_paged", broken)
    monkeypatch.setattr(decode, "CALL_LIMIT_S", 0.0)
    rows = {r.way: r for r in decode.measure(batch, TINY, CPU, turns=1)}
    assert rows["page 16"].note == "RuntimeError: no pages of 16"
    assert (rows["contiguous"].note or "").startswith("not timed: a call takes")
    assert rows[decode.READ].us is not None


def test_caches_are_rotated() -> None:
    batch = Batch("x", (1,), (64,))
    one = batch.rows * TINY.row_bytes
    made: list[int] = []
    original = Cache.of
    try:
        Cache.of = staticmethod(lambda *args: (made.append(args[3]), original(*args))[1])  # type: ignore[method-assign]
        decode.measure(batch, Size(4, 2, 8, torch.float32, rotated=3 * one - 1), CPU, seed=5, turns=1)
    finally:
        Cache.of = staticmethod(original)  # type: ignore[method-assign]
    assert made == [5, 6, 7]

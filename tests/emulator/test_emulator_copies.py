"""cp.async: a double-buffered pipeline, and every way to get its waits and barriers wrong."""

from __future__ import annotations

import numpy as np
import pytest
from emulator.toy_kernels import Toy, aligned, place

from strobe.emulator import EmulatorError

# Sums the rows of x tile by tile, two stages in shared memory; each thread adds up a column that others have copied.
# bug 1: no wait; 2: waits for one group too few; 3: no barrier after the wait; 4: no barrier before a stage is filled
# again.
PIPELINE = Toy(
    """
STROBE_KERNEL(64, 1) kernel(STROBE_GRID_CONSTANT Params p) {
  const u32 t = thread_idx();
  auto fetch = [&](int tile) {
    const u32 stage = smem_base() + tile % 2 * 1024;
    if (tile < p.tiles) cp_async_16(stage + 16 * t, p.x + tile * 256 + 4 * t, tile * 4 + int(t) / 16 < p.rows);
    cp_async_commit();
  };
  float sum = 0.f;
  fetch(0);
  fetch(1);
  for (int tile = 0; tile < p.tiles; ++tile) {
    if (p.bug == 2) cp_async_wait<2>();
    else if (p.bug != 1) cp_async_wait<1>();
    if (p.bug != 3) sync_block();
    const u32 stage = smem_base() + tile % 2 * 1024;
    for (u32 row = 0; row < 4; ++row) sum += ld_shared_f32(stage + row * 256 + 4 * (63 - t));
    if (p.bug != 4) sync_block();
    fetch(tile + 2);
  }
  st_global(p.out + 63 - t, sum);
}
""",
    {"x": "float32", "out": "float32"},
    ("tiles", "rows", "bug"),
    threads=64,
    smem=2048,
)


def pipeline(bug: int, mode: str, seed: int) -> bool:
    """Return whether the sums came out right."""
    x, out = place(np.random.default_rng(0).standard_normal((22, 64)).astype(np.float32)), aligned(64, "float32")
    PIPELINE.run(x=x, out=out, tiles=6, rows=22, bug=bug, mode=mode, seed=seed)
    return bool(np.allclose(out, x.sum(0), atol=1e-5))


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_pipeline_sums_and_reads_nothing_past_the_last_row(mode: str) -> None:
    for seed in range(5):
        assert pipeline(0, mode, seed)


@pytest.mark.parametrize("bug", [1, 2])
def test_missing_wait_is_caught(bug: int) -> None:
    for seed in range(3):
        with pytest.raises(EmulatorError, match="copy still in flight") as caught:
            pipeline(bug, "async", seed)
        assert PIPELINE.line("sum += ld_shared_f32") in str(caught.value)
        assert "issued by thread" in str(caught.value) and PIPELINE.line("cp_async_16(stage") in str(caught.value)


def test_missing_barrier_after_the_wait_is_caught() -> None:
    for seed in range(3):
        # A thread that has only run ahead reads before the copy is even issued: then the copy is what is out of order.
        with pytest.raises(
            EmulatorError, match="missing wait or barrier|overwritten with no barrier after it was read"
        ) as caught:
            pipeline(3, "async", seed)
        assert PIPELINE.line("sum += ld_shared_f32") in str(caught.value)


def test_stage_filled_again_before_all_have_read_it_is_caught() -> None:
    for seed in range(5):
        with pytest.raises(EmulatorError, match="overwritten with no barrier after it was read|copy still in flight"):
            pipeline(4, "async", seed)


def test_counters_of_the_pipeline() -> None:
    x, out = place(np.ones((24, 64), np.float32)), aligned(64, "float32")
    counters = PIPELINE.run(x=x, out=out, tiles=6, rows=24, bug=0, grid=3)
    assert counters.global_bytes_read == 3 * x.nbytes
    assert counters.global_bytes_written == 3 * out.nbytes
    assert counters.shared_bytes_written == counters.shared_bytes_read == 3 * x.nbytes
    assert counters.block_barriers == 3 * 12
    assert counters.bank_conflicts == 0

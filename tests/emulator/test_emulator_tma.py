"""Bulk tensor copies and mbarriers: swizzle, zero fill, clipping, and the races around them."""

from __future__ import annotations

import numpy as np
import pytest
from emulator.toy_kernels import Toy, aligned, place

from strobe.cuda.runtime.driver import TensorMapSpec
from strobe.emulator import EmulatorError

# Loads a box at (0, row, panel 0, 1, 0) to shared memory, dumps it raw, adds 1 to every element and stores the box to
# y. bug 1: no mbarrier wait; 2: no proxy fence; 3: no barrier before the store; 4: overwrites before the store has
# read; 5: misaligned destination; 6: expects too few bytes; 7: no mbar_init_fence; 8: store never waited for.
BOX = Toy(
    """
STROBE_KERNEL(128, 1) kernel(STROBE_GRID_CONSTANT Params p) {
  const u32 t = thread_idx(), bar = smem_base(), tile = smem_base() + 1024, bytes = 2 * 16 * 128;
  if (t == 0) {
    mbar_init(bar, 1);
    if (p.bug != 7) mbar_init_fence();
  }
  sync_block();
  if (t == 0) {
    mbar_arrive_expect_tx(bar, p.bug == 6 ? bytes / 2 : bytes);
    tma_load_5d(tile + (p.bug == 5 ? 128 : 0), &p.source, bar, 0, p.row, 0, 1, 0);
  }
  if (p.bug != 1) mbar_wait(bar, 0);
  for (u32 i = t; i < bytes / 4; i += 128) {
    const u32 pair = ld_shared(tile + 4 * i);
    st_global(p.raw + i, pair);
    st_shared(tile + 4 * i, pair + 0x00010001u);
  }
  if (p.bug != 2) fence_proxy_async();
  if (p.bug != 3) sync_block();
  if (t == 0) {
    tma_store_5d(&p.target, tile, 0, p.row, 0, 1, 0);
    tma_store_commit();
    if (p.bug == 4) st_shared(tile, 0u);
    if (p.bug != 8) tma_store_wait_read<0>();
    if (p.bug != 8) st_shared(tile, 0u);
  }
}
""",
    {"x": "uint16", "y": "uint16", "raw": "uint32"},
    ("row", "bug"),
    ("source", "target"),
    threads=128,
    smem=1024 + 4096 + 1024,
)
LENGTH, PANELS, HEADS = 21, 2, 3


def box(
    row: int, mode: str, seed: int = 0, bug: int = 0, swizzle: int = 128
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    x = place(np.arange(1, 1 + LENGTH * HEADS * PANELS * 64, dtype=np.uint16).reshape(LENGTH, HEADS, PANELS * 64))
    y = aligned(x.shape, "uint16")
    raw = aligned(1024, "uint32")
    pitch = HEADS * PANELS * 128

    def spec(array: np.ndarray) -> TensorMapSpec:
        dims, strides = (64, LENGTH, PANELS, HEADS, 1), (pitch, 128, PANELS * 128, LENGTH * pitch)
        return TensorMapSpec(array.ctypes.data, 2, dims, strides, (64, 16, 2, 1, 1), swizzle)  # type: ignore[arg-type]

    BOX.run(x=x, y=y, raw=raw, row=row, bug=bug, mode=mode, seed=seed, specs={"source": spec(x), "target": spec(y)})
    return x, y, raw.view(np.uint16).reshape(2, 16, 8, 8)  # panel, row, chunk of 16 bytes, element


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("row", [0, 3, 16, -5])
def test_box_is_swizzled_zero_filled_and_clipped(row: int, mode: str) -> None:
    for seed in range(3):
        x, y, raw = box(row, mode, seed)
        inside = np.arange(max(row, 0), min(row + 16, LENGTH))
        expected = np.zeros((2, 16, 64), np.uint16)
        expected[:, inside - row] = x[inside, 1].reshape(-1, 2, 64).transpose(1, 0, 2)
        r, chunk = np.ogrid[:16, :8]
        unswizzled = raw[:, r, chunk ^ (r % 8)]
        assert (unswizzled.reshape(2, 16, 64) == expected).all()
        stored = np.zeros_like(x)
        stored[inside, 1] = x[inside, 1] + 1
        assert (y == stored).all()


def test_no_swizzle_and_narrow_boxes_are_refused() -> None:
    with pytest.raises(ValueError, match="the emulator wants the whole swizzle"):
        from strobe.emulator import encode_tensor_map

        encode_tensor_map(TensorMapSpec(0, 2, (64, 8), (128,), (32, 8), 128))


@pytest.mark.parametrize(
    ("bug", "what", "line"),
    [
        (1, "copy still in flight|with no barrier in between|after it was read", "tma_load_5d"),
        (2, "tma_store_5d: reads shared memory .* has not executed fence_proxy_async", "tma_store_5d(&p"),
        (3, "tma_store_5d: read of shared memory .* no barrier in between", "tma_store_5d(&p"),
        (4, "wgmma or TMA store in flight still reads", "p.bug == 4"),
        (5, "misaligned shared offset 0x480; must be a multiple of 1024", "tma_load_5d"),
        (7, "mbar_init_fence.. was not executed", "tma_load_5d"),
        (8, "missing tma_store_wait_read", "tma_store_5d(&p"),
    ],
)
def test_races_around_bulk_copies_are_caught(bug: int, what: str, line: str) -> None:
    for seed in range(3):
        with pytest.raises(EmulatorError, match=what) as caught:
            box(0, "async", seed, bug)
        assert BOX.line(line) in str(caught.value)


def test_wrong_byte_count_deadlocks_with_the_difference() -> None:
    with pytest.raises(
        EmulatorError, match=r"1 of 1 arrivals, -2048 bytes pending \(more came than were expected\), phase 0"
    ):
        box(0, "async", bug=6)

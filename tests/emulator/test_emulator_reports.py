"""Misuse is reported with what, which thread and which line; deadlocks with who waits for what; and Python lives on."""

from __future__ import annotations

import re

import pytest
from emulator.toy_kernels import Toy, aligned

from strobe.emulator import EmulatorError

# One kernel, one mistake per value of `bug`.
MISTAKES = Toy(
    """
STROBE_KERNEL(256, 1) kernel(STROBE_GRID_CONSTANT Params p) {
  const u32 t = thread_idx(), warp = t / 32, lane = t % 32, bar = smem_base() + 2048;
  const bool culprit = t == 70 && block_idx() == 1;
  u32 r0, r1, r2, r3;
  if (p.bug == 1 && culprit) ld_global(p.x + 1027);
  if (p.bug == 2 && culprit) st_global(p.x - 1, 0.f);
  if (p.bug == 3 && culprit) st_global(p.fixed + 3, 0.f);
  if (p.bug == 4 && culprit) ld_shared(smem_base() + 4096 - 2 + 6);
  if (p.bug == 5 && culprit) ld_shared_x4(smem_base() + 4096 - 8);
  if (p.bug == 6) ldmatrix_x4(smem_base() + 16 * lane + (culprit ? 8 : 0), r0, r1, r2, r3);
  if (p.bug == 7 && culprit) st_global(static_cast<void*>(p.x + 1), u32x4{});
  if (p.bug == 8 && lane < 20) ldmatrix_x4(smem_base() + 16 * lane, r0, r1, r2, r3);
  if (p.bug == 9) { if (lane < 16) shfl_xor(1.f, 1); else any(true); }
  if (p.bug == 10 && warp != 3) sync_block();
  if (p.bug == 11) { if (warp == 0) bar_sync(1, 64); else if (warp == 1) bar_sync(1, 128); }
  if (p.bug == 12) bar_sync(1, 100);
  if (p.bug == 13 && culprit) cp_async_16(smem_base() + 8, p.x);
  if (p.bug == 14 && culprit) cp_async_16(smem_base(), reinterpret_cast<float*>(16), true);
  if (p.bug >= 20) {
    if (t == 0) {
      mbar_init(bar, 2);
      mbar_init_fence();
    }
    sync_block();
    if (p.bug == 20 && warp >= 4) mbar_wait(bar, 0);
    if (p.bug == 20 && t == 5) mbar_arrive(bar);
    if (p.bug == 21 && t < 2) mbar_arrive(bar);
    sync_block();
    if (p.bug == 21 && warp == 1) mbar_wait(bar, 1);
    if (p.bug == 22 && t == 0) { mbar_arrive_expect_tx(bar, 64); mbar_arrive(bar); mbar_arrive(bar); }
    if (p.bug == 23 && culprit) mbar_wait(bar + 8, 0);
    if (p.bug == 24 && culprit) mbar_arrive(bar + 4);
    if (p.bug == 25 && t == 0) mbar_arrive_expect_tx(bar, 64);
  }
  st_global(p.x + t, 1.f);
}
""",
    {"x": "float32", "fixed": "float32"},
    ("bug",),
    threads=256,
    smem=4096,
    read_only=frozenset({"fixed"}),
)


def report(bug: int, mode: str = "sync") -> str:
    x = aligned(1024, "float32")
    with pytest.raises(EmulatorError) as caught:
        MISTAKES.run(x=x, fixed=aligned(16, "float32"), bug=bug, grid=2, mode=mode)
    MISTAKES.run(x=x, fixed=aligned(16, "float32"), bug=0, grid=2, mode=mode)  # and the next launch works
    assert (x[:256] == 1).all()
    return str(caught.value)


@pytest.mark.parametrize(
    ("bug", "what"),
    [
        (1, "ld_global: read of 4 bytes of global memory out of bounds: 12 bytes past the end of `x` (4096 bytes)"),
        (2, "st_global: write of 4 bytes of global memory out of bounds: 4 bytes before the start of `x` (4096 bytes)"),
        (3, "st_global: write to the read-only buffer `fixed`, byte 12"),
        (4, "ld_shared: 4 bytes of shared memory out of bounds: 4 bytes past its end (4096 bytes)"),
        (5, "ld_shared_x4: 16 bytes of shared memory out of bounds: the last 8 bytes lie past its end (4096 bytes)"),
        (6, "ldmatrix_x4: misaligned shared offset 0x68; must be a multiple of 16"),
        (7, "st_global: misaligned global address, byte 4 of `x`"),
        (13, "cp_async_16: misaligned shared offset 0x8; must be a multiple of 16"),
        (14, "cp_async_16: read of 16 bytes of global memory out of bounds: address 0x10 lies in no buffer"),
        (23, "mbar_wait: no mbarrier was initialised at shared offset 0x808"),
        (24, "mbar_arrive: mbarrier at shared offset 0x804 is not 8-byte aligned"),
    ],
)
def test_bad_access_names_thread_and_line(bug: int, what: str) -> None:
    text = report(bug)
    assert what in text
    assert "block 1, thread 70 (warp 2, lane 6)" in text
    assert f"at {MISTAKES.line(f'p.bug == {bug}' + (')' if bug == 6 else ' '))}\n" in text


def test_divergent_warp_is_reported() -> None:
    text = report(8)
    assert "deadlock in block" in text
    assert "ldmatrix_x4 at " + MISTAKES.line("p.bug == 8 ") in text
    assert "divergent: only 20 of the 32 lanes of warp 0 came" in text
    text = report(9)
    assert re.search(
        r"divergent warp: this thread reaches any while \d+ others wait in shfl_xor at " + MISTAKES.line("p.bug == 9)"),
        text,
    )


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_deadlock_says_who_waits_for_what(mode: str) -> None:
    text = report(10, mode)
    assert (
        f"warps 0-2, 4-7 (224 threads): sync_block at {MISTAKES.line('p.bug == 10 ')}; 224 of 256 threads arrived"
        in text
    )
    assert "warp 3 (32 threads): exited" in text
    text = report(20, mode)
    where = MISTAKES.line("p.bug == 20 && warp >= 4")
    assert f"warps 4-7 (128 threads): mbar_wait(0x800, parity 0) at {where}; barrier state: 1 of 2 arrivals, " in text
    assert "0 bytes pending, phase 0" in text


def test_wrong_parity_deadlocks_with_the_state_of_the_barrier() -> None:
    text = report(21)
    where = MISTAKES.line("p.bug == 21 && warp == 1")
    assert f"warp 1 (32 threads): mbar_wait(0x800, parity 1) at {where}; barrier state: 0 of 2 arrivals" in text
    assert "0 bytes pending, phase 1" in text


def test_over_arrival_and_bad_barriers_are_reported() -> None:
    text = report(22)
    assert (
        "mbar_arrive: one arrival too many on the mbarrier at 0x800: all 2 of phase 0 are in, 64 bytes are still to come"
        in text
    )
    assert MISTAKES.line("p.bug == 22") in text
    assert "barrier 1 with" in report(11)
    assert "bar_sync: 100 threads; must be a multiple of 32" in report(12)
    assert "ended with 64 bytes pending on the mbarrier at 0x800" in report(25)


def test_wrong_launches_are_refused() -> None:
    from strobe.emulator import build

    program = build(MISTAKES.source(), name="mistakes")
    with pytest.raises(EmulatorError, match="params has 3 bytes, the kernel's Params 24"):
        program.run(b"abc", grid=1, threads=32, smem=0, buffers=[])
    with pytest.raises(
        EmulatorError, match="threads=512; must be a multiple of 32, at most the kernel's launch bound 256"
    ):
        program.run(bytes(24), grid=1, threads=512, smem=0, buffers=[])
    with pytest.raises(ValueError, match="mode: 'late'"):
        program.run(bytes(24), grid=1, threads=32, smem=0, buffers=[], mode="late")  # type: ignore[arg-type]

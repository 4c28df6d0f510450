"""wgmma: all six forms against numpy, and everything that must not happen while one is in flight."""

from __future__ import annotations

import numpy as np
import pytest
from emulator.toy_kernels import Toy, aligned, from_bits, place, to_bits

from strobe.emulator import EmulatorError

N, D = 80, 128
# S = Q K^T twice (Q from shared memory, Q from registers), P = round(S), O = 2 P V. Tiles are panels of 64 columns,
# 128-byte swizzled, Q and K K-major, V MN-major. bug 1: no proxy fence; 2: no wait before S is read; 3: P changed in
# flight; 4: no wgmma_fence; 5: K overwritten in flight; 6: O written in flight; 7: descriptor without the swizzle bit;
# 8: waits for one group too few; 9: tile past shared memory.
PRODUCTS = Toy(
    """
constexpr int N = 80, D = 128;
void fill(u32 tile, const u16* from, u32 rows) {  // rows x 128 elements
  for (u32 i = thread_idx(); i < rows * 16; i += 128) {
    const u32 row = i / 16, panel = i / 8 % 2, chunk = i % 8;
    cp_async_16(tile + panel * rows * 128 + row * 128 + ((chunk ^ row % 8) << 4), from + row * D + panel * 64 + chunk * 8);
  }
}
template <class T> void products(const Params& p) {
  const u32 t = thread_idx(), warp = t / 32, lane = t % 32;
  const u32 q_tile = smem_base(), k_tile = q_tile + 64 * D * 2, v_tile = k_tile + N * D * 2;
  fill(q_tile, p.q, 64), fill(k_tile, p.k, N), fill(v_tile, p.v, N);
  cp_async_commit();
  cp_async_wait<0>();
  if (p.bug != 1) fence_proxy_async();
  sync_block();
  u32 a[D / 4], packed[N / 4];
  float s[N / 2], o[D / 2], again[N / 2];
  for (int i = 0; i < D / 16; ++i) {
    const u32 row = 16 * warp + lane % 16, chunk = 2 * (i % 4) + lane / 16;
    const u32 at = q_tile + i / 4 * 64 * 128 + row * 128 + ((chunk ^ row % 8) << 4);
    ldmatrix_x4(at, a[4 * i], a[4 * i + 1], a[4 * i + 2], a[4 * i + 3]);
  }
  const u64 q = wgmma_desc(q_tile, 0, 1024), k = wgmma_desc(k_tile, 0, 1024) & ~(u64(p.bug == 7) << 62);
  const u64 v = wgmma_desc(v_tile + (p.bug == 9 ? 1024 : 0), N * 128, 1024);
  if (p.bug != 4) wgmma_fence();
  for (int i = 0; i < D / 16; ++i) {
    const u64 qi = q + i / 4 * 64 * 8 + i % 4 * 2, ki = k + i / 4 * N * 8 + i % 4 * 2;
    if (i == 0) Wgmma<T, N>::ss_zero(s, qi, ki);
    else Wgmma<T, N>::ss(s, qi, ki);
  }
  wgmma_commit();
  for (int i = 0; i < D / 16; ++i) {
    const u64 ki = k + i / 4 * N * 8 + i % 4 * 2;
    if (i == 0) Wgmma<T, N>::rs_zero(again, a[4 * i], a[4 * i + 1], a[4 * i + 2], a[4 * i + 3], ki);
    else Wgmma<T, N>::rs(again, a[4 * i], a[4 * i + 1], a[4 * i + 2], a[4 * i + 3], ki);
  }
  wgmma_commit();
  if (p.bug == 5 && t == 7) st_shared(k_tile + 64, 0u);
  if (p.bug != 2) wgmma_wait<1>();
  for (int i = 0; i < N / 4; ++i) packed[i] = pack2<T>(s[2 * i], s[2 * i + 1]);
  wgmma_fence();
  for (int i = 0; i < N / 16; ++i) {
    u32* x = packed + 4 * i;
    if (i == 0) Wgmma<T, D>::rs_t_zero(o, x[0], x[1], x[2], x[3], v);
    else Wgmma<T, D>::rs_t(o, x[0], x[1], x[2], x[3], v + i * 128);
  }
  for (int i = 0; i < N / 16; ++i) {
    u32* y = packed + 4 * i;
    Wgmma<T, D>::rs_t(o, y[0], y[1], y[2], y[3], v + i * 128);
  }
  wgmma_commit();
  if (p.bug == 3 && t == 33) packed[5] ^= 1;
  if (p.bug == 6 && t == 34) o[3] = 0.f;
  if (p.bug == 8) wgmma_wait<1>();
  else wgmma_wait<0>();
  const u32 row = 16 * warp + lane / 4;
  for (int i = 0; i < N / 2; ++i) {
    const u32 at = (row + 8 * (i / 2 % 2)) * N + 8 * (i / 4) + 2 * (lane % 4) + i % 2;
    st_global(p.s + at, s[i]), st_global(p.again + at, again[i]);
  }
  for (int i = 0; i < D / 2; ++i) st_global(p.o + (row + 8 * (i / 2 % 2)) * D + 8 * (i / 4) + 2 * (lane % 4) + i % 2, o[i]);
}
STROBE_KERNEL(128, 1) kernel(STROBE_GRID_CONSTANT Params p) {
  if (p.fp16) products<fp16>(p);
  else products<bf16>(p);
}
""",
    {"q": "uint16", "k": "uint16", "v": "uint16", "s": "float32", "again": "float32", "o": "float32"},
    ("fp16", "bug"),
    threads=128,
    smem=(64 + 2 * N) * D * 2,
)


def products(element: str, mode: str, seed: int = 0, bug: int = 0) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(0)
    q, k, v = (place(to_bits(rng.standard_normal((rows, D)), element)) for rows in (64, N, N))
    s, again, o = aligned((64, N), "float32"), aligned((64, N), "float32"), aligned((64, D), "float32")
    counters = PRODUCTS.run(q=q, k=k, v=v, s=s, again=again, o=o, fp16=element == "fp16", bug=bug, mode=mode, seed=seed)
    assert counters.wgmma == 8 + 8 + 5 + 5
    assert counters.flops == 16 * 2 * 64 * N * 16 + 10 * 2 * 64 * D * 16
    return *(from_bits(x, element) for x in (q, k, v)), s, again, o


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("element", ["bf16", "fp16"])
def test_products_from_shared_memory_and_registers(element: str, mode: str) -> None:
    for seed in range(2):
        q, k, v, s, again, o = products(element, mode, seed)
        np.testing.assert_allclose(s, q @ k.T, atol=1e-4, rtol=0)
        np.testing.assert_array_equal(again, s)
        np.testing.assert_allclose(o, 2 * from_bits(to_bits(s, element), element) @ v, atol=1e-3, rtol=0)


def test_missing_wait_gives_nan() -> None:
    *_, o = products("bf16", "async", bug=2)
    assert np.isnan(o).all()
    *_, o = products("bf16", "async", bug=8)
    assert np.isnan(o).all()


@pytest.mark.parametrize(
    ("bug", "what", "line"),
    [
        (
            1,
            "wgmma: reads shared memory .* through the async proxy, but its writer has not executed fence_proxy_async",
            "ss_zero",
        ),
        (3, "wgmma: register operand a1 was overwritten while the product was in flight", "else Wgmma<T, D>::rs_t(o"),
        (4, "wgmma: no wgmma_fence", "ss_zero"),
        (5, "st_shared: write to shared memory .* that a wgmma or TMA store in flight still reads", "p.bug == 5"),
        (
            6,
            "wgmma: accumulator register 3 was written while the product was in flight",
            "rs_t(o, y[0]",
        ),
        (7, "wgmma: descriptor of B does not ask for the 128-byte swizzle", "ss_zero"),
        (9, "wgmma: 16 bytes of shared memory out of bounds", "rs_t(o"),
    ],
)
def test_hazards_in_flight_are_caught(bug: int, what: str, line: str) -> None:
    with pytest.raises(EmulatorError, match=what) as caught:
        products("bf16", "async", bug=bug)
    where = [f"toy.cu:{i}\n" for i, text in enumerate(PRODUCTS.kernel.strip().splitlines(), start=1) if line in text]
    assert any(at in str(caught.value) or at.strip() + " " in str(caught.value) for at in where), str(caught.value)

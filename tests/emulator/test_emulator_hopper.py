"""A whole warp-specialised forward (TMA, mbarrier ring, wgmma, P in registers, TMA store), and mutations of it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from emulator.toy_kernels import Toy, aligned, place, to_bits

from strobe.cuda.runtime.driver import TensorMapSpec
from strobe.emulator import Counters, EmulatorError

BLOCK_N, STAGES = 64, 2
# bug 1: K is never released; 2: one consumer warpgroup forgets to release V; 3: wrong parity for V; 4: K released
# before the wait for S; 5: Q K^T is not waited for; 6: no proxy fence before O is stored; 7: producer expects too few
# bytes.
FORWARD = Toy(
    """
constexpr int BM = 128, BN = 64, ST = 2;
float quad_max(float x) { x = strobe::fmax(x, shfl_xor(x, 1)); return strobe::fmax(x, shfl_xor(x, 2)); }
float quad_sum(float x) { x += shfl_xor(x, 1); return x + shfl_xor(x, 2); }
struct Ring { u32 stage = 0, parity = 0; void next() { if (++stage == ST) stage = 0, parity ^= 1; } };

template <int D> void forward(const Params& p) {
  constexpr u32 kQ = BM * D * 2, kKV = BN * D * 2;
  const u32 q = smem_base(), k0 = q + kQ, v0 = k0 + ST * kKV, q_full = v0 + ST * kKV;
  const u32 k_full = q_full + 8, k_empty = k_full + 8 * ST, v_full = k_empty + 8 * ST, v_empty = v_full + 8 * ST;
  const int tiles_m = (p.len_q + BM - 1) / BM, m0 = block_idx() % tiles_m * BM, head = block_idx() / tiles_m;
  const int shift = p.len_k - p.len_q;
  if (thread_idx() == 0) {
    mbar_init(q_full, 1);
    for (u32 i = 0; i < 8 * ST; i += 8) mbar_init(k_full + i, 1), mbar_init(v_full + i, 1);
    for (u32 i = 0; i < 8 * ST; i += 8) mbar_init(k_empty + i, 2), mbar_init(v_empty + i, 2);
    mbar_init_fence();
  }
  sync_block();
  int blocks = (p.len_k + BN - 1) / BN;
  if (p.causal) blocks = min(blocks, max(0, m0 + BM + shift + BN - 1) / BN);
  const u32 role = warp_uniform(thread_idx() / 128);
  if (role == 0) {
    regs_dec<24>();
    if (thread_idx() == 0) {
      mbar_arrive_expect_tx(q_full, kQ);
      for (int w = 0; w < 2; ++w) tma_load_5d(q + w * kQ / 2, &p.q, q_full, 0, m0 + 64 * w, 0, head, 0);
      Ring ring{0, 1};
      for (int n = blocks - 1; n >= 0; --n, ring.next()) {
        mbar_wait(k_empty + 8 * ring.stage, ring.parity);
        mbar_arrive_expect_tx(k_full + 8 * ring.stage, p.bug == 7 ? kKV / 2 : kKV);
        tma_load_5d(k0 + ring.stage * kKV, &p.k, k_full + 8 * ring.stage, 0, n * BN, 0, head, 0);
        mbar_wait(v_empty + 8 * ring.stage, p.bug == 3 ? 0 : ring.parity);
        mbar_arrive_expect_tx(v_full + 8 * ring.stage, kKV);
        tma_load_5d(v0 + ring.stage * kKV, &p.v, v_full + 8 * ring.stage, 0, n * BN, 0, head, 0);
      }
    }
    return;
  }
  regs_inc<240>();
  const u32 wg = role - 1, t = thread_idx() % 128, warp = t / 32, lane = t % 32, q_tile = q + wg * kQ / 2;
  const int row = m0 + 64 * wg + 16 * warp + lane / 4;
  float o[D / 2], m[2] = {-1e30f, -1e30f}, l[2] = {};
  for (float& x : o) x = 0.f;
  mbar_wait(q_full, 0);
  Ring ring;
  for (int n = blocks - 1; n >= 0; --n, ring.next()) {
    float s[BN / 2];
    mbar_wait(k_full + 8 * ring.stage, ring.parity);
    wgmma_fence();
    for (int i = 0; i < D / 16; ++i) {
      const u64 a = wgmma_desc(q_tile, 0, 1024) + i / 4 * 64 * 8 + i % 4 * 2;
      const u64 b = wgmma_desc(k0 + ring.stage * kKV, 0, 1024) + i / 4 * BN * 8 + i % 4 * 2;
      if (i == 0) Wgmma<bf16, BN>::ss_zero(s, a, b);
      else Wgmma<bf16, BN>::ss(s, a, b);
    }
    wgmma_commit();
    if (p.bug == 4 && t == 0) mbar_arrive(k_empty + 8 * ring.stage);
    if (p.bug != 5) wgmma_wait<0>();
    if (t == 0 && p.bug != 1 && p.bug != 4) mbar_arrive(k_empty + 8 * ring.stage);
    for (int i = 0; i < BN / 2; ++i) {
      const int column = n * BN + 8 * (i / 4) + 2 * (lane % 4) + i % 2;
      const int limit = p.causal ? min(p.len_k, row + 8 * (i / 2 % 2) + shift + 1) : p.len_k;
      if (column >= limit) s[i] = -1e30f;
    }
    for (int r = 0; r < 2; ++r) {
      float high = m[r];
      for (int i = 2 * r; i < BN / 2; i += 4) high = strobe::fmax(high, strobe::fmax(s[i], s[i + 1]));
      high = quad_max(high);
      const float alpha = exp2_approx((m[r] - high) * p.scale_log2 * 0x1p-16f);
      m[r] = high, l[r] *= alpha;
      for (int i = 2 * r; i < D / 2; i += 4) o[i] *= alpha, o[i + 1] *= alpha;
      for (int i = 2 * r; i < BN / 2; i += 4)
        for (int j = i; j < i + 2; ++j) l[r] += s[j] = exp2_approx((s[j] - high) * p.scale_log2 * 0x1p-16f);
    }
    u32 packed[BN / 4];
    for (int i = 0; i < BN / 4; ++i) packed[i] = pack2<bf16>(s[2 * i], s[2 * i + 1]);
    mbar_wait(v_full + 8 * ring.stage, ring.parity);
    wgmma_fence();
    const u64 v = wgmma_desc(v0 + ring.stage * kKV, BN * 128, 1024);
    for (int i = 0; i < BN / 16; ++i)
      Wgmma<bf16, D>::rs_t(o, packed[4 * i], packed[4 * i + 1], packed[4 * i + 2], packed[4 * i + 3], v + i * 128);
    wgmma_commit();
    wgmma_wait<0>();
    if (t == 0 && !(p.bug == 2 && wg == 1)) mbar_arrive(v_empty + 8 * ring.stage);
  }
  for (int r = 0; r < 2; ++r) {
    const float sum = quad_sum(l[r]), inverse = sum > 0.f ? rcp_approx(sum) : 0.f;
    const float lse = m[r] * p.scale_log2 * 0x1p-16f + log2_approx(sum);
    if (lane % 4 == 0 && row + 8 * r < p.len_q) st_global(p.lse + head * p.len_q + row + 8 * r, lse);
    for (int i = 2 * r; i < D / 2; i += 4) o[i] *= inverse, o[i + 1] *= inverse;
  }
  bar_sync(1 + wg, 128);  // Q has been read by everyone: O goes in its place
  for (int j = 0; j < D / 16; ++j) {
    const u32 at = 16 * warp + lane % 16, chunk = 2 * (j % 4) + lane / 16;
    u32 r[4];
    for (int i = 0; i < 4; ++i) r[i] = pack2<bf16>(o[8 * j + 2 * i], o[8 * j + 2 * i + 1]);
    stmatrix_x4(q_tile + j / 4 * 8192 + at * 128 + ((chunk ^ at % 8) << 4), r[0], r[1], r[2], r[3]);
  }
  if (p.bug != 6) fence_proxy_async();
  bar_sync(1 + wg, 128);
  if (t == 0) {
    tma_store_5d(&p.out, q_tile, 0, m0 + 64 * wg, 0, head, 0);
    tma_store_commit();
    tma_store_wait_read<0>();
  }
}
STROBE_KERNEL(384, 1) kernel(STROBE_GRID_CONSTANT Params p) {
  if (p.dim == 64) forward<64>(p);
  else forward<128>(p);
}
""",
    {"qx": "uint16", "kx": "uint16", "vx": "uint16", "ox": "uint16", "lse": "float32"},
    ("len_q", "len_k", "dim", "causal", "scale_log2", "bug"),
    ("q", "k", "v", "out"),
    threads=384,
    smem=(128 + 4 * BLOCK_N) * 128 * 2 + 256,
)


def forward(
    heads: int, len_q: int, len_k: int, dim: int, causal: bool, mode: str, seed: int = 0, bug: int = 0
) -> tuple[float, float, Counters]:
    """Relative error of O and largest error of the LSE against float64."""
    rng = np.random.default_rng(0)
    arrays = {
        name: place(to_bits(rng.standard_normal((length, heads, dim)), "bf16"))
        for name, length in (("q", len_q), ("k", len_k), ("v", len_k))
    }
    arrays["out"], lse = aligned((len_q, heads, dim), "uint16"), aligned((heads, len_q), "float32")
    arrays["out"][:], lse[:] = 0x7FFF, np.nan

    def spec(array: np.ndarray, rows: int) -> TensorMapSpec:
        length, pitch = array.shape[0], heads * dim * 2
        return TensorMapSpec(
            array.ctypes.data,
            2,
            (64, length, dim // 64, heads, 1),
            (pitch, 128, dim * 2, length * pitch),
            (64, rows, dim // 64, 1, 1),
        )

    specs = {name: spec(array, BLOCK_N if name in "kv" else 64) for name, array in arrays.items()}
    scale_log2 = round(dim**-0.5 * np.log2(np.e) * 2**16)
    counters = FORWARD.run(
        grid=heads * -(-len_q // 128),
        mode=mode,
        seed=seed,
        specs=specs,
        qx=arrays["q"],
        kx=arrays["k"],
        vx=arrays["v"],
        ox=arrays["out"],
        lse=lse,
        len_q=len_q,
        len_k=len_k,
        dim=dim,
        causal=causal,
        scale_log2=scale_log2,
        bug=bug,
    )
    q, k, v, o = (
        torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16).double().transpose(0, 1)
        for array in arrays.values()
    )
    s = q @ k.transpose(1, 2) * (scale_log2 / 2**16 * np.log(2))
    if causal:
        s.masked_fill_(~torch.ones(len_q, len_k, dtype=torch.bool).tril(len_k - len_q), -torch.inf)
    expected = s.softmax(-1) @ v
    lse_error = (torch.from_numpy(lse).double() * np.log(2) - s.logsumexp(-1)).abs().max()
    return float((o - expected).norm() / expected.norm()), float(lse_error), counters


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize(
    ("heads", "len_q", "len_k", "dim", "causal"),
    [(2, 128, 128, 128, False), (1, 200, 333, 128, True), (1, 77, 300, 64, False), (2, 130, 130, 64, True)],
)
def test_warp_specialised_forward_is_exact_attention(
    heads: int, len_q: int, len_k: int, dim: int, causal: bool, mode: str
) -> None:
    error, lse_error, counters = forward(heads, len_q, len_k, dim, causal, mode, seed=1)
    assert error < 3e-3
    assert lse_error < 2e-5
    assert counters.wgmma > 0 and counters.mma == 0
    assert counters.bank_conflicts == 0


@pytest.mark.parametrize(
    ("bug", "what"),
    [
        (1, r"thread 0 \(1 thread\): mbar_wait\(0x\w+, parity 0\).*barrier state: 0 of 2 arrivals"),
        (2, r"thread 0 \(1 thread\): mbar_wait\(0x\w+, parity 0\).*barrier state: 1 of 2 arrivals"),
        (3, r"deadlock"),
        (4, r"tma_load_5d: .* in flight still reads|wgmma: .* copy still in flight|overwritten with no barrier"),
        (5, r"wgmma: accumulator register \d+ was written|that a wgmma or TMA store in flight still reads"),
        (6, r"tma_store_5d: .* fence_proxy_async"),
        (7, r"-4096 bytes pending \(more came than were expected\)"),
    ],
)
def test_mutations_are_caught(bug: int, what: str) -> None:
    with pytest.raises(EmulatorError, match=f"(?s){what}"):
        forward(1, 128, 400, 64, False, "async", seed=bug, bug=bug)

// 10  Hopper: the copy engine and the warpgroup's product
//
// What changed: one thread starts a copy of a whole tile (TMA), and the hardware computes addresses, swizzles, fills
//   with zeros beyond the end, and counts the bytes on a barrier in shared memory. Four warps multiply together
//   (wgmma): S = Q K^T reads both factors from shared memory by itself, without ldmatrix; P V takes P from
//   registers. From here on the rungs use the library's vocabulary: gemm_qk, gemm_pv, Softmax, and mask only the
//   tiles at the edge.
// Why it should help: mma.sync reaches two thirds of Hopper's matrix units, wgmma nearly all; nobody computes
//   addresses any more.
// Predicted: x 1.2 the speed of 09: the ceiling rises by half, and a single buffer gives part of it back.
// Measured: x 2.30, 480 TFLOP/s (NVIDIA H200; docs/ladder.md says how)
// What limits it now: everybody waits for everything, one after the other: copy, product, softmax, product. Only a
//   second block on the same multiprocessor fills the pauses.
#include <strobe/ptx/tma.cuh>
#include <strobe/tile/gemm_sm90.cuh>
#include "ladder.cuh"

namespace strobe {

constexpr int kThreads = 128, kRows = 64, kKeys = 128;  // one warpgroup
constexpr u32 kBytesQ = tile_bytes<bf16>(64, kDim), kBytesK = tile_bytes<bf16>(kKeys, kDim), kBytesV = kBytesK;
constexpr u32 kOffsetK = kBytesQ, kOffsetV = kOffsetK + kBytesK, kOffsetBarriers = kOffsetV + kBytesV;
static_assert(kSmem == kOffsetBarriers + 16, "the shared memory that Python asks for");

STROBE_DEVICE void load_rows(u32 tile, const TensorMap& map, u32 barrier, int row, int slice) {
  tma_load_5d(tile, &map, barrier, 0, row, 0, slice, 0);
}

STROBE_DEVICE void attend(const Params& p) {
  const int blocks = (p.len_q + kRows - 1) / kRows, slice = block_idx() / blocks, row0 = block_idx() % blocks * kRows;
  const u32 q_tile = smem_base(), k_tile = q_tile + kOffsetK, v_tile = q_tile + kOffsetV;
  const u32 q_barrier = q_tile + kOffsetBarriers, kv_barrier = q_barrier + 8;
  if (thread_idx() == 0) {
    mbar_init(q_barrier, 1);
    mbar_init(kv_barrier, 1);
    mbar_init_fence();
    mbar_arrive_expect_tx(q_barrier, kBytesQ);
    load_rows(q_tile, p.map_q, q_barrier, row0, slice);
  }
  sync_block();  // the barriers are there
  mbar_wait(q_barrier, 0);

  const int g = thread_idx() % 32 / 4, t = 2 * (thread_idx() % 4), query = row0 + thread_idx() / 32 * 16 + g;
  const int seen[2] = {visible_keys(p, query), visible_keys(p, query + 8)};  // a thread has two rows
  const int keys = visible_keys(p, min(row0 + kRows, p.len_q) - 1);  // of the last row, which sees the most
  float o[kDim / 2] = {};
  Softmax<> softmax;
  softmax.reset(p.scale_log2);
  for (int key0 = 0; key0 < keys; key0 += kKeys) {
    if (thread_idx() == 0) {
      mbar_arrive_expect_tx(kv_barrier, kBytesK + kBytesV);
      load_rows(k_tile, p.map_k, kv_barrier, key0, slice);
      load_rows(v_tile, p.map_v, kv_barrier, key0, slice);
    }
    sync_warp();  // thread 0 is back with its warp
    mbar_wait(kv_barrier, key0 / kKeys & 1);

    float s[kKeys / 2];
    wgmma_fence();
    gemm_qk<bf16, kKeys, kDim, kKeys>(s, k_major(q_tile), k_major(k_tile));
    wgmma_commit();
    wgmma_wait<0>();
    pin(s);
    if (key0 + kKeys > seen[0]) {
      const int lo[2] = {0, 0}, hi[2] = {seen[0] - key0 - t, seen[1] - key0 - t};
      mask_fragment<false>(s, lo, hi);
    }
    u32 weights[kKeys / 4];
    softmax.maxima<true>(s);
    softmax.weights<0, kKeys / 2>(s);
    softmax.rescale(o);
    pack_fragment<bf16>(weights, s);

    pin(o);
    pin(weights);
    wgmma_fence();
    gemm_pv<bf16, kKeys, kDim>(o, weights, mn_major(v_tile, kKeys));
    wgmma_commit();
    wgmma_wait<0>();
    pin(o);
    sync_block();  // nobody reads K and V any more
  }

#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const i64 row = i64(slice) * p.len_q + query + 8 * r;
    float lse;
    const float inverse = softmax.finish<false>(r, 0.f, lse);
    if (query + 8 * r >= p.len_q) continue;
#pragma unroll
    for (int i = 0; i < kDim / 2; i += 4)
      st_global(reinterpret_cast<u32*>(p.o + row * kDim + t + 2 * i),
                pack2<bf16>(o[i + 2 * r] * inverse, o[i + 2 * r + 1] * inverse));
    if (t == 0) st_global(p.lse + row, lse);
  }
}

}  // namespace strobe

STROBE_KERNEL(strobe::kThreads, 1) kernel(STROBE_GRID_CONSTANT strobe::Params p) { strobe::attend(p); }

// 11  Warp specialisation
//
// What changed: a block has roles. One warpgroup, of which a single thread works, only starts copies; two others,
//   with 64 queries each, only compute, and share the keys. Between them are rings of two buffers for K and for V:
//   `full` and `empty` barriers say whose turn a buffer is. The producer gives its registers to the consumers
//   (setmaxnreg).
// Why it should help: copies run ahead of the arithmetic by a whole ring and never wait for a softmax; K and V are
//   fetched once for 128 queries; and of two consumers one can multiply while the other is at its exponentials.
// Predicted: x 1.35 the speed of 10: from some 40 % of the matrix units' peak to some 55 %, without any waiting for
//   copies.
// Measured: x 1.15, 551 TFLOP/s (NVIDIA H200; docs/ladder.md says how)
// What limits it now: whether the two consumers interleave is left to chance. If both are at their exponentials, the
//   matrix units wait.
#include <strobe/pipeline/ring.cuh>
#include <strobe/tile/gemm_sm90.cuh>
#include "ladder.cuh"

namespace strobe {

constexpr int kConsumers = 2, kThreads = 128 * (1 + kConsumers), kRows = 64 * kConsumers, kKeys = 128, kStages = 2;
constexpr u32 kBytesQ = tile_bytes<bf16>(64, kDim), kBytesK = tile_bytes<bf16>(kKeys, kDim), kBytesV = kBytesK;
constexpr u32 kOffsetK = kConsumers * kBytesQ, kOffsetV = kOffsetK + kStages * kBytesK;
constexpr u32 kOffsetBarriers = kOffsetV + kStages * kBytesV;
static_assert(kSmem == kOffsetBarriers + 16 + 2 * Ring<kStages>::kBytes, "the shared memory that Python asks for");
STROBE_DEVICE u32 q_barrier() { return smem_base() + kOffsetBarriers; }
STROBE_DEVICE u32 k_barriers() { return q_barrier() + 16; }
STROBE_DEVICE u32 v_barriers() { return k_barriers() + Ring<kStages>::kBytes; }

STROBE_DEVICE void load_rows(u32 tile, const TensorMap& map, u32 barrier, int row, int slice) {
  tma_load_5d(tile, &map, barrier, 0, row, 0, slice, 0);
}

STROBE_DEVICE void produce(const Params& p, int slice, int row0, int keys) {
  Ring<kStages> k(k_barriers(), true), v(v_barriers(), true);
  mbar_arrive_expect_tx(q_barrier(), kConsumers * kBytesQ);
  for (int w = 0; w < kConsumers; ++w) load_rows(smem_base() + w * kBytesQ, p.map_q, q_barrier(), row0 + 64 * w, slice);
  for (int key0 = 0; key0 < keys; key0 += kKeys) {
    k.wait_empty();
    mbar_arrive_expect_tx(k.full_barrier(), kBytesK);
    load_rows(smem_base() + kOffsetK + k.stage * kBytesK, p.map_k, k.full_barrier(), key0, slice);
    k.next();
    v.wait_empty();
    mbar_arrive_expect_tx(v.full_barrier(), kBytesV);
    load_rows(smem_base() + kOffsetV + v.stage * kBytesV, p.map_v, v.full_barrier(), key0, slice);
    v.next();
  }
}

STROBE_DEVICE void consume(const Params& p, int slice, int row0, int keys, int consumer) {
  Ring<kStages> k(k_barriers(), false), v(v_barriers(), false);
  const bool elected = thread_idx() % 32 == 0;  // one arrival a warp
  const u32 q_tile = smem_base() + consumer * kBytesQ;
  const int g = thread_idx() % 32 / 4, t = 2 * (thread_idx() % 4);
  const int query = row0 + 64 * consumer + thread_idx() % 128 / 32 * 16 + g;  // and query + 8
  const int seen[2] = {visible_keys(p, query), visible_keys(p, query + 8)};
  float o[kDim / 2] = {};
  Softmax<> softmax;
  softmax.reset(p.scale_log2);
  mbar_wait(q_barrier(), 0);
  for (int key0 = 0; key0 < keys; key0 += kKeys) {
    float s[kKeys / 2];
    k.wait_full();
    wgmma_fence();
    gemm_qk<bf16, kKeys, kDim, kKeys>(s, k_major(q_tile), k_major(smem_base() + kOffsetK + k.stage * kBytesK));
    wgmma_commit();
    wgmma_wait<0>();
    pin(s);
    if (elected) k.release();
    k.next();
    if (key0 + kKeys > seen[0]) {
      const int lo[2] = {0, 0}, hi[2] = {seen[0] - key0 - t, seen[1] - key0 - t};
      mask_fragment<false>(s, lo, hi);
    }
    u32 weights[kKeys / 4];
    softmax.maxima<true>(s);
    softmax.weights<0, kKeys / 2>(s);
    softmax.rescale(o);
    pack_fragment<bf16>(weights, s);

    v.wait_full();
    pin(o);
    pin(weights);
    wgmma_fence();
    gemm_pv<bf16, kKeys, kDim>(o, weights, mn_major(smem_base() + kOffsetV + v.stage * kBytesV, kKeys));
    wgmma_commit();
    wgmma_wait<0>();
    pin(o);
    if (elected) v.release();
    v.next();
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

STROBE_DEVICE void attend(const Params& p) {
  const int blocks = (p.len_q + kRows - 1) / kRows, slice = block_idx() / blocks, row0 = block_idx() % blocks * kRows;
  const int keys = visible_keys(p, min(row0 + kRows, p.len_q) - 1);  // of the last row, which sees the most
  if (thread_idx() == 0) {
    mbar_init(q_barrier(), 1);
    Ring<kStages>::init(k_barriers(), 4 * kConsumers);
    Ring<kStages>::init(v_barriers(), 4 * kConsumers);
    mbar_init_fence();
  }
  sync_block();  // the barriers are there
  const int warpgroup = warp_uniform(thread_idx() / 128);
  if (warpgroup == 0) {
    regs_dec<40>();
    if (thread_idx() == 0) produce(p, slice, row0, keys);
  } else {
    regs_inc<232>();
    consume(p, slice, row0, keys, warpgroup - 1);
  }
}

}  // namespace strobe

STROBE_KERNEL(strobe::kThreads, 1) kernel(STROBE_GRID_CONSTANT strobe::Params p) { strobe::attend(p); }

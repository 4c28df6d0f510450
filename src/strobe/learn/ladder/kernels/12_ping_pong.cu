// 12  Ping-pong
//
// What changed: the consumers take turns. Two named barriers pass a right to and fro: who has it issues its products
//   (P V of the last keys, Q K^T of the next), hands it over, and turns to its softmax while the other's products
//   run.
// Why it should help: the two are kept half a round apart, so that the exponentials of one always overlap
//   with products of the other.
// Predicted: x 1.08 the speed of 11: chance already gives most of it; the paper that introduced it found 570 to 620
//   TFLOP/s.
// Measured: x 1.11, 609 TFLOP/s (NVIDIA H200; docs/ladder.md says how)
// What limits it now: inside a warpgroup products and softmax still come one after the other: from the last
//   instruction of Q K^T on, nothing of its own is in flight while it takes exponentials.
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

// The right to issue products: a barrier for each consumer, on which it waits and the other arrives.
STROBE_DEVICE void wait_turn(int consumer) { bar_sync(1 + consumer, 256); }
STROBE_DEVICE void pass_turn(int consumer) { bar_arrive(1 + (1 - consumer), 256); }

STROBE_DEVICE void consume(const Params& p, int slice, int row0, int keys, int consumer) {
  Ring<kStages> k(k_barriers(), false), v(v_barriers(), false);
  const bool elected = thread_idx() % 32 == 0;  // one arrival a warp
  const u32 q_tile = smem_base() + consumer * kBytesQ;
  const int g = thread_idx() % 32 / 4, t = 2 * (thread_idx() % 4);
  const int query = row0 + 64 * consumer + thread_idx() % 128 / 32 * 16 + g;  // and query + 8
  const int seen[2] = {visible_keys(p, query), visible_keys(p, query + 8)};
  float o[kDim / 2] = {};
  u32 weights[kKeys / 4];
  Softmax<> softmax;
  softmax.reset(p.scale_log2);
  if (consumer == 1) pass_turn(consumer);  // the first turn is that of consumer 0
  mbar_wait(q_barrier(), 0);
  const auto add_values = [&] {  // O = O + P V
    pin(o);
    pin(weights);
    wgmma_fence();
    gemm_pv<bf16, kKeys, kDim>(o, weights, mn_major(smem_base() + kOffsetV + v.stage * kBytesV, kKeys));
    wgmma_commit();
  };
  const auto release_values = [&] {
    if (elected) v.release();
    v.next();
  };
  for (int key0 = 0; key0 < keys; key0 += kKeys) {
    float s[kKeys / 2];
    k.wait_full();
    if (key0 > 0) v.wait_full();
    wait_turn(consumer);
    if (key0 > 0) add_values();  // of the keys before
    wgmma_fence();
    gemm_qk<bf16, kKeys, kDim, kKeys>(s, k_major(q_tile), k_major(smem_base() + kOffsetK + k.stage * kBytesK));
    wgmma_commit();
    pass_turn(consumer);
    wgmma_wait<0>();
    pin(s);
    pin(o);
    if (elected) k.release();
    k.next();
    if (key0 > 0) release_values();
    if (key0 + kKeys > seen[0]) {
      const int lo[2] = {0, 0}, hi[2] = {seen[0] - key0 - t, seen[1] - key0 - t};
      mask_fragment<false>(s, lo, hi);
    }
    softmax.maxima<true>(s);
    softmax.weights<0, kKeys / 2>(s);
    softmax.rescale(o);
    pack_fragment<bf16>(weights, s);
  }
  if (keys > 0) {  // the last values
    v.wait_full();
    add_values();
    wgmma_wait<0>();
    pin(o);
    release_values();
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

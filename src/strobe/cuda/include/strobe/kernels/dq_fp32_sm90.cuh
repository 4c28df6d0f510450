// dQ on Hopper for fp32 inputs, in three bf16 terms each (tile/terms.cuh). dkv_fp32_sm90.cuh has the rest.
//
// What becomes of S and dP is what dq_sm90.cuh does. The terms of Q and dO take half of shared memory, so a block owns
// 64 queries. Its two consumer warpgroups take every other block of keys each, with a K and a V buffer of their own,
// and add up their dQ at the end.
#pragma once
#include <strobe/kernels/dq_sm90.cuh>
#include <strobe/tile/terms.cuh>

namespace strobe {

template <class Config, class Mask, class Score, class Params> struct DqFp32Sm90 : DqSm90<Config, Mask, Score, Params> {
  using Dq = DqSm90<Config, Mask, Score, Params>;
  using Offset = typename Dq::Offset;
  using Bytes = typename Dq::Bytes;
  using Rows = typename Dq::Rows;
  using Dq::k;
  using Dq::p;
  using Dq::smem;
  using Dq::tile;
  using Dq::v;
  static constexpr int kBlockN = Config::kBlockN, kDim = Config::kDim, kDimV = Config::kDimV;
  static constexpr int kScores = kBlockN / 2, kSums = kDim / 2;  // of one thread
  static_assert(Config::kBlockM == 64 && Config::kStages == 2 && Config::kStagesV == 2, "a buffer for each consumer");

  STROBE_DEVICE DqFp32Sm90(const Params& params, const Tile& tile, bool producer) : Dq(params, tile, producer) {}

  STROBE_DEVICE static void init_barriers() {
    mbar_init(smem_base() + Offset::q_barrier, 1);
    Dq::RingK::init(smem_base() + Offset::ring_k, 4);  // one arrival a warp of the buffer's consumer
    Dq::RingV::init(smem_base() + Offset::ring_v, 4);
    mbar_init_fence();
  }
  STROBE_DEVICE KeyBlocks blocks() const { return Dq::key_blocks(tile.row0, 64); }

  // ---- producer: one thread -----------------------------------------------------------------------------------------
  template <int kRows, int kColumns>
  STROBE_DEVICE static void load(u32 to, const TensorMap* map, u32 full, const Box& box) {
    tma_load_tile<bf16, Dq::kOneBox, kRows, kTerms * kColumns>(to, map, full, box);
  }
  STROBE_DEVICE void produce() {
    const KeyBlocks all = blocks();
    if (!all.any()) return;
    const u32 full = smem + Offset::q_barrier;
    mbar_arrive_expect_tx(full, Bytes::q + Bytes::d_o);
    load<64, kDim>(smem + Offset::q, &p.map_q_terms, full, Dq::query_box(tile.row0));
    load<64, kDimV>(smem + Offset::d_o, &p.map_d_o_terms, full, Dq::query_box(tile.row0));
#pragma unroll 1
    for (int n = all.begin(); all.has(n); n = all.next(n)) {
      const Box box = Dq::key_box(n, 0);
      load<kBlockN, kDim>(smem + Offset::k + k.stage * Bytes::k, &p.map_k_terms, k.begin_load(Bytes::k), box);
      k.next();
      load<kBlockN, kDimV>(smem + Offset::v + v.stage * Bytes::v, &p.map_v_terms, v.begin_load(Bytes::v), box);
      v.next();
    }
  }

  // ---- consumers ----------------------------------------------------------------------------------------------------
  template <class Ring> STROBE_DEVICE static void release(Ring& ring) {
    ring.release_and_advance();
    ring.next();  // the other consumer's
  }
  STROBE_DEVICE void attend(float (&dq)[kSums], const Rows& r, int n, bool masked) {
    float s[kScores], dp[kScores], slope[kScores];
    k.wait_full();
    wgmma_fence();
    gemm_terms<kBlockN, kDim, 64, kBlockN>(s, k_major(smem + Offset::q),
                                           k_major(smem + Offset::k + k.stage * Bytes::k));
    wgmma_commit();
    v.wait_full();
    wgmma_fence();
    gemm_terms<kBlockN, kDimV, 64, kBlockN>(dp, k_major(smem + Offset::d_o),
                                            k_major(smem + Offset::v + v.stage * Bytes::v));
    wgmma_commit();
    wgmma_wait<1>();
    pin(s);
    Dq::exponentials(s, slope, r, n, masked);
    wgmma_wait<0>();
    pin(dp);
    release(v);
    Dq::gradients(s, dp, slope, r, 0, n);  // 0: both consumers put gradients of a bias, each those of its keys
    Terms<kScores / 2> slopes;
    slopes.split(dp);
    float sum[kSums];  // of this block
    wgmma_fence();
    gemm_terms_t<kDim, kBlockN>(sum, slopes, mn_major(smem + Offset::k + k.stage * Bytes::k, kBlockN));
    wgmma_commit();
    wgmma_wait<0>();
    pin(sum);
    release(k);
#pragma unroll
    for (int i = 0; i < kSums; ++i) dq[i] += sum[i];
  }

  // The dQ of consumer 1 goes to consumer 0 over Q, thread by thread.
  STROBE_DEVICE u32 exchange(int i) const { return smem + Offset::q + i * 512 + thread_idx() % 128 * 16; }
  STROBE_DEVICE void consume(int consumer) {
    float dq[kSums];
#pragma unroll
    for (float& x : dq) x = 0.f;
    const KeyBlocks all = blocks();
    if (all.any()) {
      k.stage = v.stage = consumer;
      wait_for_previous_grid();  // the statistics are delta.cuh's
      const Rows r = Dq::load_rows(0);
      mbar_wait(smem + Offset::q_barrier, 0);
      // Every other block. They are neighbours, since there is no map of blocks for fp32.
#pragma unroll 1
      for (int n = all.begin() - consumer; all.has(n); n -= 2) attend(dq, r, n, all.masked(n));
      bar_sync(kBarrierConsumers, 256);  // nobody reads Q any more
      if (consumer == 1)
#pragma unroll
        for (int i = 0; i < kSums; i += 4)
          st_shared(exchange(i), u32x4{as_bits(dq[i]), as_bits(dq[i + 1]), as_bits(dq[i + 2]), as_bits(dq[i + 3])});
      bar_sync(kBarrierConsumers, 256);
      if (consumer == 0)
#pragma unroll
        for (int i = 0; i < kSums; i += 4) {
          const u32x4 x = ld_shared_x4(exchange(i));
          dq[i] += as_float(x.x), dq[i + 1] += as_float(x.y), dq[i + 2] += as_float(x.z), dq[i + 3] += as_float(x.w);
        }
    }
    if (consumer == 1) return;
    float* const rows = tile.q.rows(p.dq, p.dq_batch, p.dq_head, p.dq_row, tile.head, tile.row0);
    Fp32Rows{rows, p.dq_row, tile.q.length - tile.row0, p.dim}.store(Rounded<float, kDim>{dq, p.scale_grad}, 0);
  }
};

template <class Config, class Mask, class Score, class Params> STROBE_DEVICE void dq_fp32_sm90(const Params& p) {
  using Dq = DqFp32Sm90<Config, Mask, Score, Params>;
  const Tile tile = decode_tile<Config>(block_idx(), p);
  if (tile.row0 >= tile.q.length) return;  // varlen sequences shorter than the longest one
  if (thread_idx() == 0)
    for (const TensorMap* map : {&p.map_q_terms, &p.map_k_terms, &p.map_v_terms, &p.map_d_o_terms})
      tma_prefetch_map(map);
  init_block<Dq>();
  const u32 warpgroup = warp_uniform(thread_idx() / 128);
  share_registers<Config>(warpgroup);
  if (warpgroup == 0) {
    if (thread_idx() == 0) Dq(p, tile, true).produce();
  } else Dq(p, tile, false).consume(warpgroup - 1);
}

}  // namespace strobe

// dQ on Hopper for head dims above 128, where it has a kernel of its own: no sums in global memory, so it is always
// deterministic. dkv_sm90.cuh has the rest.
//
// Like the forward, with dO beside Q and without a running maximum: a block owns 128 queries, 64 for each of two
// consumer warpgroups, and loops over the keys that they see, from the last to the first.
//     S = Q K^T, dP = dO V^T            in flight together
//     P = exp(S - LSE)                  overlapped with dP
//     dQ += dS K, dS = P (dP - delta)   the registers of dS are laid out as the A operand
//
// Above head dim 256 (kColumnParts = 2) a warpgroup has registers for half of the columns of dQ. Then a block owns 64
// queries, of which both consumers compute S and dP, and each of them half of dQ.
#pragma once
#include <strobe/pipeline/ring.cuh>
#include <strobe/pipeline/schedule.cuh>
#include <strobe/pipeline/scores.cuh>
#include <strobe/pipeline/staging.cuh>
#include <strobe/pipeline/warp_roles.cuh>
#include <strobe/tile/gemm_sm90.cuh>

namespace strobe {

template <class Config, class Mask, class Score, class Params> struct DqSm90 {
  using T = typename Config::Element;
  static constexpr int kBlockM = Config::kBlockM, kBlockN = Config::kBlockN, kDim = Config::kDim, kDimV = Config::kDimV;
  static constexpr int kScores = kBlockN / 2;  // of one thread
  static constexpr bool kOneBox = Config::kOneBoxPerTile;
  static constexpr int kParts = Config::kColumnParts, kColumns = kDim / kParts;  // of dQ, in a consumer
  static_assert(kBlockM * kParts == 128 && kColumns <= 256, "two consumers of 64 rows");

  using RingK = Ring<Config::kStages>;
  using RingV = Ring<Config::kStagesV>;
  using Offset = typename Config::Offset;  // of regions of shared memory, laid out by this kernel's module in cuda/
  using Bytes = typename Config::Bytes;    // of one buffer there

  const Params& p;
  const Tile tile;
  u32 smem;
  RingK k;
  RingV v;

  STROBE_DEVICE DqSm90(const Params& params, const Tile& tile, bool producer)
      : p(params), tile(tile), smem(smem_base()), k(smem + Offset::ring_k, producer),
        v(smem + Offset::ring_v, producer) {}

  STROBE_DEVICE static void init_barriers() {
    mbar_init(smem_base() + Offset::q_barrier, 1);
    RingK::init(smem_base() + Offset::ring_k, 8);  // one arrival a warp of the consumers
    RingV::init(smem_base() + Offset::ring_v, 8);
    mbar_init_fence();
  }

  STROBE_DEVICE Mask mask() const { return mask_of<Mask, Config>(p, tile.q.length, tile.k.length, tile.positions); }
  STROBE_DEVICE KeyBlocks key_blocks(int first_row, int rows) const {
    if (first_row >= tile.q.length) return KeyBlocks{0, 0, 0, 0};
    return visible_blocks<kBlockN>(mask(), first_row, min(first_row + rows, tile.q.length) - 1);
  }
  STROBE_DEVICE Box key_box(int n, int buffer_rows) const {
    return Config::Keys::template box<kBlockN>(tile.k, quotient(tile.head, p.group), n * kBlockN, buffer_rows);
  }
  // A consumer's rows of the tile, in units of 64, and its part of the columns.
  STROBE_DEVICE static int group_of(int consumer) { return kParts == 1 ? consumer : 0; }
  STROBE_DEVICE static int part_of(int consumer) { return kParts == 1 ? 0 : consumer; }
  STROBE_DEVICE Box query_box(int row) const { return Config::Queries::template box<64>(tile.q, tile.head, row); }

  // ---- producer: one thread -----------------------------------------------------------------------------------------
  STROBE_DEVICE void produce() {
    const KeyBlocks blocks = key_blocks(tile.row0, kBlockM);
    if (!blocks.any()) return;
    mbar_arrive_expect_tx(smem + Offset::q_barrier, kBlockM / 64 * (Bytes::q + Bytes::d_o));
#pragma unroll 1
    for (int w = 0; w < kBlockM / 64; ++w) {
      const Box box = query_box(tile.row0 + 64 * w);
      tma_load_tile<T, kOneBox, 64, kDim>(smem + w * Bytes::q, &p.map_q, smem + Offset::q_barrier, box);
      tma_load_tile<T, kOneBox, 64, kDimV>(smem + Offset::d_o + w * Bytes::d_o, &p.map_d_o, smem + Offset::q_barrier,
                                           box);
    }
#pragma unroll 1
    for (int n = blocks.begin(); blocks.has(n); n = blocks.next(n)) {
      u32 full = k.begin_load(Bytes::k);
      tma_load_tile<T, kOneBox, kBlockN, kDim>(smem + Offset::k + k.stage * Bytes::k, &p.map_k, full,
                                               key_box(n, p.k_batch_rows));
      k.next();
      full = v.begin_load(Bytes::v);
      tma_load_tile<T, kOneBox, kBlockN, kDimV>(smem + Offset::v + v.stage * Bytes::v, &p.map_v, full,
                                                key_box(n, p.v_batch_rows));
      v.next();
    }
  }

  // ---- consumers ----------------------------------------------------------------------------------------------------
  struct Rows {  // of a thread: `row` and row + 8
    int row;
    float lse[2], delta[2];
    DropoutRow dropout;
  };
  STROBE_DEVICE Rows load_rows(int consumer) const {
    Rows r;
    r.row = tile.row0 + 64 * group_of(consumer) + 16 * (thread_idx() % 128 / 32) + thread_idx() % 32 / 4;
    const int batch = tile.batch;
    const i64 stat = first_stat<Config>(p, tile.head, batch, tile.q.first);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = r.row + 8 * i;
      const bool there = row < tile.q.length;
      r.lse[i] = there ? ld_global(p.lse2 + stat + row) : -neg_inf();  // P = 0
      r.delta[i] = there ? ld_global(p.delta + stat + row) : 0.f;
    }
    if (Config::kDropout) r.dropout = dropout_row(dropout_head_key(p.seed, batch, tile.head), r.row);
    return r;
  }

  // S -> P, and with a score that is a function its slope.
  STROBE_DEVICE void exponentials(float (&s)[kScores], float (&slope)[kScores], const Rows& r, int n,
                                  bool masked) const {
    const int column = n * kBlockN + 2 * (thread_idx() % 4);
    const Score score = Score::template of<Config>(p, tile.batch, tile.head);
    logits(s, slope, score, where<Score, Config>(tile, tile.positions, tile.head, r.row, column));
    if (masked) mask_queries<false>(s, mask(), r.row, r.row + 8, column);
#pragma unroll
    for (int i = 0; i < kScores; ++i) s[i] = exp2_approx(fma(s[i], p.scale_log2, -r.lse[fragment_row(i)]));
  }
  // dP -> dS.
  STROBE_DEVICE void gradients(const float (&s)[kScores], float (&dp)[kScores], const float (&slope)[kScores],
                               const Rows& r, int consumer, int n) const {
    const int column = n * kBlockN + 2 * int(thread_idx() % 4);
    const auto at = where<Score, Config>(tile, tile.positions, tile.head, r.row, column);
    Dropout<Config::kDropout>(p, r.dropout, r.row).drop(dp, column);
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      dp[i] = s[i] * centred<Config::kDropout>(dp[i], p.dropout_scale, r.delta[fragment_row(i)]);
      if (part_of(consumer) == 0) put_bias_gradient<Config>(p, at, i, dp[i]);
      if (!Score::kIdentity) dp[i] = times_slope<Score>(dp[i], slope[i]);
    }
  }

  STROBE_DEVICE void attend(Accumulators<T, kColumns>& dq, const Rows& r, int consumer, int n, bool masked) {
    float s[kScores], dp[kScores], slope[kScores];
    u32 slopes[kScores / 2];
    k.wait_full();
    wgmma_fence();
    gemm_qk<T, kBlockN, kDim, kBlockN>(s, k_major(smem + group_of(consumer) * Bytes::q),
                                       k_major(smem + Offset::k + k.stage * Bytes::k));
    wgmma_commit();
    v.wait_full();
    wgmma_fence();
    gemm_qk<T, kBlockN, kDimV, kBlockN>(dp, k_major(smem + Offset::d_o + group_of(consumer) * Bytes::d_o),
                                        k_major(smem + Offset::v + v.stage * Bytes::v));
    wgmma_commit();
    wgmma_wait<1>();
    pin(s);
    exponentials(s, slope, r, n, masked);
    wgmma_wait<0>();
    pin(dp);
    v.release_and_advance();
    gradients(s, dp, slope, r, consumer, n);
    pack_fragment<T>(slopes, dp);
    wgmma_fence();
    const u32 columns = part_of(consumer) * tile_bytes<T>(kBlockN, kColumns);
    gemm_pv<T, kBlockN, kColumns>(dq, slopes, mn_major(smem + Offset::k + k.stage * Bytes::k + columns, kBlockN));
    wgmma_commit();
    wgmma_wait<0>();
    pin(slopes);
    k.release_and_advance();
  }

  STROBE_DEVICE void consume(int consumer) {
    Accumulators<T, kColumns>::declare();
    Accumulators<T, kColumns> dq;
    dq.zero();
    const int first = tile.row0 + 64 * group_of(consumer), part = part_of(consumer);
    const KeyBlocks all = key_blocks(tile.row0, kBlockM), mine = key_blocks(first, 64);
    if (all.any()) {
      wait_for_previous_grid();  // the statistics are delta.cuh's
      const Rows r = load_rows(consumer);
      mbar_wait(smem + Offset::q_barrier, 0);
#pragma unroll 1
      for (int n = all.begin(); all.has(n); n = all.next(n)) {
        if (n < mine.end && n >= mine.first) {
          attend(dq, r, consumer, n, n >= mine.end_full || (Mask::kHasLo && n < mine.first_full));
        } else {
          k.skip();
          v.skip();
        }
      }
    }
    const float scale[2] = {p.scale_grad, p.scale_grad};
    if constexpr (Config::kPartialOut) {
      dq.scale(scale);
      float* rows = tile.q.rows(p.dq, p.dq_batch, p.dq_head, p.dq_row, tile.head, tile.row0);
      const Fp32Rows to{rows + part * kColumns, p.dq_row, tile.q.length - tile.row0, p.dim - part * kColumns};
      return to.store(dq, 64 * group_of(consumer));
    }
    if (kParts > 1) bar_sync(kBarrierConsumers, 256);  // nobody reads Q any more
    const Staging<T, kOneBox, kColumns, panels<T>(kColumns), false> staging{
        smem + consumer * tile_bytes<T>(64, kColumns), consumer, part * panels<T>(kColumns)};
    staging.store(dq, scale, &p.map_dq, query_box(first), first < tile.q.length);
    if (thread_idx() % 128 == 0) tma_store_wait_read<0>();  // shared memory must outlive the copies
  }
};

template <class Config, class Mask, class Score, class Params> STROBE_DEVICE void dq_sm90(const Params& p) {
  using Dq = DqSm90<Config, Mask, Score, Params>;
  const Tile tile = decode_tile<Config>(block_idx(), p);
  if (tile.row0 >= tile.q.length) return;  // varlen sequences shorter than the longest one
  if (thread_idx() == 0)
    for (const TensorMap* map : {&p.map_q, &p.map_d_o, &p.map_k, &p.map_v}) tma_prefetch_map(map);
  init_block<Dq>();
  launch_dependents();
  const u32 warpgroup = warp_uniform(thread_idx() / 128);
  share_registers<Config>(warpgroup);
  if (warpgroup == 0) {
    if (thread_idx() == 0) Dq(p, tile, true).produce();
  } else Dq(p, tile, false).consume(warpgroup - 1);
}

}  // namespace strobe

// dQ on Hopper for head dims above 128, where it has a kernel of its own: no sums in global memory, so it is always
// deterministic. dkv_sm90.cuh has the rest.
//
// Like the forward, with dO beside Q and without a running maximum: a block owns 128 queries, 64 for each of two
// consumer warpgroups, and loops over the keys that they see, from the last to the first.
//     S = Q K^T, dP = dO V^T            in flight together
//     P = exp(S - LSE)                  overlapped with dP
//     dQ += dS K, dS = P (dP - delta)   the registers of dS are laid out as the A operand
#pragma once
#include <strobe/pipeline/query_blocks.cuh>
#include <strobe/pipeline/ring.cuh>
#include <strobe/pipeline/staging.cuh>
#include <strobe/tile/dropout.cuh>
#include <strobe/tile/gemm_sm90.cuh>
#include <strobe/tile/softmax.cuh>

namespace strobe {

template <class Config, class Mask, class Score, class Params> struct DqSm90 {
  using T = typename Config::Element;
  static constexpr int kBlockM = Config::kBlockM, kBlockN = Config::kBlockN, kDim = Config::kDim, kDimV = Config::kDimV;
  static constexpr int kScores = kBlockN / 2;  // of one thread
  static constexpr bool kOneBox = Config::kOneBoxPerTile;
  static_assert(kBlockM == 128, "two consumers of 64 rows");

  // ---- shared memory: Q x 2 | dO x 2 | K buffers | V buffers | barriers
  // -----------------------------------------------
  using RingK = Ring<Config::kStages>;
  using RingV = Ring<Config::kStagesV>;
  static constexpr u32 kBytesQ = tile_bytes(64, kDim), kBytesDo = tile_bytes(64, kDimV),
                       kBytesK = tile_bytes(kBlockN, kDim), kBytesV = tile_bytes(kBlockN, kDimV);
  static constexpr u32 kOffsetDo = 2 * kBytesQ, kOffsetK = kOffsetDo + 2 * kBytesDo,
                       kOffsetV = kOffsetK + Config::kStages * kBytesK,
                       kOffsetQFull = kOffsetV + Config::kStagesV * kBytesV, kOffsetRingK = kOffsetQFull + 16,
                       kOffsetRingV = kOffsetRingK + RingK::kBytes;
  static_assert(kOffsetRingV + RingV::kBytes == Config::kSmem, "the shared memory that Python asks for");

  const Params& p;
  const Tile tile;
  u32 smem;
  RingK k;
  RingV v;

  STROBE_DEVICE DqSm90(const Params& params, const Tile& tile, bool producer)
      : p(params), tile(tile), smem(smem_base()), k(smem + kOffsetRingK, producer), v(smem + kOffsetRingV, producer) {}

  STROBE_DEVICE static void init_barriers() {
    mbar_init(smem_base() + kOffsetQFull, 1);
    RingK::init(smem_base() + kOffsetRingK, 8);  // one arrival a warp of the consumers
    RingV::init(smem_base() + kOffsetRingV, 8);
    mbar_init_fence();
  }

  STROBE_DEVICE Mask mask() const { return mask_of<Mask, Config>(p, tile.len_q, tile.len_k, tile.positions); }
  STROBE_DEVICE KeyBlocks key_blocks(int first_row, int rows) const {
    if (first_row >= tile.len_q) return KeyBlocks{0, 0, 0, 0};
    return visible_blocks<kBlockN>(mask(), first_row, min(first_row + rows, tile.len_q) - 1);
  }
  STROBE_DEVICE Box key_box(int n) const {
    const int key = n * kBlockN;
    return box_of_rows<Config::kVarlen, kBlockN>(tile.first_key + key, tile.len_k - key, quotient(tile.head, p.group),
                                                 tile.slice);
  }
  STROBE_DEVICE Box query_box(int row) const {
    return box_of_rows<Config::kVarlen, 64>(tile.first_row + row, tile.len_q - row, tile.head, tile.slice);
  }

  // ---- producer: one thread -----------------------------------------------------------------------------------------
  STROBE_DEVICE void produce() {
    const KeyBlocks blocks = key_blocks(tile.row0, kBlockM);
    if (blocks.first == blocks.end) return;
    mbar_arrive_expect_tx(smem + kOffsetQFull, 2 * (kBytesQ + kBytesDo));
#pragma unroll 1
    for (int w = 0; w < 2; ++w) {
      const Box box = query_box(tile.row0 + 64 * w);
      tma_load_tile<kOneBox, 64, kDim>(smem + w * kBytesQ, &p.map_q, smem + kOffsetQFull, box);
      tma_load_tile<kOneBox, 64, kDimV>(smem + kOffsetDo + w * kBytesDo, &p.map_d_o, smem + kOffsetQFull, box);
    }
#pragma unroll 1
    for (int n = blocks.end - 1; n >= blocks.first; --n) {
      u32 full = k.begin_load(kBytesK);
      tma_load_tile<kOneBox, kBlockN, kDim>(smem + kOffsetK + k.stage * kBytesK, &p.map_k, full, key_box(n));
      k.next();
      full = v.begin_load(kBytesV);
      tma_load_tile<kOneBox, kBlockN, kDimV>(smem + kOffsetV + v.stage * kBytesV, &p.map_v, full, key_box(n));
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
    r.row = tile.row0 + 64 * consumer + 16 * (thread_idx() % 128 / 32) + thread_idx() % 32 / 4;
    const int batch = tile.batch;
    const i64 stat = first_stat<Config>(p, tile.head, batch, tile.first_row);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = r.row + 8 * i;
      const bool there = row < tile.len_q;
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
    const Score score{p.score};
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      if (Score::kIdentity) continue;
      const float x = s[i];
      s[i] = score(x);
      slope[i] = score.derivative(x, s[i]);
    }
    if (masked) {
      const Mask m = mask();
      const int lo[2] = {m.lo(r.row) - column, m.lo(r.row + 8) - column};
      const int hi[2] = {m.hi(r.row) - column, m.hi(r.row + 8) - column};
      mask_fragment<Mask::kHasLo>(s, lo, hi);
    }
#pragma unroll
    for (int i = 0; i < kScores; ++i) s[i] = exp2_approx(fma(s[i], p.scale_log2, -r.lse[fragment_row(i)]));
  }
  // dS, rounded, from P and dP.
  STROBE_DEVICE void gradients(u32 (&slopes)[kScores / 2], const float (&s)[kScores], float (&dp)[kScores],
                               const float (&slope)[kScores], const Rows& r, int n) const {
    Dropout<Config::kDropout>(p, r.dropout, r.row).drop(dp, n * kBlockN + 2 * int(thread_idx() % 4));
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      dp[i] = s[i] * centred<Config::kDropout>(dp[i], p.dropout_scale, r.delta[fragment_row(i)]);
      if (!Score::kIdentity) dp[i] *= slope[i];
    }
    pack_fragment<T>(slopes, dp);
  }

  STROBE_DEVICE void attend(Accumulators<T, kDim>& dq, const Rows& r, int consumer, int n, bool masked) {
    float s[kScores], dp[kScores], slope[kScores];
    u32 slopes[kScores / 2];
    k.wait_full();
    wgmma_fence();
    gemm_qk<T, kBlockN, kDim, kBlockN>(s, k_major(smem + consumer * kBytesQ),
                                       k_major(smem + kOffsetK + k.stage * kBytesK));
    wgmma_commit();
    v.wait_full();
    wgmma_fence();
    gemm_qk<T, kBlockN, kDimV, kBlockN>(dp, k_major(smem + kOffsetDo + consumer * kBytesDo),
                                        k_major(smem + kOffsetV + v.stage * kBytesV));
    wgmma_commit();
    wgmma_wait<1>();
    pin(s);
    exponentials(s, slope, r, n, masked);
    wgmma_wait<0>();
    pin(dp);
    v.release_and_advance();
    gradients(slopes, s, dp, slope, r, n);
    wgmma_fence();
    gemm_pv<T, kBlockN, kDim>(dq, slopes, mn_major(smem + kOffsetK + k.stage * kBytesK, kBlockN));
    wgmma_commit();
    wgmma_wait<0>();
    pin(slopes);
    k.release_and_advance();
  }

  STROBE_DEVICE void consume(int consumer) {
    Accumulators<T, kDim>::declare();
    Accumulators<T, kDim> dq;
    dq.zero();
    const KeyBlocks all = key_blocks(tile.row0, kBlockM), mine = key_blocks(tile.row0 + 64 * consumer, 64);
    if (all.first < all.end) {
      wait_for_previous_grid();  // the statistics are delta.cuh's
      const Rows r = load_rows(consumer);
      mbar_wait(smem + kOffsetQFull, 0);
#pragma unroll 1
      for (int n = all.end - 1; n >= all.first; --n) {
        if (n < mine.end && n >= mine.first) {
          attend(dq, r, consumer, n, n >= mine.end_full || (Mask::kHasLo && n < mine.first_full));
        } else {
          k.skip();
          v.skip();
        }
      }
    }
    const float scale[2] = {p.scale_grad, p.scale_grad};
    const int first = tile.row0 + 64 * consumer;
    if constexpr (Config::kPartialOut) {
      dq.scale(scale);
      float* rows = p.dq + tile.slice * p.dq_batch + tile.head * p.dq_head + i64(tile.first_row + tile.row0) * p.dq_row;
      return Fp32Rows{rows, p.dq_row, tile.len_q - tile.row0, p.dim}.store(dq, 64 * consumer);
    }
    const Staging<kOneBox, kDim, panels(kDim), false> staging{smem + consumer * kBytesQ, consumer};
    staging.store(dq, scale, &p.map_dq, query_box(first), first < tile.len_q);
    if (thread_idx() % 128 == 0) tma_store_wait_read<0>();  // shared memory must outlive the copies
  }
};

template <class Config, class Mask, class Score, class Params> STROBE_DEVICE void dq_sm90(const Params& p) {
  using Dq = DqSm90<Config, Mask, Score, Params>;
  const Tile tile = decode_tile<Config>(block_idx(), p);
  if (tile.row0 >= tile.len_q) return;  // varlen sequences shorter than the longest one
  if (thread_idx() == 0) {
    tma_prefetch_map(&p.map_q);
    tma_prefetch_map(&p.map_d_o);
    tma_prefetch_map(&p.map_k);
    tma_prefetch_map(&p.map_v);
    Dq::init_barriers();
  }
  sync_block();
  launch_dependents();
  const u32 warpgroup = warp_uniform(thread_idx() / 128);
  if (warpgroup == 0) {
    regs_dec<Config::kRegsProducer>();
    if (thread_idx() == 0) Dq(p, tile, true).produce();
  } else {
    regs_inc<Config::kRegsConsumer>();
    Dq(p, tile, false).consume(warpgroup - 1);
  }
}

}  // namespace strobe

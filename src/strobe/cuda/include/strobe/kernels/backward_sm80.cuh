// FlashAttention backward for Ampere and later: cp.async, ldmatrix, mma.sync.
//
// A block owns kBlockN keys of one key head. It loops over the blocks of kBlockM queries that see them, of all query
// heads of the group, and recomputes P from the LSE:
//     S = Q K^T, P = exp(S - LSE), dP = dO V^T, dS = P (dP - delta)      rows are queries
//     dV += P^T dO, dK += dS^T Q, dQ = dS K
// The block's warps form a grid for each product (warp_gemm.cuh) and exchange P and dS through shared memory. So a warp
// holds only its share of dK and dV, and each number loaded from shared memory serves many products. All key blocks
// accumulate dQ in fp32 in global memory. delta.cuh prepares LSE, delta and zeros before; convert_dq_sm80.cuh rounds dQ
// afterwards.
//
// Each block of queries passes two barriers: one when Q and dO have landed (and P and dS of the block before are no
// longer read), one when P and dS are written. A tensor with a single buffer needs one more before its next load.
#pragma once
#include <strobe/pipeline/dq_fragments.cuh>
#include <strobe/pipeline/schedule.cuh>
#include <strobe/pipeline/scores.cuh>
#include <strobe/ptx/tma.cuh>
#include <strobe/tile/copy.cuh>
#include <strobe/tile/warp_gemm.cuh>

namespace strobe {

template <class Config, class Mask, class Score, class Params> struct BackwardSm80 {
  using T = typename Config::Element;
  static constexpr int kBlockM = Config::kBlockM, kBlockN = Config::kBlockN, kDim = Config::kDim, kDimV = Config::kDimV;
  static constexpr int kThreads = Config::kThreads, kStagesQ = Config::kStagesQ, kStagesDo = Config::kStagesDo;
  static constexpr bool kEarly = Config::kEarly;
  static_assert(kStagesQ == 2 || !kEarly, "two blocks of Q are in use");
  // The grids of warps: of S and dP (queries x keys), of dK and dV (keys x dims), of dQ (queries x dims).
  static constexpr int kWarpsS = Config::kWarpsS, kWarpsKeys = Config::kWarps / kWarpsS;
  static constexpr int kWarpsKV = Config::kWarpsKV, kWarpsDim = Config::kWarps / kWarpsKV;
  using DqSums = DqFragments<Config>;
  static constexpr int kTilesM = kBlockM / (16 * kWarpsS), kTilesN = kBlockN / (16 * kWarpsKeys),
                       kTilesKV = kBlockN / (16 * kWarpsKV);
  using Scores = float[kTilesM][kTilesN][8];
  static_assert(kTilesM * 16 * kWarpsS == kBlockM && kTilesN * 16 * kWarpsKeys == kBlockN &&
                    kTilesKV * 16 * kWarpsKV == kBlockN && kDim % (16 * kWarpsDim) == 0 &&
                    kDimV % (16 * kWarpsDim) == 0 && DqSums::kTilesM * 16 * DqSums::kWarpsQ == kBlockM &&
                    DqSums::kTilesDim * 16 * DqSums::kWarpsDim == kDim,
                "warps have whole tiles");

  using Offset = typename Config::Offset;  // of regions of shared memory, laid out by this kernel's module in cuda/
  using Bytes = typename Config::Bytes;    // of one buffer there
  STROBE_DEVICE static u32 buffer_q(int left) { return kStagesQ == 1 ? 0 : left & 1; }
  STROBE_DEVICE static u32 buffer_do(int left) { return kStagesDo == 1 ? 0 : left & 1; }
  STROBE_DEVICE static u32 k_tile() { return smem_base(); }
  STROBE_DEVICE static u32 v_tile() { return smem_base() + Offset::v; }
  STROBE_DEVICE static u32 q_tile(int left) { return smem_base() + Offset::q + buffer_q(left) * Bytes::q; }
  STROBE_DEVICE static u32 do_tile(int left) { return smem_base() + Offset::d_o + buffer_do(left) * Bytes::d_o; }
  STROBE_DEVICE static u32 p_tile() { return smem_base() + Offset::p; }
  STROBE_DEVICE static u32 ds_tile() { return smem_base() + Offset::ds; }
  // Computed anew wherever they are used: cheaper than registers.
  STROBE_DEVICE static u32 warp() { return thread_idx_again() / 32; }
  STROBE_DEVICE static u32 lane() { return thread_idx_again() % 32; }

  const Params& p;
  const KeyTile tile;
  const QueryBlocks blocks;
  float dk[kTilesKV][kDim / (16 * kWarpsDim)][8], dv[kTilesKV][kDimV / (16 * kWarpsDim)][8];

  STROBE_DEVICE BackwardSm80(const Params& p, const KeyTile& tile)
      : p(p), tile(tile),
        blocks(visible_query_blocks<kBlockM, kBlockN>(mask(), tile.key0, tile.q.length, tile.k.length)) {}

  STROBE_DEVICE Mask mask() const { return mask_of<Mask, Config>(p, tile.q.length, tile.k.length, tile.positions); }

  // A block of queries. Those of one head of the group follow one another.
  struct QueryBlock {
    int left;  // blocks left, this one included; its parity selects the buffer
    int head, m;
  };
  STROBE_DEVICE QueryBlock next(const QueryBlock& b) const {
    const bool same = b.m + 1 < blocks.end;
    return QueryBlock{b.left - 1, same ? b.head : b.head + 1, same ? b.m + 1 : blocks.first};
  }
  STROBE_DEVICE i64 stat(const QueryBlock& b) const {
    return first_stat<Config>(p, b.head, tile.batch, tile.q.first) + b.m * kBlockM;
  }

  // ---- copies -------------------------------------------------------------------------------------------------------
  template <int kColumns> STROBE_DEVICE void load_keys(u32 to, const T* from, i64 batch, i64 head, i64 row, int dim) {
    copy_tile_async<kBlockN, kColumns, kThreads, false, Config::kExactDims>(
        to, tile.k.rows(from, batch, head, row, tile.head_kv, tile.key0), row, tile.k.used - tile.key0, dim);
  }
  template <int kColumns> STROBE_DEVICE void load_queries(const QueryBlock& b, u32 to, const T* from, i64 batch,
                                                          i64 head, i64 row, int dim) const {
    copy_tile_async<kBlockM, kColumns, kThreads, false, Config::kExactDims>(
        to, tile.q.rows(from, batch, head, row, b.head, b.m * kBlockM), row, tile.q.length - b.m * kBlockM, dim);
  }
  // `first`: the first of the threads that copy; different warps copy different statistics.
  STROBE_DEVICE void load_rows(const QueryBlock& b, u32 offset, const void* stats, u32 first) const {
    const u32 thread = thread_idx() - first;
    if (thread < kBlockM / 4)
      cp_async_16(smem_base() + offset + 16 * thread, static_cast<const char*>(stats) + stat(b) * 4 + 16 * thread);
  }
  STROBE_DEVICE void load_q(const QueryBlock& b) const {
    load_queries<kDim>(b, q_tile(b.left), p.q, p.q_batch, p.q_head, p.q_row, p.dim);
    load_rows(b, Offset::lse + buffer_q(b.left) * Bytes::lse, p.lse2, 0);
    if (Config::kDropout) load_rows(b, Offset::dropout + buffer_q(b.left) * Bytes::lse, p.dropout_rows, 64);
  }
  STROBE_DEVICE void load_do(const QueryBlock& b) const {
    load_queries<kDimV>(b, do_tile(b.left), p.d_o, p.do_batch, p.do_head, p.do_row, p.dim_v);
    load_rows(b, Offset::delta + buffer_do(b.left) * Bytes::lse, p.delta, 32);
  }

  // ---- P and dS -----------------------------------------------------------------------------------------------------
  // In a tile of scores a thread has rows r and r + 8.
  STROBE_DEVICE static int row(int t) { return 16 * (warp() % kWarpsS + kWarpsS * t) + lane() / 4; }
  struct Pair {
    float x[2];
  };
  STROBE_DEVICE static Pair of_rows(u32 offset, int row) {
    const u32 at = smem_base() + offset + 4 * row;
    return Pair{{ld_shared_f32(at), ld_shared_f32(at + 32)}};
  }
  STROBE_DEVICE static int column(int n) {  // the thread's first of a tile, in the block of keys
    return 16 * (warp() / kWarpsS + kWarpsKeys * n) + 2 * (lane() % 4);
  }
  // Sets the scores of keys that a query does not see to -inf.
  STROBE_DEVICE void hide(float (&s)[8], const QueryBlock& b, int row, int n) const {
    const int query = b.m * kBlockM + row;
    mask_queries<false>(s, mask(), query, query + 8, tile.key0 + column(n));
  }
  STROBE_DEVICE void exponentials(float (&s)[8], const Pair& lse) const {
#pragma unroll
    for (int i = 0; i < 8; ++i) s[i] = exp2_approx(fma(s[i], p.scale_log2, -lse.x[fragment_row(i)]));
  }

  STROBE_DEVICE void scores(Scores& s, const QueryBlock& b) const {
    gemm<T, kDim, true>(s, left_operand<false, kBlockM, kWarpsS>(q_tile(b.left), warp() % kWarpsS),
                        right_operand<false, kBlockN, kWarpsKeys>(k_tile(), warp() / kWarpsS));
  }
  // S -> P. If the score is a function, `gradients` does it later.
  STROBE_DEVICE void weights(Scores& s, const QueryBlock& b) const {
    if constexpr (Score::kIdentity) {
      if (blocks.masked(b.m)) {
#pragma unroll
        for (int t = 0; t < kTilesM; ++t)
#pragma unroll
          for (int n = 0; n < kTilesN; ++n) hide(s[t][n], b, row(t), n);
      }
#pragma unroll
      for (int t = 0; t < kTilesM; ++t) {
        const Pair lse = of_rows(Offset::lse + buffer_q(b.left) * Bytes::lse, row(t));
#pragma unroll
        for (int n = 0; n < kTilesN; ++n) exponentials(s[t][n], lse);
      }
    }
  }
  // Writes P and dS, rounded, to shared memory. `s` is P or, if the score is a function, S: then P is computed here.
  STROBE_DEVICE void gradients(Scores& s, Scores& dp, const QueryBlock& b) const {
    const Target<kBlockM, kWarpsS, kWarpsKeys> to_p(p_tile(), warp() % kWarpsS, warp() / kWarpsS),
        to_ds(ds_tile(), warp() % kWarpsS, warp() / kWarpsS);
    CapturedGradients<Score> captured;
#pragma unroll
    for (int t = 0; t < kTilesM; ++t) {
      const int first = row(t);
      const Pair delta = of_rows(Offset::delta + buffer_do(b.left) * Bytes::lse, first);
      Pair lse;
      if (!Score::kIdentity) lse = of_rows(Offset::lse + buffer_q(b.left) * Bytes::lse, first);
#pragma unroll
      for (int n = 0; n < kTilesN; ++n) {
        float (&weight)[8] = s[t][n], (&ds)[8] = dp[t][n], slope[8], kept[8], of_product[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) of_product[i] = weight[i];
        if (!Score::kIdentity) apply_score(weight, slope, lse, b, first, n);
#pragma unroll
        for (int i = 0; i < 8; ++i) kept[i] = weight[i];
        if (Config::kDropout) drop(kept, ds, b, first, n);
        if (Config::kWantKV) to_p.template store<T>(kept, t, n);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          ds[i] = weight[i] * (ds[i] - delta.x[fragment_row(i)]);
          put_bias_gradient<Config>(p, where_of(b, first, n), i, ds[i]);
          if constexpr (Score::kLearns) captured.add(score_of(b), of_product[i], ds[i], where_of(b, first, n), i);
          if (!Score::kIdentity) ds[i] = times_slope<Score>(ds[i], slope[i]);
        }
        to_ds.template store<T>(ds, t, n);
      }
    }
    if constexpr (Score::kLearns) captured.finish(score_of(b), where_of(b, 0, 0));
  }
  STROBE_DEVICE Score score_of(const QueryBlock& b) const { return Score::template of<Config>(p, tile.batch, b.head); }
  STROBE_DEVICE auto where_of(const QueryBlock& b, int row, int n) const {
    return where<Score, Config>(tile, tile.positions, b.head, b.m * kBlockM + row, tile.key0 + column(n));
  }
  STROBE_DEVICE void apply_score(float (&s)[8], float (&slope)[8], const Pair& lse, const QueryBlock& b, int row,
                                 int n) const {
    logits(s, slope, score_of(b), where_of(b, row, n));
    if (blocks.masked(b.m)) hide(s, b, row, n);
    exponentials(s, lse);
  }
  // Zeroes dropped entries of P and dP. The scale of the kept weights is applied to dV as a whole, in `store`.
  STROBE_DEVICE void drop(float (&kept)[8], float (&dp)[8], const QueryBlock& b, int row, int n) const {
    float x, y;  // two neighbouring queries share a hash; each has stored half of it
    ld_shared_x2(smem_base() + Offset::dropout + buffer_q(b.left) * Bytes::lse + 4 * (row / 2 * 2), x, y);
    const Dropout<true> dropout(p, DropoutRow{as_bits(x), as_bits(y)}, row);
#pragma unroll
    for (int i = 0; i < 8; ++i) dp[i] *= p.dropout_scale;
    dropout.drop(kept, tile.key0 + column(n));
    dropout.drop(dp, tile.key0 + column(n));
  }

  // ---- dQ -----------------------------------------------------------------------------------------------------------
  // kApart: half of the columns at a time.
  STROBE_DEVICE void add_dq(const QueryBlock& b) const {
    constexpr int kParts = Config::kApart ? 2 : 1, kTiles = DqSums::kTilesDim / kParts;
    static_assert(kTiles * kParts == DqSums::kTilesDim, "parts are of one size");
    const i64 block = stat(b) / kBlockM;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      if (Config::kApart) sync_warp();
      float dq[DqSums::kTilesM][kTiles][8];
      const auto ds = left_operand<false, kBlockM, DqSums::kWarpsQ>(ds_tile(), warp() % DqSums::kWarpsQ);
      const auto keys = right_operand<true, kBlockN, DqSums::kWarpsDim>(k_tile(), warp() / DqSums::kWarpsQ);
      gemm<T, kBlockN, true>(dq, ds, keys.behind(part * kTiles));
      if (Config::kDeterministic && part == 0) {
        if (thread_idx() == 0)
          while (acquire_turn(p.turns + 2 * block) != turn(b.m)) {
          }
        sync_block();  // it is this block's turn
      }
      float* sums = p.dq_sum + block * DqSums::kFloats;
      const int thread = thread_idx_again();
#pragma unroll
      for (int t = 0; t < DqSums::kTilesM; ++t)
#pragma unroll
        for (int i = 0; i < 2 * kTiles; ++i)
          DqSums::add(sums, thread, 2 * (t * DqSums::kTilesDim + part * kTiles) + i, &dq[t][i / 2][i % 2 * 4]);
    }
    if (Config::kDeterministic) {
      fence_device();
      sync_block();  // all have added
      if (thread_idx() == 0) release_turn(p.turns + 2 * block);
    }
  }
  // Blocks of keys add to a block of queries from the last to the first. They are launched in that order (kLastFirst),
  // so none waits for a block that was launched after it.
  STROBE_DEVICE u32 turn(int m) const {
    const int last_query = min((m + 1) * kBlockM, tile.q.length) - 1;
    return (mask().hi(last_query) + kBlockN - 1) / kBlockN - 1 - tile.key0 / kBlockN;
  }

  // ---- the loop -----------------------------------------------------------------------------------------------------
  // kApart: independent products do not overlap, because ptxas may need too many registers for that.
  // kEarly: `s` already is P of this block, since P needs nothing but Q. P of the next block is computed during the
  // products of this one, which hide its exponentials.
  STROBE_DEVICE void step(Scores& s, const QueryBlock& b) {
    cp_async_commit();
    cp_async_wait<0>();
    sync_block();  // Q and dO have landed, P and dS may be overwritten
    const QueryBlock after = next(b);
    const bool last = b.left == 1;
    if (!kEarly) scores(s, b);
    // The load follows a product: warps have drifted apart, and some compute addresses while others multiply.
    if (kStagesQ == 2 && !last) load_q(after);
    if (kEarly) cp_async_commit();
    else weights(s, b);
    Scores dp;
    gemm<T, kDimV, true>(dp, left_operand<false, kBlockM, kWarpsS>(do_tile(b.left), warp() % kWarpsS),
                         right_operand<false, kBlockN, kWarpsKeys>(v_tile(), warp() / kWarpsS));
    if (kStagesDo == 2 && !last) load_do(after);
    gradients(s, dp, b);
    if (kEarly) {
      cp_async_commit();
      cp_async_wait<1>();  // all but the next dO
    }
    sync_block();  // P and dS are written
    if (kEarly) {
      if (!last) scores(s, after);
      weights(s, after);
    }
    if (Config::kWantKV)
      gemm<T, kBlockM, false>(dv, left_operand<true, kBlockM, kWarpsKV>(p_tile(), warp() % kWarpsKV),
                              right_operand<true, kBlockM, kWarpsDim>(do_tile(b.left), warp() / kWarpsKV));
    if (kStagesDo == 1) {
      sync_block();  // dO may be overwritten
      if (!last) load_do(after);
    }
    if (Config::kApart) sync_warp();
    if (Config::kWantKV)
      gemm<T, kBlockM, false>(dk, left_operand<true, kBlockM, kWarpsKV>(ds_tile(), warp() % kWarpsKV),
                              right_operand<true, kBlockM, kWarpsDim>(q_tile(b.left), warp() / kWarpsKV));
    if (kStagesQ == 1) {
      sync_block();  // Q may be overwritten
      if (!last) load_q(after);
    }
    if (Config::kWantQ) add_dq(b);
  }

  STROBE_DEVICE void run() {
    clear(dk);
    clear(dv);
    QueryBlock b{blocks.count() * p.group, tile.head_k * p.group, blocks.first};
    if (b.left > 0) {
      load_keys<kDim>(k_tile(), p.k, p.k_batch, p.k_head, p.k_row, p.dim);
      load_keys<kDimV>(v_tile(), p.v, p.v_batch, p.v_head, p.v_row, p.dim_v);
      wait_for_previous_grid();  // delta.cuh writes the statistics and zeros
      load_q(b);
      load_do(b);
      Scores s;
      if (kEarly) {
        cp_async_commit();
        cp_async_wait<0>();
        sync_block();  // the first Q has landed
        scores(s, b);
        weights(s, b);
      }
#pragma unroll 1
      for (; b.left > 0; b = next(b)) step(s, b);
    }
    if (Config::kWantKV) store();
  }
  template <int kTiles> STROBE_DEVICE static void clear(float (&d)[kTilesKV][kTiles][8]) {
#pragma unroll
    for (int t = 0; t < kTilesKV; ++t)
#pragma unroll
      for (int n = 0; n < kTiles; ++n)
#pragma unroll
        for (int i = 0; i < 8; ++i) d[t][n][i] = 0.f;
  }

  // ---- dK and dV: rounded into the buffers of K and V, then stored 16 bytes at a time -------------------------------
  STROBE_DEVICE void store() {
    if constexpr (Config::kPartialOut) {
      store_fp32(dk, p.scale_grad, p.dk, p.dk_batch, p.dk_head, p.dk_row, p.dim);
      store_fp32(dv, p.dropout_scale, p.dv, p.dv_batch, p.dv_head, p.dv_row, p.dim_v);
      return;
    }
    sync_block();  // nobody reads K and V any more
    round_over(k_tile(), dk, p.scale_grad);
    round_over(v_tile(), dv, p.dropout_scale);
    sync_block();
    store_rows<kDim>(k_tile(), p.dk, p.dk_batch, p.dk_head, p.dk_row, p.dim);
    store_rows<kDimV>(v_tile(), p.dv, p.dv_batch, p.dv_head, p.dv_row, p.dim_v);
  }
  // Stores fp32 straight from the registers, for a merge with other partial results.
  template <int kTiles> STROBE_DEVICE void store_fp32(const float (&d)[kTilesKV][kTiles][8], float scale, T* to,
                                                      i64 batch, i64 head, i64 row_stride, int dim) const {
    float* first = tile.rows_of(reinterpret_cast<float*>(to), batch, head, row_stride);
#pragma unroll
    for (int t = 0; t < kTilesKV; ++t)
#pragma unroll
      for (int n = 0; n < kTiles; ++n)
#pragma unroll
        for (int i = 0; i < 8; i += 2) {
          const int row = 16 * (warp() % kWarpsKV + kWarpsKV * t) + lane() / 4 + 8 * (i >> 1 & 1),
                    column = 16 * (warp() / kWarpsKV + kWarpsDim * n) + 2 * (lane() % 4) + 8 * (i >> 2);
          if (tile.key0 + row < tile.k.length && (Config::kExactDims || column < dim))
            st_global_x2(first + i64(row) * row_stride + column, d[t][n][i] * scale, d[t][n][i + 1] * scale);
        }
  }
  template <int kTiles> STROBE_DEVICE static void round_over(u32 to, float (&d)[kTilesKV][kTiles][8], float scale) {
    const Target<kBlockN, kWarpsKV, kWarpsDim> target(to, warp() % kWarpsKV, warp() / kWarpsKV);
#pragma unroll
    for (int t = 0; t < kTilesKV; ++t)
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
#pragma unroll
        for (int i = 0; i < 8; ++i) d[t][n][i] *= scale;
        target.template store<T>(d[t][n], t, n);
      }
  }
  template <int kColumns>
  STROBE_DEVICE void store_rows(u32 from, T* to, i64 batch, i64 head, i64 row_stride, int dim) const {
    constexpr int kChunks = kColumns / kChunk<T>;
    to = tile.rows_of(to, batch, head, row_stride);
#pragma unroll 4
    for (int i = thread_idx(); i < kBlockN * kChunks; i += kThreads) {
      const int row = i / kChunks, chunk = i % kChunks;
      if (tile.key0 + row < tile.k.length && (Config::kExactDims || chunk * kChunk<T> < dim))
        st_global(to + i64(row) * row_stride + chunk * kChunk<T>,
                  ld_shared_x4(from + chunk_offset(kBlockN, row, chunk)));
    }
  }
};

template <class Config, class Mask, class Score, class Params> STROBE_DEVICE void backward_sm80(const Params& p) {
  const KeyTile tile = decode_key_tile<Config>(block_idx(), p);
  if (tile.key0 >= tile.k.length) return;  // varlen: a sequence shorter than the longest one
  launch_dependents();
  BackwardSm80<Config, Mask, Score, Params>(p, tile).run();
}

}  // namespace strobe

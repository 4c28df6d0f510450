// FlashAttention forward for Ampere and later: cp.async, ldmatrix, mma.sync.
//
// A block owns kBlockM query rows of one head, each warp kTiles * 16 of them, and walks over the keys they see in
// blocks of kBlockN, from the last to the first (the diagonal, which needs masking, comes first). Scores and weights
// never leave the registers:
//     S = Q K^T            [rows, kBlockN]   mma.sync, Q and K from swizzled shared memory
//     P = exp(S - m)       online: when m grows, earlier sums are rescaled
//     O = O + P V          the registers of S are already laid out as the left operand
// and one division by the row sum at the end.
//
// O, S and the operands in flight fill the registers that a thread may have. With kStateInSmem all else that must
// outlive a block of keys stays in shared memory: where the tile lies, and the row statistics m and l.
#pragma once
#include <strobe/pipeline/output_rows.cuh>
#include <strobe/pipeline/schedule.cuh>
#include <strobe/pipeline/scores.cuh>
#include <strobe/ptx/warp.cuh>
#include <strobe/tile/copy.cuh>
#include <strobe/tile/gemm_sm80.cuh>

namespace strobe {

template <class Config, class Mask, class Score, class Params> struct ForwardSm80 {
  using T = typename Config::Element;
  static constexpr int kBlockM = Config::kBlockM, kBlockN = Config::kBlockN, kDim = Config::kDim, kDimV = Config::kDimV;
  static constexpr int kThreads = 32 * Config::kWarps, kStages = Config::kStages;
  static constexpr int kTiles = kBlockM / (16 * Config::kWarps), kWarpRows = 16 * kTiles;
  static_assert(kStages == 1 || kStages == 2, "buffers for K and for V");

  using Offset = typename Config::Offset;  // of regions of shared memory, laid out by this kernel's module in cuda/
  using Bytes = typename Config::Bytes;    // of one buffer there
  static constexpr bool kStateInSmem = Config::kStateInSmem;
  STROBE_DEVICE static u32 q_tile() { return smem_base(); }
  STROBE_DEVICE static u32 k_tile(int n) { return smem_base() + Offset::k + (n & (kStages - 1)) * Bytes::k; }
  STROBE_DEVICE static u32 v_tile(int n) {  // not written like k_tile: ptxas would keep their common part live
    return smem_base() + ((n & (kStages - 1)) ? Offset::v + Bytes::v : Offset::v);
  }
  STROBE_DEVICE static u32 statistics(int t) {
    return smem_base() + Offset::statistics + (thread_idx_again() * kTiles + t) * 16;
  }

  const Params& p;
  float o[kTiles][kDimV / 2];
  Softmax<Config::kLazyRescale> softmax[kTiles];
  u32 dropout_key;  // of this head
  struct Place {
    int row0, len_q, len_k;           // the tile's first row; the sequence's lengths
    int first, first_full, end_full;  // key blocks, see KeyBlocks
    const T *keys, *values;           // the first of this head
    Positions positions;
  } in_registers;

  // Fields that are not used are not loaded.
  STROBE_DEVICE Place place() const {
    if (!kStateInSmem) return in_registers;
    const u32 at = smem_base() + Offset::place;
    const u32x4 x = ld_shared_x4(at), y = ld_shared_x4(at + 16);
    Positions positions{};
    if (Config::kPositions) positions = read_positions(at + 48);
    return Place{
        int(x.x),          int(x.y),          int(x.z), int(x.w), int(ld_shared(at + 32)), int(ld_shared(at + 36)),
        pointer(y.x, y.y), pointer(y.z, y.w), positions};
  }
  STROBE_DEVICE static const T* pointer(u32 lo, u32 hi) { return reinterpret_cast<const T*>(u64(hi) << 32 | lo); }
  STROBE_DEVICE void set_place(const Place& x) {
    if (!kStateInSmem) {
      in_registers = x;
      return;
    }
    if (thread_idx() == 0) {
      const u32 at = smem_base() + Offset::place;
      const u64 a = reinterpret_cast<u64>(x.keys), b = reinterpret_cast<u64>(x.values);
      st_shared(at, u32x4{u32(x.row0), u32(x.len_q), u32(x.len_k), u32(x.first)});
      st_shared(at + 16, u32x4{u32(a), u32(a >> 32), u32(b), u32(b >> 32)});
      st_shared(at + 32, u32(x.first_full));
      st_shared(at + 36, u32(x.end_full));
      if (Config::kPositions) publish_positions(at + 48, x.positions);
    }
    sync_block();  // now all can read it
  }
  // `any`: n is the same in all lanes, and a branch that ptxas knows to be warp-uniform takes fewer registers.
  STROBE_DEVICE bool needs_mask(int n) const {
    return any(n >= place().end_full || (Mask::kHasLo && n < place().first_full));
  }
  STROBE_DEVICE bool more_blocks(int n) const { return any(n > first_block()); }
  STROBE_DEVICE int first_block() const { return Mask::kHasLo ? place().first : 0; }

  STROBE_DEVICE static int warp_offset() {  // the warp's first row in the tile
    return (kStateInSmem ? thread_idx_again() : thread_idx()) / 32 * kWarpRows;
  }
  STROBE_DEVICE Mask mask(const Place& at) const { return mask_of<Mask, Config>(p, at.len_q, at.len_k, at.positions); }

  // ---- copies -------------------------------------------------------------------------------------------------------
  // Only the last block of a sequence can be ragged, and it comes first.
  template <bool kRagged> STROBE_DEVICE void load_keys(int n) {
    copy_tile_async<kBlockN, kDim, kThreads, !kRagged, Config::kExactDims>(
        k_tile(n), place().keys + i64(n) * kBlockN * p.k_row, p.k_row, kRagged ? place().len_k - n * kBlockN : kBlockN,
        p.dim);
  }
  template <bool kRagged> STROBE_DEVICE void load_values(int n) {
    copy_tile_async<kBlockN, kDimV, kThreads, !kRagged, Config::kExactDims>(
        v_tile(n), place().values + i64(n) * kBlockN * p.v_row, p.v_row,
        kRagged ? place().len_k - n * kBlockN : kBlockN, p.dim_v);
  }
  // V_n arrives during Q K_n^T and K_{n-1} during P V_n if there is one buffer; with two, all of block n-1 arrives
  // during block n.
  template <bool kMasked> STROBE_DEVICE void wait_for_keys(int n) {
    cp_async_wait<0>();
    sync_block();  // everybody's copies have landed, and nobody reads the buffers of the previous step any more
    if (kStages == 1) {
      load_values<kMasked>(n);
    } else if (n > first_block()) {
      load_keys<false>(KeyBlocks::next(n));
      load_values<false>(KeyBlocks::next(n));
    }
    cp_async_commit();
  }
  STROBE_DEVICE void wait_for_values(int n) {
    if (kStages > 1) return;
    cp_async_wait<0>();
    sync_block();  // V_n is here, and nobody reads K_n any more
    if (n > first_block()) load_keys<false>(KeyBlocks::next(n));
    cp_async_commit();
  }

  // ---- one block of keys --------------------------------------------------------------------------------------------
  template <bool kMasked> STROBE_DEVICE void step(int n) {
    wait_for_keys<kMasked>(n);
    if (kMasked &&
        !warp_sees(n)) {  // on the diagonal: some warps see nothing of this block, and only keep up with the others
      wait_for_values(n);
      return;
    }
    float s[kTiles][kBlockN / 2];
    const u32 q_lane = lane_address_a(q_tile() + warp_offset() * kPanelRowBytes, kBlockM);
    gemm_qk<T, kTiles, kBlockM, kBlockN, kDim>(s, q_lane, lane_address_b(k_tile(n), kBlockN));
    wait_for_values(n);
    u32 weights[kTiles][kBlockN / 4];
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      apply_score(s[t], t, n);
      if (kMasked) apply_mask(s[t], t, n);
      if (kStateInSmem) softmax[t].load(statistics(t), p.scale_log2);
      constexpr bool kMaybeEmpty = kMasked || Score::kMayHide;
      softmax[t].template maxima<kMaybeEmpty>(s[t]);
      if (Config::kLazyRescale)
        softmax[t].template rescale<kMaybeEmpty>(o[t]);  // it branches: alpha need not outlive it
      softmax[t].template weights<0, kBlockN / 2>(s[t]);
      if (!Config::kLazyRescale) softmax[t].template rescale<kMaybeEmpty>(o[t]);
      if (kStateInSmem) softmax[t].save(statistics(t));
      pack_fragment<T>(weights[t], s[t]);
      dropout(t).drop(weights[t], n * kBlockN + 2 * int(thread_idx() % 4));
    }
    gemm_pv<T, kTiles, kBlockN, kDimV>(o, weights, lane_address_a(v_tile(n), kBlockN));
  }

  STROBE_DEVICE Dropout<Config::kDropout> dropout(int t) const {
    return {p, dropout_key, int(place().row0 + warp_offset() + 16 * t + thread_idx_again() % 32 / 4)};
  }

  STROBE_DEVICE bool warp_sees(int n) const {
    const Place at = place();
    const Mask m = mask(at);
    const int first = at.row0 + warp_offset(), last = min(first + kWarpRows, at.len_q) - 1;
    return (first <= last) & (m.hi(last) > n * kBlockN) & (m.lo(first) < (n + 1) * kBlockN);
  }

  STROBE_DEVICE void apply_score(float (&s)[kBlockN / 2], int t, int n) const {
    if constexpr (!Score::kPositional) return logits(s, Score::template of<Config>(p, 0, 0), Nowhere{});
    else {
      const Tile tile = decode_tile<Config>(opaque(int(block_idx())), p);  // recomputed, as in `store`
      const int lane = thread_idx_again() % 32, row = tile.row0 + warp_offset() + 16 * t + lane / 4;
      logits(s, Score::template of<Config>(p, tile.batch, tile.head),
             where<Score, Config>(tile, tile.positions, tile.head, row, n * kBlockN + 2 * (lane % 4)));
    }
  }

  STROBE_DEVICE void apply_mask(float (&s)[kBlockN / 2], int t, int n) const {
    const Place at = place();
    const int lane = thread_idx_again() % 32, row = at.row0 + warp_offset() + 16 * t + lane / 4,
              column = n * kBlockN + 2 * (lane % 4);
    mask_queries<false>(s, mask(at), row, row + 8, column);
  }

  // kPartialOut: the rows continue from a state, if there is one.
  STROBE_DEVICE void resume(const Tile& tile, int t) {
    const OutputRows<Config, Params> out{p, tile};
    if (!out.merges()) return;
    const int lane = thread_idx() % 32, first = tile.row0 + warp_offset() + 16 * t + lane / 4;
    State<true>{{out.state_lse(first), out.state_lse(first + 8)}}.resume(softmax[t], p);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int columns = out.state_columns(first + 8 * r);
      const float* from = out.o(first + 8 * r) + 2 * (lane % 4);
#pragma unroll
      for (int i = 0; i < kDimV / 8; ++i) {
        float x[2];
        ld_global_l2(x, from + 8 * i, 8 * i < columns);
        o[t][4 * i + 2 * r] = x[0], o[t][4 * i + 2 * r + 1] = x[1];
      }
    }
  }

  // ---- epilogue: normalise, round, and write through shared memory, each warp over its own rows of Q, so that rows
  // leave in 16-byte pieces; a partial output leaves as fp32 straight from the registers ---------------------------
  STROBE_DEVICE void store() {
    const Tile tile = decode_tile<Config>(block_idx(), p);
    const OutputRows<Config, Params> out{p, tile};
    const int lane = thread_idx() % 32, local_row = warp_offset(), warp_row = tile.row0 + local_row;
    const float sink = out.sink(0);
    float* lse = p.lse + tile.q.slice * p.lse_batch + tile.head * p.lse_head + tile.q.first;
    sync_warp();  // all lanes are done with this warp's rows of Q
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      if (kStateInSmem) softmax[t].load(statistics(t), p.scale_log2);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = 16 * t + lane / 4 + 8 * r;
        float row_lse;
        const float inverse =
            softmax[t].template finish<Config::kSinks>(r, sink, row_lse) * (Config::kDropout ? p.dropout_scale : 1.f);
        const bool exists = warp_row + row < tile.q.length;
        if (p.lse && lane % 4 == 0 && exists) st_global(lse + warp_row + row, row_lse);
        float* partial = Config::kPartialOut ? out.o(warp_row + row) + 2 * (lane % 4) : nullptr;
#pragma unroll
        for (int i = 0; i < kDimV / 8; ++i) {
          const float x = o[t][4 * i + 2 * r] * inverse, y = o[t][4 * i + 2 * r + 1] * inverse;
          if (!Config::kPartialOut)
            st_shared(q_tile() + chunk_offset(kBlockM, local_row + row, i) + 4 * (lane % 4), pack2<T>(x, y));
          else if (exists && (Config::kExactDims || 8 * i < p.dim_v)) st_global_x2(partial + 8 * i, x, y);
        }
      }
    }
    if constexpr (!Config::kPartialOut) {
      sync_warp();
      constexpr int kChunks = kDimV / kChunk<T>;
      T* to = tile.q.rows(p.o, p.o_batch, p.o_head, p.o_row, tile.head, 0);
#pragma unroll
      for (int i = 0; i < kWarpRows * kChunks / 32; ++i) {
        const int row = (i * 32 + lane) / kChunks, chunk = (i * 32 + lane) % kChunks;
        if (warp_row + row < tile.q.length && (Config::kExactDims || chunk * kChunk<T> < p.dim_v))
          st_global(to + i64(warp_row + row) * p.o_row + chunk * kChunk<T>,
                    ld_shared_x4(q_tile() + chunk_offset(kBlockM, local_row + row, chunk)));
      }
    }
  }

  STROBE_DEVICE void run(const Tile& tile) {
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      softmax[t].reset(p.scale_log2);
#pragma unroll
      for (int i = 0; i < kDimV / 2; ++i) o[t][i] = 0.f;
      if constexpr (Config::kPartialOut) resume(tile, t);
      if (kStateInSmem) softmax[t].save(statistics(t));
    }
    dropout_key = Config::kDropout ? dropout_head_key(p.seed, tile.batch, tile.head) : 0;
    const Mask m = mask_of<Mask, Config>(p, tile.q.length, tile.k.length, tile.positions);
    const KeyBlocks blocks = visible_blocks<kBlockN>(m, tile.row0, min(tile.row0 + kBlockM, tile.q.length) - 1);
    if (blocks.any()) {
      const int head_k = tile.head / p.group;
      set_place(Place{tile.row0, tile.q.length, tile.k.length, blocks.first, blocks.first_full, blocks.end_full,
                      tile.k.rows(p.k, p.k_batch, p.k_head, p.k_row, head_k, 0),
                      tile.k.rows(p.v, p.v_batch, p.v_head, p.v_row, head_k, 0), tile.positions});
      const T* q = tile.q.rows(p.q, p.q_batch, p.q_head, p.q_row, tile.head, tile.row0);
      copy_tile_async<kBlockM, kDim, kThreads, false, Config::kExactDims>(q_tile(), q, p.q_row,
                                                                          tile.q.length - tile.row0, p.dim);
      int n = blocks.begin();
      load_keys<true>(n);
      if (kStages > 1) load_values<true>(n);
      cp_async_commit();
#pragma unroll 1
      for (bool more = true; more; n = blocks.next(n)) {
        if (needs_mask(n)) step<true>(n);
        else step<false>(n);
        more = more_blocks(n);
      }
      cp_async_wait<0>();
    }
    store();
  }
};

template <class Config, class Mask, class Score, class Params> STROBE_DEVICE void forward_sm80(const Params& p) {
  const Tile tile = decode_tile<Config>(block_idx(), p);
  if (tile.row0 >= tile.q.length) return;  // varlen: a sequence shorter than the longest one
  ForwardSm80<Config, Mask, Score, Params> work{p};
  work.run(tile);
}

}  // namespace strobe

// FlashAttention forward for Ampere and later where queries are few or keys lie in pages: split-KV, packed GQA.
//
// A block owns kBlockM rows, the heads of a group for some queries, and one split of the keys that they see. kTeam
// warps share keys and have 16 * kTiles rows each. Where rows are few a team is one warp, and the teams of a block
// divide the keys of each block among them:
//     each team, over its own keys, with its own ring of cp.async stages:
//         S = Q K^T,  P = exp(S - m),  O = O + P V       as in forward_sm80.cuh
//     m, l and O of the teams, of a state, and of the splits are parts of a row: their weighted sum is the result.
// No barrier stands between teams before they meet, so every warp of the block keeps its own copies under way.
//
// The splits of a tile leave their parts in slots, and the last one to arrive adds them up. Of pages, each block has a
// piece of a work list.
#pragma once
#include <strobe/pipeline/scores.cuh>
#include <strobe/pipeline/split_kv.cuh>
#include <strobe/pipeline/warp_loader.cuh>
#include <strobe/tile/chunk.cuh>
#include <strobe/tile/gemm_sm80.cuh>

namespace strobe {

// Eight columns of a row of O over some of the keys, and the row's m and l.
struct RowPart {
  float o[8], m, l;

  // The operations of `merge_columns` for one split more.
  STROBE_DEVICE void add(const RowPart& x, float scale_log2) {
    const float top = fmax(m, x.m), safe = top == neg_inf() ? 0.f : top;
    const float mine = exp2_approx((m - safe) * scale_log2), its = exp2_approx((x.m - safe) * scale_log2);
    m = top;
    l = fma(x.l, its, l * mine);
#pragma unroll
    for (int c = 0; c < 8; ++c) o[c] = fma(x.o[c], its, o[c] * mine);
  }
};

template <class Config, class Mask, class Score, class Params> struct DecodeSm80 {
  using T = typename Config::Element;
  using Offset = typename Config::Offset;
  using Bytes = typename Config::Bytes;
  static constexpr int kBlockM = Config::kBlockM, kBlockN = Config::kBlockN, kDim = Config::kDim, kDimV = Config::kDimV;
  static constexpr int kWarps = Config::kWarps, kTeam = Config::kTeam, kTeams = kWarps / kTeam, kThreads = 32 * kWarps;
  static constexpr int kTiles = kBlockM / (16 * kTeam), kKeys = kBlockN / kTeams, kStages = Config::kStages;
  static constexpr int kPackGqa = Config::kPackGqa, kChunks = kDimV / 8;
  static constexpr bool kListed = Config::Keys::kPaged, kInvariant = Config::kInvariant;
  static_assert(kStages >= 2, "the next keys arrive during these");
  static_assert(!kInvariant || kTeams == 1, "parts of teams are not added one by one");
  using Loader = WarpLoader<Config, Params>;
  struct WholeBlock {  // where Hopper's kernels have several consumers
    static constexpr int kRows = kBlockM, consumer = 0;
  };
  using Split = SplitKV<Config, Params, WholeBlock>;

  const Params& p;
  const Tile& tile;
  const OutputRows<Config, Params> out{p, tile};
  const int warp = thread_idx() / 32, lane = thread_idx() % 32, team = warp / kTeam;
  const int first_row = tile.row0 + warp % kTeam * 16 * kTiles;  // of this warp
  float o[kTiles][kDimV / 2];
  Softmax<> softmax[kTiles];

  STROBE_DEVICE u32 q_tile() const { return smem_base() + Offset::q; }
  STROBE_DEVICE u32 k_tile(int stage) const { return smem_base() + Offset::k + (team * kStages + stage) * Bytes::k; }
  STROBE_DEVICE u32 v_tile(int stage) const { return smem_base() + Offset::v + (team * kStages + stage) * Bytes::v; }
  STROBE_DEVICE u32 missing(int stage) const {  // a word for each warp of the team, see WarpLoader
    return smem_base() + Offset::missing + 4 * kTeam * (team * kStages + stage);
  }
  STROBE_DEVICE static void sync_team() {
    if constexpr (kTeam == 1) sync_warp();
    else if constexpr (kTeams == 1) sync_block();
    else bar_sync(1 + thread_idx() / (32 * kTeam), 32 * kTeam);
  }
  STROBE_DEVICE Mask mask() const { return mask_of<Mask, Config>(p, tile.q.length, tile.k.length, tile.positions); }

  // ---- keys ---------------------------------------------------------------------------------------------------------
  STROBE_DEVICE void load_queries() const {
    constexpr int kQueryChunks = kDim / kChunk<T>;
    for (int i = thread_idx(); i < kBlockM * kQueryChunks; i += kThreads) {
      const int row = i / kQueryChunks, chunk = i % kQueryChunks;
      const bool valid = tile.row0 + row < tile.q.length && (Config::kExactDims || kChunk<T> * chunk < p.dim);
      const int at = valid ? tile.row0 + row : 0;
      cp_async_16(
          q_tile() + chunk_offset(kBlockM, row, chunk),
          tile.q.rows(p.q, p.q_batch, p.q_head, p.q_row, out.head(at), at / kPackGqa) + (valid ? kChunk<T> * chunk : 0),
          valid);
    }
  }
  STROBE_DEVICE void load(Loader& loader, int n, int stage) const {
    loader.load(n, warp % kTeam, k_tile(stage), v_tile(stage), missing(stage));
  }

  STROBE_DEVICE void attend(const KeyBlocks& blocks) {
    Loader loader{p, tile, quotient(tile.head, p.group), blocks.first};
    load_queries();
    int n = blocks.begin(), next = n;  // of the block, and of the one that is loaded next
#pragma unroll
    for (int stage = 0; stage < kStages - 1; ++stage) {
      if (blocks.has(next)) load(loader, next, stage), next = blocks.next(next);
      cp_async_commit();
    }
    cp_async_wait<kStages - 2>();
    sync_block();  // all rows of Q are here
    int stage = 0, last = kStages - 1;
#pragma unroll 1
    for (; blocks.has(n); n = blocks.next(n)) {
      cp_async_wait<kStages - 2>();
      sync_team();  // the team's copies have landed, and nobody reads the buffers of the previous step any more
      if (blocks.has(next)) load(loader, next, last), next = blocks.next(next);
      cp_async_commit();
      step(n, stage, blocks.masked(n));
      last = stage;
      stage = stage + 1 == kStages ? 0 : stage + 1;
    }
    cp_async_wait<0>();
  }

  // ---- one block of keys --------------------------------------------------------------------------------------------
  STROBE_DEVICE void step(int n, int stage, bool masked) {
    const int key = n * kBlockN + team * kKeys;
    if (kTeam > 1 && !sees(key)) return;
    float s[kTiles][kKeys / 2];
    gemm_qk<T, kTiles, kBlockM, kKeys, kDim>(
        s, lane_address_a(q_tile() + warp % kTeam * (16 * kTiles * kPanelRowBytes), kBlockM),
        lane_address_b(k_tile(stage), kKeys));
    u32 weights[kTiles][kKeys / 4];
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      const int row = first_row + 16 * t + lane / 4, column = key + 2 * (lane % 4);
      logits<kInvariant>(s[t], Score::template of<Config>(p, tile.batch, tile.head),
                         where<Score, Config>(tile, tile.positions, tile.head, row, column));
      if (masked) mask_queries<true>(s[t], mask(), row / kPackGqa, (row + 8) / kPackGqa, column);
      if constexpr (kListed) hide_missing(s[t], stage);
      softmax[t].template maxima<true, kInvariant>(s[t]);
      softmax[t].template weights<0, kKeys / 2>(s[t]);
      softmax[t].template rescale<true>(o[t]);
      pack_fragment<T>(weights[t], s[t]);
    }
    gemm_pv<T, kTiles, kKeys, kDimV>(o, weights, lane_address_a(v_tile(stage), kKeys));
  }
  // Says whether this warp's rows see some of the team's keys. A team of several warps may have rows on both sides of a
  // diagonal, and rows that do not exist.
  STROBE_DEVICE bool sees(int key) const {
    const Mask m = mask();
    const int last = min(first_row + 16 * kTiles, tile.q.length) - 1;
    return any((first_row <= last) & (m.hi(last / kPackGqa) > key) & (m.lo(first_row / kPackGqa) < key + kKeys));
  }
  STROBE_DEVICE void hide_missing(float (&s)[kKeys / 2], int stage) const {
    constexpr int kEach = kKeys / kTeam;  // that a warp has loaded
    u32 words[kTeam], some = 0;
#pragma unroll
    for (int w = 0; w < kTeam; ++w) some |= words[w] = ld_shared(missing(stage) + 4 * w);
    if (!any(some)) return;
#pragma unroll
    for (int i = 0; i < kKeys / 2; ++i) {
      const int column = fragment_column(i);
      if (words[column / kEach] >> (column % kEach + 2 * (lane % 4)) & 1) s[i] = neg_inf();
    }
  }

  // ---- epilogue: threads take eight columns of a row each, wherever its parts are -----------------------------------
  // Parts of teams lie over the buffers of Q, K and V; see `memory` in cuda/plans/decode_sm80.py.
  static constexpr int kRowFloats = kDimV + 8;  // so that the rows of a fragment lie in different banks
  STROBE_DEVICE static u32 part_row(int of_team, int row) {
    return smem_base() + (of_team * kBlockM + row) * (4 * kRowFloats);
  }
  STROBE_DEVICE void publish_part() const {
#pragma unroll
    for (int t = 0; t < kTiles; ++t)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const u32 at = part_row(team, warp % kTeam * 16 * kTiles + 16 * t + 8 * r + lane / 4);
#pragma unroll
        for (int i = 0; i < kDimV / 8; ++i)
          st_shared(at + 32 * i + 8 * (lane % 4),
                    u32x2{as_bits(o[t][4 * i + 2 * r]), as_bits(o[t][4 * i + 2 * r + 1])});
        const float l = quad_sum(softmax[t].l[r]);
        if (lane % 4 == 0) st_shared(at + 4 * kDimV, u32x2{as_bits(softmax[t].m[r]), as_bits(l)});
      }
  }
  STROBE_DEVICE static RowPart part_of_team(int of_team, int row, int chunk) {
    RowPart x;
    const u32 at = part_row(of_team, row);
    ld_shared_x2(at + 4 * kDimV, x.m, x.l);
#pragma unroll
    for (int i = 0; i < 8; i += 2) ld_shared_x2(at + 32 * chunk + 4 * i, x.o[i], x.o[i + 1]);
    return x;
  }
  STROBE_DEVICE static void load_part(RowPart& x, const float* from, bool valid) {
    float a[4], b[4];
    ld_global_l2(a, from, valid);
    ld_global_l2(b, from + 4, valid);
#pragma unroll
    for (int i = 0; i < 4; ++i) x.o[i] = a[i], x.o[4 + i] = b[i];
  }
  // A part that lies where this block's will go: of a state, or of the splits before. One thread of a row overwrites
  // its m and l, so they are put behind those of the first team before, for all to read.
  static constexpr u32 kBefore = 4 * kDimV + 8;
  STROBE_DEVICE static void put_before(int row, float m, float l) {
    st_shared(part_row(0, row) + kBefore, u32x2{as_bits(m), as_bits(l)});
  }
  STROBE_DEVICE void add_before(RowPart& x, const float* from, int row, bool there) const {
    RowPart before;
    load_part(before, from, there);
    ld_shared_x2(part_row(0, row) + kBefore, before.m, before.l);
    before.add(x, p.scale_log2);
    x = before;
  }
  // A state belongs to one split, the first.
  STROBE_DEVICE bool merges() const {
    if constexpr (!Config::kMerge) return false;
    else return out.merges() && (!kListed || tile.work == tile.part.first_slot);
  }
  STROBE_DEVICE RowPart part_of_block(int row, int chunk) const {
    RowPart x = part_of_team(0, row, chunk);
#pragma unroll
    for (int t = 1; t < kTeams; ++t) x.add(part_of_team(t, row, chunk), p.scale_log2);
    if (merges()) add_before(x, out.o(tile.row0 + row) + 8 * chunk, row, 8 * chunk < p.dim_v);
    return x;
  }
  STROBE_DEVICE void store_row(int row, int chunk, RowPart& x) const {
    float lse;
    const float inverse = out.normalise(row, x.m, x.l, lse);
    if (p.lse && chunk == 0) out.store_lse(row, lse);
#pragma unroll
    for (int c = 0; c < 8; ++c) x.o[c] *= inverse;
    if (!Config::kExactDims && 8 * chunk >= p.dim_v) return;
    if constexpr (Config::kPartialOut) store_chunk(out.o(row) + 8 * chunk, x.o);
    else store_chunk<T>(tile.q.rows(p.o, p.o_batch, p.o_head, p.o_row, out.head(row), row / kPackGqa) + 8 * chunk, x.o);
  }
  // Call visit(row of the tile) or visit(row, chunk) for all that exist.
  template <class Visit> STROBE_DEVICE static void for_each_row(int rows, Visit visit) {
#pragma unroll 1
    for (int row = thread_idx(); row < min(rows, kBlockM); row += kThreads) visit(row);
  }
  template <class Visit> STROBE_DEVICE static void for_each_chunk(int rows, Visit visit) {
#pragma unroll 1
    for (int i = thread_idx(); i < min(rows, kBlockM) * kChunks; i += kThreads) visit(i / kChunks, i % kChunks);
  }

  STROBE_DEVICE void store() const {
    sync_block();  // all are done with the buffers
    publish_part();
    if constexpr (Config::kMerge)
      if (merges())
        for_each_row(tile.q.length - tile.row0, [&](int row) {
          const float lse = out.state_lse(tile.row0 + row);
          put_before(row, lse * p.unscale, lse == neg_inf() ? 0.f : 1.f);
        });
    sync_block();
    Split split{p, tile, WholeBlock{}};
    if (!Config::kSplit || split.alone()) {
      for_each_chunk(split.rows(), [&](int row, int chunk) {
        RowPart x = part_of_block(row, chunk);
        store_row(tile.row0 + row, chunk, x);
      });
      return;
    }
    if constexpr (Config::kSplit) store_split(split);
  }
  STROBE_DEVICE void store_split(Split& split) const {
    bool counts = true, complete = false;
    if constexpr (kInvariant) {  // the first splits of a tile are added up in the slot of the first: see split_kv.cuh
      const int number = tile.work - tile.part.first_slot;
      if (WorkOf<Config>::first_item(p) <= tile.part.first_slot) {
        split.added = number, complete = number == tile.part.count - 1;
        counts = !complete && tile.work + 1 >= WorkOf<Config>::end_of_items(p);
      }
    }
    float* const slot = split.partial(split.added ? split.first_slot() : split.my_slot());
    float* const statistics = slot + split.statistics_of_rows();
    const bool adds = kInvariant && split.added;
    if (adds) {
      for_each_row(split.rows(), [&](int row) {
        float ml[2];
        ld_global_l2(ml, statistics + 2 * row, true);
        put_before(row, ml[0], ml[1]);
      });
      sync_block();
    }
    for_each_chunk(split.rows(), [&](int row, int chunk) {
      RowPart x = part_of_block(row, chunk);
      float* const to = slot + row * kDimV + 8 * chunk;
      if (adds) add_before(x, to, row, true);
      if (complete) return store_row(tile.row0 + row, chunk, x);
      store_chunk(to, x.o);
      if (chunk == 0) st_global_x2(statistics + 2 * row, x.m, x.l);
    });
    if (!counts) return;
    const u32 word = smem_base() + Offset::missing;
    sync_block();
    if (thread_idx() == 0) split.count_in(word);
    sync_block();
    if (!split.is_last(word)) return;
    const float* const first = split.partial(split.first_slot());
    for_each_chunk(split.rows(), [&](int row, int chunk) {
      RowPart x;
      float sum[2][4] = {};
      split.template merge_columns<2, 8>(first, row, 8 * chunk, 4, sum, x.m, x.l);
#pragma unroll
      for (int c = 0; c < 8; ++c) x.o[c] = sum[c / 4][c % 4];
      store_row(tile.row0 + row, chunk, x);
    });
    if (kInvariant && thread_idx() == 0) st_global(split.counter(), 0u), st_global(split.counter() + 1, 0u);
  }

  STROBE_DEVICE void run() {
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      softmax[t].reset(p.scale_log2);
#pragma unroll
      for (int i = 0; i < kDimV / 2; ++i) o[t][i] = 0.f;
    }
    const KeyBlocks blocks = blocks_of_interval<Config>(p, mask(), tile, tile.row0, kBlockM);
    if (blocks.any()) attend(blocks);
    store();
  }
};

template <class Config, class Mask, class Score, class Params> STROBE_DEVICE void decode_sm80(const Params& p) {
  const auto run = [&](const Tile& tile) {
    if (tile.row0 < tile.q.length) DecodeSm80<Config, Mask, Score, Params>{p, tile}.run();
  };
  if constexpr (!Config::Keys::kPaged) run(decode_tile<Config>(block_idx(), p));
  else {
    using Work = WorkOf<Config>;
#pragma unroll 1
    for (int index = Work::first(p); index < Work::end(p); index = Work::next(p, index)) {
      run(Work::tile(index, p));
      sync_block();  // all have read what lies over the buffers
    }
  }
}

}  // namespace strobe

// Split-KV: several blocks share the keys of a tile. Each stores its partial result, O, m and l, in memory and counts
// itself in; the last one merges all of them, always in the same order, so that the bits do not depend on who is last.
//
// Invariant kernels cut keys at fixed places, so a block has several splits of a tile in a row. Those from the first
// one on it adds up itself, as merging would, in the first one's slot; nobody waits for that. All splits may be among
// them.
#pragma once
#include <strobe/pipeline/output_rows.cuh>
#include <strobe/pipeline/staging.cuh>
#include <strobe/tile/softmax.cuh>

namespace strobe {

// `Staging` says how many rows a consumer of a block has, which one this is, and how results leave it.
template <class Config, class Params, class Staging> struct SplitKV {
  static constexpr int kDimV = Config::kDimV, kConsumers = Config::kConsumers, kRows = Staging::kRows;
  // One consumer's partial result: O, row by row, and behind it m and l of every row.
  static constexpr int kFloats = kRows * kDimV + 2 * kRows, kSplitStride = kConsumers * kFloats;
  static_assert(kSplitStride == Config::kPartialFloats, "the workspace that Python asks for");
  static_assert(!Config::kInvariant || kConsumers <= 2, "an item has two counters for each");

  const Params& p;
  const Tile& tile;
  const Staging& staging;  // of this consumer
  OutputRows<Config, Params> out{p, tile};
  int added = 0;  // splits behind the first one that are in its slot

  // Results lie in slots. Splits of equal size have neighbours, and so have those of invariant kernels; parts of listed
  // work have every other slot behind the first.
  static constexpr bool kListed = Config::Keys::kPaged, kInvariant = Config::kInvariant,
                        kPieces = kListed && !kInvariant;
  static constexpr int kStep = kPieces ? 2 * kSplitStride : kSplitStride;
  // An invariant kernel has a slot for each split of each tile. It has p.slot_rows rows, as many as the longest tile of
  // the call, since most tiles of a decode use few of theirs.
  STROBE_DEVICE int slot_floats() const {
    if constexpr (kInvariant) return p.slot_rows * (kDimV + 2);
    else return kSplitStride;
  }
  STROBE_DEVICE int statistics_of_rows() const {  // where they begin behind the O of this consumer
    if constexpr (kInvariant) return p.slot_rows * kDimV - kRows * staging.consumer * (kDimV - 2);
    else return kRows * kDimV;
  }
  STROBE_DEVICE int tile_index() const { return quotient(tile.work, p.splits); }
  STROBE_DEVICE int splits() const { return kListed ? tile.part.count : p.splits; }
  STROBE_DEVICE int first_slot() const {
    return kListed ? (kPieces ? tile.part.first_slot & ~1 : tile.part.first_slot) : tile_index() * p.splits;
  }
  STROBE_DEVICE int my_slot() const {
    return kListed ? tile.work : tile_index() * p.splits + remainder(tile.work, p.splits);
  }
  STROBE_DEVICE int parts() const { return splits() - added; }  // to be merged
  // A tile that is not cut is not counted: others may count in its slot already.
  STROBE_DEVICE bool alone() const { return kListed && splits() == 1; }
  STROBE_DEVICE int ahead(int split) const {  // the first part may lie in the odd slot of its piece
    if constexpr (kInvariant) return split == 0 ? 0 : added * slot_floats();
    else return kPieces && split == 0 ? (tile.part.first_slot & 1) * kSplitStride : 0;
  }
  STROBE_DEVICE int first_row() const { return tile.row0 + kRows * staging.consumer; }
  // The rows of this consumer: more than kRows if others follow. A slot has room for no more, should a sequence have
  // more than was said.
  STROBE_DEVICE int rows() const {
    const int there = tile.q.length - first_row();
    if constexpr (kInvariant) return min(there, p.slot_rows - kRows * staging.consumer);
    else return there;
  }
  STROBE_DEVICE float* partial(int slot) const {
    if constexpr (kInvariant) return p.partial + i64(slot) * slot_floats() + kRows * staging.consumer * kDimV;
    else return p.partial + (i64(slot) * kConsumers + staging.consumer) * kFloats;
  }
  // The counter of the tile. Those of invariant kernels lie behind the list; `added` of the first slot lies kConsumers
  // further.
  STROBE_DEVICE u32* counter() const {
    if constexpr (kInvariant) {
      u32* const counters = reinterpret_cast<u32*>(p.work) + kRecord * (grid_dim() + p.items);
      return counters + 4 * tile.part.first_slot + staging.consumer;
    } else return p.counter + 1 + (kListed ? tile.part.first_slot : tile_index()) * kConsumers + staging.consumer;
  }

  // O becomes the sum of this split and those before, which this thread has stored. Statistics of both rows come first:
  // then ptxas has all loads of O under way together.
  template <class O> STROBE_DEVICE void add_splits_before(O& o, Softmax<>& softmax) const {
    const float* sum = partial(first_slot());
    const int own_row = thread_idx() % 128 / 32 * 16 + thread_idx() % 32 / 4;
    float ml[2][2], past[2], weight[2];
#pragma unroll
    for (int r = 0; r < 2; ++r)
      ld_global_l2(ml[r], sum + statistics_of_rows() + 2 * (own_row + 8 * r), own_row + 8 * r < rows());
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float m = fmax(ml[r][0], softmax.m[r]), safe = m == neg_inf() ? 0.f : m;
      past[r] = exp2_approx((ml[r][0] - safe) * p.scale_log2);
      weight[r] = exp2_approx((softmax.m[r] - safe) * p.scale_log2);
      const float l = fma(quad_sum(softmax.l[r]), weight[r], ml[r][1] * past[r]);
      softmax.m[r] = m, softmax.l[r] = thread_idx() % 4 == 0 ? l : 0.f;  // a quad adds its four up
    }
#pragma unroll
    for (int r = 0; r < 2; ++r)
      o.add_row(r, sum + (own_row + 8 * r) * kDimV + 2 * (thread_idx() % 4), own_row + 8 * r < rows() ? kDimV : 0,
                past[r], weight[r]);
  }
  // Stores O, m and l where others, or this thread, find them.
  template <class O> STROBE_DEVICE void store_rows(const O& o, const Softmax<>& softmax) const {
    const int tid = thread_idx() % 128, lane = tid % 32;
    const int behind_o = statistics_of_rows();
    float* mine = partial(added ? first_slot() : my_slot());
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int eight = tid / 32 * 16 + 8 * r, row = eight + lane / 4;
      if (!warp_uniform(eight < rows())) continue;  // else ptxas takes the rings for divergent from here on
      const bool has_room = !kInvariant || row < rows();
      o.store_row(r, mine + row * kDimV + 2 * (lane % 4), has_room ? kDimV : 0);
      const float l = quad_sum(softmax.l[r]);
      if (lane % 4 == 0 && has_room) st_global_x2(mine + behind_o + 2 * row, softmax.m[r], l);
    }
  }
  // One thread, behind a barrier, counts this split in. At `to` in shared memory it leaves how many came before, and
  // how many the first one has added up.
  STROBE_DEVICE void count_in(u32 to) const {
    if (kInvariant && added) st_global(counter() + kConsumers, u32(added));
    fence_device();
    st_shared(to, alone() ? 0 : atomic_inc_wrap(counter(), splits() - 1));
    fence_device();
    if (kInvariant) st_shared(to + 4, alone() ? 0 : acquire_turn(counter() + kConsumers));
  }
  // Says, behind another barrier, whether this split was the last one.
  STROBE_DEVICE bool is_last(u32 from) {
    if (kInvariant) added = int(ld_shared(from + 4));
    return int(ld_shared(from)) + added == splits() - 1;
  }
  // Stores this split's partial result and returns whether it was the last one.
  template <class O> STROBE_DEVICE bool store_partial(const O& o, const Softmax<>& softmax) {
    store_rows(o, softmax);
    const u32 splits_before = staging.buffer;
    staging.acquire();
    if (thread_idx() % 128 == 0) count_in(splits_before);
    sync_warpgroup(staging.consumer);
    const bool last = is_last(splits_before);
    sync_warpgroup(staging.consumer);  // all have read it
    // A bulk copy may write there next. `Staging::send` has a fence of its own, but the fp32 rows of partial output do
    // not go through it.
    if (!last || Config::kPartialOut) fence_proxy_async();
    if (kInvariant && last && thread_idx() % 128 == 0)  // a plan's next layer counts there, too
      st_global(counter(), 0u), st_global(counter() + kConsumers, 0u);
    return last;
  }

  // Merges and stores the tile. Merging is nothing but waiting for loads, so a thread has 16 under way: of 16 columns
  // and four splits or, since invariant kernels have many splits, of four columns and 16 splits while there are threads
  // for it.
  STROBE_DEVICE void merge(const TensorMap* map, const Box& box) const {
    if (kInvariant && parts() > 4 && rows() * kDimV <= 4 * 128) merge_by<1, 16>(map, box);
    else merge_by<4, 4>(map, box);
  }

  // O, m and l of a row under the maximum of all splits, which moves on from splits to splits as it does from key block
  // to key block. kAtOnce are read at once and share a maximum. Invariant kernels take them one by one: which of its
  // neighbours a row sees must not matter, and a split in which the row sees nothing changes no bit.
  template <int kFours, int kAtOnce> STROBE_DEVICE void merge_columns(const float* partials, int row, int column,
                                                                      int stride, float (&o)[kFours][4], float& m,
                                                                      float& l) const {
    constexpr int kTogether = kInvariant ? 1 : kAtOnce;
    const int behind_o = statistics_of_rows();
    const float *values = partials + row * kDimV + column, *statistics = partials + behind_o + 2 * row;
    const int step = kInvariant ? slot_floats() : kStep;
    m = neg_inf(), l = 0.f;
#pragma unroll 1
    for (int split = 0; split < parts(); split += kAtOnce) {
      float x[kAtOnce][kFours][4], ml[kAtOnce][2];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        const bool exists = split + j < parts();
        ld_global_l2(ml[j], statistics + j * step + ahead(split + j), exists);
        if (!exists) ml[j][0] = neg_inf();
#pragma unroll
        for (int c = 0; c < kFours; ++c)
          ld_global_l2(x[j][c], values + j * step + ahead(split + j) + c * stride, exists);
      }
      statistics += kAtOnce * step, values += kAtOnce * step;
#pragma unroll
      for (int from = 0; from < kAtOnce; from += kTogether) {
        float now = m;
#pragma unroll
        for (int j = from; j < from + kTogether; ++j) now = fmax(now, ml[j][0]);
        const float safe = now == neg_inf() ? 0.f : now, past = exp2_approx((m - safe) * p.scale_log2);
        m = now;
        l *= past;
#pragma unroll
        for (int c = 0; c < 4 * kFours; ++c) o[c / 4][c % 4] *= past;
#pragma unroll
        for (int j = from; j < from + kTogether; ++j) {
          const float weight = exp2_approx((ml[j][0] - safe) * p.scale_log2);
          l = fma(ml[j][1], weight, l);
#pragma unroll
          for (int c = 0; c < 4 * kFours; ++c) o[c / 4][c % 4] = fma(x[j][c / 4][c % 4], weight, o[c / 4][c % 4]);
        }
      }
    }
  }

 private:
  using T = typename Config::Element;

  // A thread merges kFours times four columns of a row, its neighbours the columns beside them: all threads take part,
  // whosever rows they are.
  template <int kFours, int kAtOnce> STROBE_DEVICE void merge_by(const TensorMap* map, const Box& box) const {
    constexpr int kPanel = strobe::kPanel<T>, kMost = kPanel * Staging::kPanelsAtOnce;
    const int rows = min(64, this->rows());
    const float* partials = partial(first_slot());
#pragma unroll 1
    for (int panel = 0; panel < panels<T>(kDimV); panel += Staging::kPanelsAtOnce) {
      const int columns = kDimV % kMost == 0 ? kMost : min(kMost, kDimV - panel * kPanel), stride = columns / kFours,
                threads = stride / 4;
      if (!Config::kPartialOut) staging.acquire();
#pragma unroll 1
      for (int i = thread_idx() % 128; i < rows * threads; i += 128) {
        const int row = i / threads, column = i % threads * 4;
        float o[kFours][4] = {}, m, l;
        merge_columns<kFours, kAtOnce>(partials, row, panel * kPanel + column, stride, o, m, l);
        float lse;
        const float inverse = out.normalise(first_row() + row, m, l, lse);
        if (p.lse && panel + column == 0) out.store_lse(first_row() + row, lse);
#pragma unroll
        for (int c = 0; c < kFours; ++c) {
#pragma unroll
          for (int x = 0; x < 4; ++x) o[c][x] *= inverse;
          const int at = column + c * stride;
          if (!Config::kPartialOut)
            st_shared(staging.buffer + chunk_offset(64, row, at / kChunk<T>) + column % kChunk<T> * sizeof(T),
                      u32x2{pack2<T>(o[c][0], o[c][1]), pack2<T>(o[c][2], o[c][3])});
          else if (panel * kPanel + at < p.dim_v) out.store_o(first_row() + row, panel * kPanel + at, o[c]);
        }
      }
      if (!Config::kPartialOut) staging.send(map, box, panel, rows > 0);
      else sync_warpgroup(staging.consumer);  // the loop above is divergent, and ptxas must know where it ends
    }
  }
};

// Says whether another block also works on this tile. Partial outputs take the split path in any case.
template <class Config> STROBE_DEVICE bool is_split(const Tile& tile) {
  return !Config::Keys::kPaged || Config::kPartialOut || warp_uniform(tile.part.count) > 1;
}
// The epilogue of a consumer's 64 rows: the partial result of this split and, by the last one, the merge. Returns
// whether the tile is complete and still to be stored, because this block has added up all splits.
template <class Config, class Params, class Staging, class O>
STROBE_DEVICE bool store_split(const Params& p, const Tile& tile, const Staging& staging, O& o, Softmax<>& softmax) {
  SplitKV<Config, Params, Staging> split{p, tile, staging};
  if constexpr (Config::kInvariant) {
    const int number = tile.work - tile.part.first_slot;  // of this split
    if (warp_uniform(WorkOf<Config>::first_item(p) <= tile.part.first_slot)) {
      split.added = number;
      if (number > 0) split.add_splits_before(o, softmax);
      if (number == tile.part.count - 1 && !Config::kPartialOut) return true;
      if (number < tile.part.count - 1 && warp_uniform(tile.work + 1 < WorkOf<Config>::end_of_items(p))) {
        split.store_rows(o, softmax);
        sync_warpgroup(staging.consumer);  // all are done with Q; a quad reads what one of its lanes has stored
        return false;
      }
    }
  }
  if (split.store_partial(o, softmax)) split.merge(&p.map_o, box_of_consumer<Config>(tile, staging.consumer));
  return false;
}

}  // namespace strobe

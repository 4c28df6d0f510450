// Slots: where the splits of a tile leave their results in memory, how they are counted, and how one row of them becomes
// a sum. What a slot has of a row is O; behind the rows lie m and l of each.
#pragma once
#include <strobe/pipeline/output_rows.cuh>
#include <strobe/ptx/warp.cuh>

namespace strobe {

// `consumer` of a block has kRows rows of a tile.
template <class Config, class Params, int kRows> struct Slots {
  static constexpr int kDimV = Config::kDimV, kConsumers = Config::kConsumers;
  // One consumer's partial result: O, row by row, and behind it m and l of every row.
  static constexpr int kFloats = kRows * kDimV + 2 * kRows, kSplitStride = kConsumers * kFloats;
  static_assert(kSplitStride == Config::kPartialFloats, "the workspace that Python asks for");
  static_assert(!Config::kInvariant || kConsumers <= 2, "an item has two counters for each");

  const Params& p;
  const Tile& tile;
  int consumer;
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
    if constexpr (kInvariant) return p.slot_rows * kDimV - kRows * consumer * (kDimV - 2);
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
  STROBE_DEVICE int first_row() const { return tile.row0 + kRows * consumer; }
  // Of this consumer: more than 64 if others follow. A slot has room for no more, should a sequence have more than was
  // said.
  STROBE_DEVICE int rows() const {
    const int there = tile.q.length - first_row();
    if constexpr (kInvariant) return min(there, p.slot_rows - kRows * consumer);
    else return there;
  }
  STROBE_DEVICE float* partial(int slot) const {
    if constexpr (kInvariant) return p.partial + i64(slot) * slot_floats() + kRows * consumer * kDimV;
    else return p.partial + (i64(slot) * kConsumers + consumer) * kFloats;
  }
  // Of the tile. Those of invariant kernels lie behind the list; `added` of the first slot lies kConsumers further.
  STROBE_DEVICE u32* counter() const {
    if constexpr (kInvariant) {
      u32* const counters = reinterpret_cast<u32*>(p.work) + kRecord * (grid_dim() + p.items);
      return counters + 4 * tile.part.first_slot + consumer;
    } else return p.counter + 1 + (kListed ? tile.part.first_slot : tile_index()) * kConsumers + consumer;
  }

  // One thread, behind a barrier, counts this split in. At `to` in shared memory it leaves how many came before, and how
  // many the first one has added up.
  STROBE_DEVICE void count_in(u32 to) const {
    if (kInvariant && added) st_global(counter() + kConsumers, u32(added));
    fence_device();
    st_shared(to, alone() ? 0 : atomic_inc_wrap(counter(), splits() - 1));
    fence_device();
    if (kInvariant) st_shared(to + 4, alone() ? 0 : acquire_turn(counter() + kConsumers));
  }
  // Behind another barrier, whether this split was the last one.
  STROBE_DEVICE bool is_last(u32 from) {
    if (kInvariant) added = int(ld_shared(from + 4));
    return int(ld_shared(from)) + added == splits() - 1;
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
};

}  // namespace strobe

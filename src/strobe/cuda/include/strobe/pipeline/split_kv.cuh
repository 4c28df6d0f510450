// Split-KV: several blocks share the keys of a tile. Each stores its partial result, O, m and l, in memory and counts
// itself in; the last one merges all of them, always in the same order, so that the bits do not depend on who is last.
//
// Invariant kernels cut keys at fixed places, so a block has several splits of a tile in a row. Those from the first
// one on it adds up itself, as merging would, in the first one's slot; nobody waits for that. All splits may be among
// them.
#pragma once
#include <strobe/pipeline/slots.cuh>
#include <strobe/pipeline/staging.cuh>
#include <strobe/tile/softmax.cuh>

namespace strobe {

template <class Config, class Params, class Staging> struct SplitKV : Slots<Config, Params, 64> {
  using Base = Slots<Config, Params, 64>;
  using Base::added, Base::alone, Base::counter, Base::first_row, Base::first_slot, Base::kConsumers, Base::kDimV,
      Base::kInvariant, Base::merge_columns, Base::my_slot, Base::p, Base::partial, Base::parts,
      Base::statistics_of_rows, Base::tile;

  const Staging& staging;  // of this consumer
  OutputRows<Config, Params> out{p, tile};

  // O becomes the sum of this split and those before, which this thread has stored. Statistics of both rows come first:
  // then ptxas has all loads of O under way together.
  template <class O> STROBE_DEVICE void add_splits_before(O& o, Softmax<>& softmax) const {
    const float* sum = partial(first_slot());
    const int own_row = thread_idx() % 128 / 32 * 16 + thread_idx() % 32 / 4;
    float ml[2][2], past[2], weight[2];
#pragma unroll
    for (int r = 0; r < 2; ++r)
      ld_global_l2(ml[r], sum + statistics_of_rows() + 2 * (own_row + 8 * r), own_row + 8 * r < this->rows());
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
      o.add_row(r, sum + (own_row + 8 * r) * kDimV + 2 * (thread_idx() % 4), own_row + 8 * r < this->rows() ? kDimV : 0,
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
      if (!warp_uniform(eight < this->rows())) continue;  // else ptxas takes the rings for divergent from here on
      const bool has_room = !kInvariant || row < this->rows();
      o.store_row(r, mine + row * kDimV + 2 * (lane % 4), has_room ? kDimV : 0);
      const float l = quad_sum(softmax.l[r]);
      if (lane % 4 == 0 && has_room) st_global_x2(mine + behind_o + 2 * row, softmax.m[r], l);
    }
  }
  // Stores this split's partial result and returns whether it was the last one.
  template <class O> STROBE_DEVICE bool store_partial(const O& o, const Softmax<>& softmax) {
    store_rows(o, softmax);
    const u32 splits_before = staging.buffer;
    staging.acquire();
    if (thread_idx() % 128 == 0) this->count_in(splits_before);
    sync_warpgroup(staging.consumer);
    const bool last = this->is_last(splits_before);
    sync_warpgroup(staging.consumer);  // all have read it
    // A bulk copy may write there next. `Staging::send` has a fence of its own, but the fp32 rows of partial output do
    // not go through it.
    if (!last || Config::kPartialOut) fence_proxy_async();
    else if (kInvariant && thread_idx() % 128 == 0) st_global(counter(), 0u), st_global(counter() + kConsumers, 0u);
    return last;
  }

  // Merges and stores the tile. Merging is nothing but waiting for loads, so a thread has 16 under way: of 16 columns
  // and four splits or, since invariant kernels have many splits, of four columns and 16 splits while there are threads
  // for it.
  STROBE_DEVICE void merge(const TensorMap* map, const Box& box) const {
    if (kInvariant && parts() > 4 && this->rows() * kDimV <= 4 * 128) merge_by<1, 16>(map, box);
    else merge_by<4, 4>(map, box);
  }

 private:
  using T = typename Config::Element;

  // A thread merges kFours times four columns of a row, its neighbours the columns beside them: all threads take part,
  // whosever rows they are.
  template <int kFours, int kAtOnce> STROBE_DEVICE void merge_by(const TensorMap* map, const Box& box) const {
    constexpr int kMost = kPanel * Staging::kPanelsAtOnce;
    const int rows = min(64, this->rows());
    const float* partials = partial(first_slot());
#pragma unroll 1
    for (int panel = 0; panel < panels(kDimV); panel += Staging::kPanelsAtOnce) {
      const int columns = kDimV % kMost == 0 ? kMost : min(kMost, kDimV - panel * kPanel), stride = columns / kFours,
                threads = stride / 4;
      if (!Config::kPartialOut) staging.acquire();
#pragma unroll 1
      for (int i = thread_idx() % 128; i < rows * threads; i += 128) {
        const int row = i / threads, column = i % threads * 4;
        float o[kFours][4] = {}, m, l;
        merge_columns<kFours, kAtOnce>(partials, row, panel * kPanel + column, stride, o, m, l);
        const float inverse = out.normalise(first_row() + row, m, l, panel + column == 0);
#pragma unroll
        for (int c = 0; c < kFours; ++c) {
#pragma unroll
          for (int x = 0; x < 4; ++x) o[c][x] *= inverse;
          const int at = column + c * stride;
          if (!Config::kPartialOut)
            st_shared(staging.buffer + chunk_offset(64, row, at / 8) + column % 8 * 2,
                      u32x2{pack2<T>(o[c][0], o[c][1]), pack2<T>(o[c][2], o[c][3])});
          else if (panel * kPanel + at < p.dim_v) out.store_o(first_row() + row, panel * kPanel + at, o[c]);
        }
      }
      if (!Config::kPartialOut) staging.send(map, box, panel, rows > 0);
      else sync_warpgroup(staging.consumer);  // the loop above is divergent, and ptxas must know where it ends
    }
  }
};

// Whether others have keys of a tile, too. Partial outputs take the same way in any case.
template <class Config> STROBE_DEVICE bool is_split(const Tile& tile) {
  return !Config::Keys::kPaged || Config::kPartialOut || warp_uniform(tile.part.count) > 1;
}
// The epilogue of a consumer's 64 rows: the partial result of this split and, by the last one, the merge. Returns
// whether the tile is complete and still to be stored, because this block has added up all splits.
template <class Config, class Params, class Staging, class O>
STROBE_DEVICE bool store_split(const Params& p, const Tile& tile, const Staging& staging, O& o, Softmax<>& softmax) {
  SplitKV<Config, Params, Staging> split{{p, tile, staging.consumer}, staging};
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

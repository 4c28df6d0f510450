// Split-KV: several blocks share the keys of a tile. Each stores its partial result, O, m and l, in memory and counts
// itself in; the last one merges all of them, always in the same order, so that the bits do not depend on who is last.
#pragma once
#include <strobe/pipeline/output_rows.cuh>
#include <strobe/pipeline/staging.cuh>
#include <strobe/tile/softmax.cuh>

namespace strobe {

template <class Config, class Params, class Staging> struct SplitKV {
  static constexpr int kDimV = Config::kDimV, kConsumers = Config::kConsumers;
  // One consumer's partial result: O, row by row, and behind it m and l of every row.
  static constexpr int kFloats = 64 * kDimV + 2 * 64, kSplitStride = kConsumers * kFloats;
  static_assert(kSplitStride == Config::kPartialFloats, "the workspace that Python asks for");

  const Params& p;
  const Tile& tile;
  const Staging& staging;  // of this consumer
  OutputRows<Config, Params> out{p, tile};

  // Results lie in slots. Splits of equal size have neighbours, parts of listed work every other slot behind the first.
  static constexpr bool kListed = Config::Keys::kPaged;
  static constexpr int kStep = kListed ? 2 * kSplitStride : kSplitStride;
  STROBE_DEVICE int tile_index() const { return quotient(tile.work, p.splits); }
  STROBE_DEVICE int splits() const { return kListed ? tile.part.count : p.splits; }
  STROBE_DEVICE int first_slot() const { return kListed ? tile.part.first_slot & ~1 : tile_index() * p.splits; }
  STROBE_DEVICE int my_slot() const {
    return kListed ? tile.work : tile_index() * p.splits + remainder(tile.work, p.splits);
  }
  // A tile that is not cut is not counted: others may count in its slot already.
  STROBE_DEVICE bool alone() const { return kListed && splits() == 1; }
  STROBE_DEVICE int ahead(int split) const {  // the first part may lie in the odd slot of its piece
    return kListed && split == 0 ? (tile.part.first_slot & 1) * kSplitStride : 0;
  }
  STROBE_DEVICE int first_row() const { return tile.row0 + 64 * staging.consumer; }
  STROBE_DEVICE float* partial(int slot) const {
    return p.partial + (i64(slot) * kConsumers + staging.consumer) * kFloats;
  }
  STROBE_DEVICE u32* counter() const {
    return p.counter + 1 + (kListed ? tile.part.first_slot : tile_index()) * kConsumers + staging.consumer;
  }

  // Stores this split's partial result and returns whether it was the last one.
  template <class O> STROBE_DEVICE bool store_partial(const O& o, const Softmax<>& softmax) const {
    const int tid = thread_idx() % 128, lane = tid % 32, rows = tile.q.length - first_row();
    float* mine = partial(my_slot());
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int eight = tid / 32 * 16 + 8 * r, row = eight + lane / 4;
      if (!warp_uniform(eight < rows)) continue;  // without this hint ptxas takes the rings for divergent from here on
      o.store_row(r, mine + row * kDimV + 2 * (lane % 4), kDimV);
      const float l = quad_sum(softmax.l[r]);
      if (lane % 4 == 0) st_global_x2(mine + 64 * kDimV + 2 * row, softmax.m[r], l);
    }
    const u32 splits_before = staging.buffer;
    staging.acquire();
    if (tid == 0) {
      fence_device();
      st_shared(splits_before, alone() ? 0 : atomic_inc_wrap(counter(), splits() - 1));
      fence_device();
    }
    sync_warpgroup(staging.consumer);
    const bool last = ld_shared(splits_before) == u32(splits() - 1);
    sync_warpgroup(staging.consumer);  // all have read it
    if (!last) fence_proxy_async();    // a bulk copy may write there next
    return last;
  }

  // Merges and stores the tile. A thread merges kPieces times four columns of a row, its neighbours the columns beside
  // them: merging is nothing but waiting for loads, so all threads take part, whosever rows they are.
  STROBE_DEVICE void merge(const TensorMap* map, const Box& box) const {
    constexpr int kMost = kPanel * Staging::kPanelsAtOnce;
    const int rows = min(64, tile.q.length - first_row());
    const float* partials = partial(first_slot());
#pragma unroll 1
    for (int panel = 0; panel < panels(kDimV); panel += Staging::kPanelsAtOnce) {
      const int columns = kDimV % kMost == 0 ? kMost : min(kMost, kDimV - panel * kPanel), stride = columns / kPieces,
                threads = stride / 4;
      if (!Config::kPartialOut) staging.acquire();
#pragma unroll 1
      for (int i = thread_idx() % 128; i < rows * threads; i += 128) {
        const int row = i / threads, column = i % threads * 4;
        float o[kPieces][4] = {}, m, l;
        merge_columns(partials, row, panel * kPanel + column, stride, o, m, l);
        float lse;
        const float inverse = normaliser<Config::kSinks>(l, m * p.scale_log2, out.sink(first_row() + row), lse);
        if (p.lse && panel + column == 0) out.store_lse(first_row() + row, lse);
#pragma unroll
        for (int c = 0; c < kPieces; ++c) {
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

 private:
  using T = typename Config::Element;
  static constexpr int kPieces = 4, kAtOnce = 4;  // splits that are read at once, since a load takes long

  // O, m and l of a row under the maximum of all splits, which moves on from splits to splits as it does from key block
  // to key block.
  STROBE_DEVICE void merge_columns(const float* partials, int row, int column, int stride, float (&o)[kPieces][4],
                                   float& m, float& l) const {
    const float *values = partials + row * kDimV + column, *statistics = partials + 64 * kDimV + 2 * row;
    m = neg_inf(), l = 0.f;
#pragma unroll 1
    for (int split = 0; split < splits(); split += kAtOnce) {
      float x[kAtOnce][kPieces][4], ml[kAtOnce][2], now = m;
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        const bool exists = split + j < splits();
        ld_global_l2(ml[j], statistics + j * kStep + ahead(split + j), exists);
        if (!exists) ml[j][0] = neg_inf();
#pragma unroll
        for (int c = 0; c < kPieces; ++c)
          ld_global_l2(x[j][c], values + j * kStep + ahead(split + j) + c * stride, exists);
      }
      statistics += kAtOnce * kStep, values += kAtOnce * kStep;
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) now = fmax(now, ml[j][0]);
      const float safe = now == neg_inf() ? 0.f : now, past = exp2_approx((m - safe) * p.scale_log2);
      m = now;
      l *= past;
#pragma unroll
      for (int c = 0; c < 4 * kPieces; ++c) o[c / 4][c % 4] *= past;
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        const float weight = exp2_approx((ml[j][0] - safe) * p.scale_log2);
        l = fma(ml[j][1], weight, l);
#pragma unroll
        for (int c = 0; c < 4 * kPieces; ++c) o[c / 4][c % 4] = fma(x[j][c / 4][c % 4], weight, o[c / 4][c % 4]);
      }
    }
  }
};

// Whether others have keys of a tile, too. Partial outputs take the same way in any case.
template <class Config> STROBE_DEVICE bool is_split(const Tile& tile) {
  return !Config::Keys::kPaged || Config::kPartialOut || warp_uniform(tile.part.count) > 1;
}
// The epilogue of a consumer's 64 rows: the partial result of this split and, by the last one, the merge.
template <class Config, class Params, class Staging, class O>
STROBE_DEVICE void store_split(const Params& p, const Tile& tile, const Staging& staging, const O& o,
                               const Softmax<>& softmax) {
  const SplitKV<Config, Params, Staging> split{p, tile, staging};
  if (split.store_partial(o, softmax)) split.merge(&p.map_o, box_of_consumer<Config>(tile, staging.consumer));
}

}  // namespace strobe

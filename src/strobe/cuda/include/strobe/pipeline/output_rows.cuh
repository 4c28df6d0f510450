// The rows of a forward tile on their way out: their heads, sinks, LSE and, for fp32 partial outputs, O.
//
// kMerge with p.merge: the result is merged with a state, which is O and LSE over other keys. The online softmax
// continues from that state: a row starts with m = LSE, l = 1 and its O, and the epilogue is the same. With kPartialOut
// the state's O lies where the merged O goes; without it, in a tensor of its own. The state of a row is read before the
// row is written: by the same warpgroup or, with split-KV, by the first split, which counts itself in before the last
// split writes.
#pragma once
#include <strobe/pipeline/schedule.cuh>
#include <strobe/tile/softmax.cuh>

namespace strobe {

// kMerge: the LSE of a state, if there is one, for a thread's two rows. It is loaded when a tile begins; `resume`,
// after the first scores, waits for it.
template <bool kMerge> struct State {
  float lse[2];
  bool pending = kMerge;
  template <class S, class Params> STROBE_DEVICE void resume(S& softmax, const Params& p) {
    if constexpr (kMerge) {
      if (!pending) return;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        softmax.m[r] = lse[r] * p.unscale;
        softmax.l[r] = lse[r] != neg_inf() && thread_idx() % 4 == 0 ? 1.f : 0.f;  // a quad adds its four up
      }
      pending = false;
    }
  }
};

template <class Config, class Params> struct OutputRows {
  const Params& p;
  const Tile& tile;

  STROBE_DEVICE int head(int row) const { return tile.head * Config::kPackGqa + row % Config::kPackGqa; }
  STROBE_DEVICE float sink(int row) const { return Config::kSinks ? ld_global(p.sinks + head(row)) : 0.f; }
  STROBE_DEVICE float* lse(int row) const {
    return p.lse + tile.q.slice * p.lse_batch + head(row) * p.lse_head + tile.q.first + row / Config::kPackGqa;
  }
  STROBE_DEVICE void store_lse(int row, float x) const { st_global(lse(row), x); }
  // Stores the LSE of `row` and `row + 8`, if one is wanted, and sets `inverse`, the factors of O.
  template <class S> STROBE_DEVICE void finish(const S& softmax, int row, float (&inverse)[2]) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float x;
      inverse[r] = softmax.template finish<Config::kSinks, Config::kInvariant>(r, sink(row + 8 * r), x);
      if (Config::kDropout) inverse[r] *= p.dropout_scale;
      if (p.lse && thread_idx() % 4 == 0 && row + 8 * r < tile.q.length) store_lse(row + 8 * r, x);
    }
  }
  // The factor of O of a row that has m and l, and its LSE.
  STROBE_DEVICE float normalise(int row, float m, float l, float& lse) const {
    const float top = Config::kInvariant ? mul_rn(m, p.scale_log2) : m * p.scale_log2;
    return normaliser<Config::kSinks, Config::kInvariant>(l, top, sink(row), lse);
  }
  // kPartialOut: O as fp32, for a merge with other partial results.
  STROBE_DEVICE float* o(int row) const {
    return tile.q.rows(reinterpret_cast<float*>(p.o), p.o_batch, p.o_head, p.o_row, head(row), row / Config::kPackGqa);
  }
  STROBE_DEVICE bool merges() const { return p.merge && (!Config::kSplit || remainder(tile.work, p.splits) == 0); }
  // The state, if there is one: its LSE, and how many columns of its O there are. A row that has seen no key
  // yet has the LSE -inf and an O that is finite, so that loads of O need not wait for the LSE.
  STROBE_DEVICE bool has_state(int row) const { return merges() && row < tile.q.length; }
  STROBE_DEVICE float state_lse(int row) const { return has_state(row) ? ld_global_l2(lse(row)) : neg_inf(); }
  STROBE_DEVICE int state_columns(int row) const { return has_state(row) ? p.dim_v : 0; }
  // Loads the LSE of `row` and `row + 8` and, with kLoadO, their O.
  template <bool kLoadO, class O> STROBE_DEVICE void load_state(O& fragment, float (&lse)[2], int row) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) lse[r] = state_lse(row + 8 * r);
    if constexpr (kLoadO)
#pragma unroll
      for (int r = 0; r < 2; ++r)  // no branch around this loop: ptxas would serialise the wgmmas
        fragment.load_row(r, o(row + 8 * r) + 2 * (thread_idx() % 4), state_columns(row + 8 * r));
  }
  STROBE_DEVICE void store_o(int row, int column, const float (&x)[4]) const {
    st_global(static_cast<void*>(o(row) + column), u32x4{as_bits(x[0]), as_bits(x[1]), as_bits(x[2]), as_bits(x[3])});
  }
};

}  // namespace strobe

// Where the rows of a forward tile go: their heads, sinks, LSE and, for fp32 partial outputs, O.
//
// kPartialOut with p.merge: what is there already is a result over other keys, and this one is merged into it. That is
// the online softmax going on where it had stopped: a row starts with m = LSE, l = 1 and its O, and the epilogue is the
// same. All that a row needs is read before any of it is written: by the same threads or, with split-KV, by the first
// split, which counts itself in before the last one writes.
#pragma once
#include <strobe/pipeline/schedule.cuh>
#include <strobe/tile/softmax.cuh>

namespace strobe {

template <class Config, class Params> struct OutputRows {
  const Params& p;
  const Tile& tile;

  STROBE_DEVICE int head(int row) const { return tile.head * Config::kPackGqa + row % Config::kPackGqa; }
  STROBE_DEVICE float sink(int row) const { return Config::kSinks ? ld_global(p.sinks + head(row)) : 0.f; }
  STROBE_DEVICE float* lse(int row) const {
    return p.lse + tile.slice * p.lse_batch + head(row) * p.lse_head + tile.first_row + row / Config::kPackGqa;
  }
  STROBE_DEVICE void store_lse(int row, float x) const { st_global(lse(row), x); }
  // kPartialOut: O as fp32, for a merge with other partial results.
  STROBE_DEVICE float* o(int row) const {
    return reinterpret_cast<float*>(p.o) + tile.slice * p.o_batch + head(row) * p.o_head +
           i64(tile.first_row + row / Config::kPackGqa) * p.o_row;
  }
  STROBE_DEVICE bool merges() const { return p.merge && (!Config::kSplit || remainder(tile.work, p.splits) == 0); }
  // m and l of the fragment's row r, which is `row`, as the earlier result has left them, and how many columns of its O
  // there are. A row that has seen no key yet has none, and nobody looks at what its O is.
  template <class S> STROBE_DEVICE int resume_row(S& softmax, int r, int row) const {
    const float earlier = merges() && row < tile.len_q ? ld_global_l2(lse(row)) : neg_inf();
    const bool seen = earlier != neg_inf();
    softmax.m[r] = seen ? earlier * kLog2e / p.scale_log2 : neg_inf();
    softmax.l[r] = seen && thread_idx() % 4 == 0 ? 1.f : 0.f;  // a quad adds its four up
    return seen ? p.dim_v : 0;
  }
  template <class O, class S> STROBE_DEVICE void resume(O& fragment, S& softmax, int row) const {  // and row + 8
#pragma unroll
    for (int r = 0; r < 2; ++r) {  // without a branch around it, for which ptxas would make wgmmas wait for one another
      const int columns = resume_row(softmax, r, row + 8 * r);
      fragment.load_row(r, o(row + 8 * r) + 2 * (thread_idx() % 4), columns);
    }
  }
  template <class O> STROBE_DEVICE void store_partial(const O& fragment, int row) const {  // and row + 8
#pragma unroll
    for (int r = 0; r < 2; ++r)
      if (row + 8 * r < tile.len_q) fragment.store_row(r, o(row + 8 * r) + 2 * (thread_idx() % 4), p.dim_v);
  }
  STROBE_DEVICE void store_o(int row, int column, const float (&x)[4]) const {
    st_global(static_cast<void*>(o(row) + column), u32x4{as_bits(x[0]), as_bits(x[1]), as_bits(x[2]), as_bits(x[3])});
  }
};

}  // namespace strobe

// Where the rows of a forward tile go: their heads, sinks, LSE and, for fp32 partial outputs, O.
#pragma once
#include <strobe/pipeline/schedule.cuh>

namespace strobe {

template <class Config, class Params> struct OutputRows {
  const Params& p;
  const Tile& tile;

  STROBE_DEVICE int head(int row) const { return tile.head * Config::kPackGqa + row % Config::kPackGqa; }
  STROBE_DEVICE float sink(int row) const { return Config::kSinks ? ld_global(p.sinks + head(row)) : 0.f; }
  STROBE_DEVICE void store_lse(int row, float lse) const {
    st_global(p.lse + tile.slice * p.lse_batch + head(row) * p.lse_head + tile.first_row + row / Config::kPackGqa, lse);
  }
  // kPartialOut: O as fp32, for a merge with other partial results.
  STROBE_DEVICE float* o(int row) const {
    return reinterpret_cast<float*>(p.o) + tile.slice * p.o_batch + head(row) * p.o_head +
           i64(tile.first_row + row / Config::kPackGqa) * p.o_row;
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

// The terms of fp32 tensors (tile/terms.cuh), once for all tiles that will read them: (slice, head, row, 3 * kColumns),
// zero beyond the head dim.
//
// A block of 256 threads takes kRows rows of one head of one tensor; blocks go through the tensors in turn.
#pragma once
#include <strobe/pipeline/rows.cuh>
#include <strobe/tile/terms.cuh>

namespace strobe {

// One of the tensors.
struct Splittable {
  const float* from;
  i64 slice_stride, head_stride, row_stride;
  bf16* to;
  int heads, rows, dim;
};

template <class Config, class Params> struct SplitTerms {
  static constexpr int kRows = Config::kRows, kColumns = Config::kColumns, kChunks = kColumns / 8,
                       kRowsAtOnce = 256 / kChunks;
  const Params& p;

  STROBE_DEVICE int blocks_of(const Splittable& t) const {
    return p.batch * t.heads * quotient(t.rows + kRows - 1, kRows);
  }

  STROBE_DEVICE static void chunk(const float* from, bf16* to, int left) {
    float x[8] = {};
    if (left > 0) {
      const u32x4 a = ld_global_x4(from), b = ld_global_x4(from + 4);
      const u32 bits[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
      for (int i = 0; i < 8; ++i) x[i] = as_float(bits[i]);
    }
    const SplitChunk terms(x);
#pragma unroll
    for (int term = 0; term < kTerms; ++term) {
      const u32(&part)[4] = terms.packed[term];
      st_global(to + term * kColumns, u32x4{part[0], part[1], part[2], part[3]});
    }
  }

  STROBE_DEVICE void split(const Splittable& t, int index) const {
    const int per_head = quotient(t.rows + kRows - 1, kRows), head_of_all = quotient(index, per_head),
              slice = quotient(head_of_all, t.heads), head = head_of_all - slice * t.heads;
    const int first = (index - head_of_all * per_head) * kRows, column = 8 * (thread_idx() % kChunks);
    const float* const from = t.from + slice * t.slice_stride + head * t.head_stride + column;
    bf16* const to = t.to + i64(head_of_all) * t.rows * (kTerms * kColumns) + column;
#pragma unroll
    for (int i = 0; i < kRows; i += kRowsAtOnce) {
      const int row = first + i + thread_idx() / kChunks;
      if (row < t.rows) chunk(from + row * t.row_stride, to + i64(row) * (kTerms * kColumns), t.dim - column);
    }
  }

  STROBE_DEVICE void run() const {
    int index = block_idx();
    const Splittable q{p.q, p.q_batch, p.q_head, p.q_row, p.q_terms, p.heads, p.len_q, p.dim},
        k{p.k, p.k_batch, p.k_head, p.k_row, p.k_terms, p.heads_k, p.len_k, p.dim},
        v{p.v, p.v_batch, p.v_head, p.v_row, p.v_terms, p.heads_k, p.len_k, p.dim_v};
    if (index < blocks_of(q)) return split(q, index);
    index -= blocks_of(q);
    if (index < blocks_of(k)) return split(k, index);
    index -= blocks_of(k);
    if (index < blocks_of(v)) return split(v, index);
    index -= blocks_of(v);
    if constexpr (Config::kGradients)
      split(Splittable{p.d_o, p.do_batch, p.do_head, p.do_row, p.d_o_terms, p.heads, p.len_q, p.dim_v}, index);
  }
};

template <class Config, class Params> STROBE_DEVICE void split_terms(const Params& p) {
  launch_dependents();
  SplitTerms<Config, Params>{p}.run();
}

}  // namespace strobe

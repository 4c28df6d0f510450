// Merges partial results over different keys, in order, as `strobe.merging` does. Each step weighs the result so far
// against the next part by a sigmoid of the difference of their LSEs.
//
// A thread has 8 numbers of one head of a row and computes the weights of that row itself.
#pragma once
#include <strobe/tile/chunk.cuh>
#include <strobe/tile/functions.cuh>

namespace strobe {

// log(exp(a) + exp(b)). Equal infinities must not be subtracted from one another; NaN gives NaN.
STROBE_DEVICE float log_add_exp(float a, float b) {
  const float apart = fabs(a - b);
  return a == b && apart != 0.f ? a : fmax(a, b) + log_fast(1.f + exp_fast(-apart));
}
// a if weight is 0, b if it is 1. It starts from the nearer of the two, so it is as exact as torch.lerp.
STROBE_DEVICE float lerp(float a, float b, float weight) {
  return weight < 0.5f ? fma(weight, b - a, a) : fma(weight - 1.f, b - a, b);
}

template <class Config, class Params> STROBE_DEVICE void merge(const Params& p) {
  constexpr int kParts = Config::kParts;
  const u32 index = block_idx() * Config::kThreads + thread_idx();
  const int chunks = p.dim / 8, head_row = int(index / u32(chunks)), column = 8 * int(index - head_row * chunks);
  const int row = head_row / p.heads, head = head_row - row * p.heads;
  if (row >= p.new_rows) return;
  const int outer = row / p.inner_rows, inner = row - outer * p.inner_rows;
  const auto offset = [&](const i64* strides) { return outer * strides[0] + inner * strides[1] + head * strides[2]; };

  const decltype(p.part0) parts[] = {p.part0, p.part1, p.part2, p.part3, p.part4, p.part5, p.part6, p.part7};
  const float* const lses[] = {p.part_lse0, p.part_lse1, p.part_lse2, p.part_lse3,
                               p.part_lse4, p.part_lse5, p.part_lse6, p.part_lse7};
  float part_lse[kParts], part[kParts][8];
#pragma unroll
  for (int i = 0; i < kParts; ++i) {
    part_lse[i] = ld_global(lses[i] + offset(p.part_lse_strides + 3 * i));
    load_chunk(part[i], parts[i] + offset(p.part_strides + 3 * i) + column);
    // Nobody may have written the rows of a part that saw no key, and weight 0 times NaN would be NaN.
#pragma unroll
    for (int j = 0; j < 8; ++j) part[i][j] = part_lse[i] == neg_inf() ? 0.f : part[i][j];
  }
  float (&o)[8] = part[0];
  float lse = part_lse[0];
#pragma unroll
  for (int i = 1; i < kParts; ++i) {
    const float weight = part_lse[i] == neg_inf() ? 0.f : sigmoid_fast(part_lse[i] - lse);
#pragma unroll
    for (int j = 0; j < 8; ++j) o[j] = lerp(o[j], part[i][j], weight);
    lse = log_add_exp(lse, part_lse[i]);
  }
  if constexpr (Config::kSinks) {
    const float total = log_add_exp(lse, load_number(p.sinks + head));
    const float kept = lse == neg_inf() ? 0.f : exp_fast(lse - total);
#pragma unroll
    for (int j = 0; j < 8; ++j) o[j] *= kept;
    lse = total;
  }
  store_chunk(p.o + offset(p.out_strides) + column, o);
  if (column == 0) st_global(p.lse + offset(p.lse_strides), lse);
}

}  // namespace strobe

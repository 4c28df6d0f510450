// 01  Standard attention: three kernels
//
// What changed: nothing yet. S = Q K^T, P = softmax(S), O = P V: a kernel each, a thread for each number of the
//   result, fp32, straight from memory. S and P are N x N, and travel to memory and back: four trips.
// Why it should help: it does not. It is what the formula says, and the thing to beat.
// Predicted: x 1 by definition. One multiplication for two loads: about 1 TFLOP/s where the scalar units could do
//   60.
// Measured: 0.875 TFLOP/s (NVIDIA H200; docs/ladder.md says how)
// What limits it now: loads. Each number of Q and K is fetched N times; caches answer most of them, but the load
//   units are the ceiling.
#include "ladder.cuh"

namespace strobe {

constexpr int kThreads = 256;
static_assert(kSmem == 0, "the shared memory that Python asks for");

STROBE_DEVICE i64 my_number() { return i64(block_idx()) * kThreads + thread_idx(); }

// One thread per score.
STROBE_DEVICE void scores(const Params& p) {
  const i64 row = my_number() / p.len_k;  // of all slices together
  const int key = my_number() % p.len_k, query = row % p.len_q;
  if (row >= i64(p.slices) * p.len_q) return;
  const float* q = p.q + row * kDim;
  const float* k = p.k + (row / p.len_q * p.len_k + key) * kDim;
  float sum = 0.f;
  for (int i = 0; i < kDim; ++i) sum = fma(ld_global(q + i), ld_global(k + i), sum);
  st_global(p.workspace + my_number(), key < visible_keys(p, query) ? sum * p.scale : neg_inf());
}

// One thread per row; P takes the place of S.
STROBE_DEVICE void softmax(const Params& p) {
  const i64 row = my_number();
  if (row >= i64(p.slices) * p.len_q) return;
  float* s = p.workspace + row * p.len_k;
  float m = neg_inf(), l = 0.f;
  for (int key = 0; key < p.len_k; ++key) m = fmax(m, ld_global_fresh(s + key));
  const float safe = m == neg_inf() ? 0.f : m;  // the row sees nothing
  for (int key = 0; key < p.len_k; ++key) l += exp_natural(ld_global_fresh(s + key) - safe);
  const float inverse = l > 0.f ? 1.f / l : 0.f;
  for (int key = 0; key < p.len_k; ++key) st_global(s + key, exp_natural(ld_global_fresh(s + key) - safe) * inverse);
  st_global(p.lse + row, l > 0.f ? m + log_natural(l) : neg_inf());
}

// One thread per number of the output.
STROBE_DEVICE void values(const Params& p) {
  const i64 row = my_number() / kDim;
  const int column = my_number() % kDim;
  if (row >= i64(p.slices) * p.len_q) return;
  const float* weights = p.workspace + row * p.len_k;
  const float* v = p.v + row / p.len_q * p.len_k * kDim + column;
  float sum = 0.f;
  for (int key = 0; key < p.len_k; ++key) sum = fma(ld_global(weights + key), ld_global(v + i64(key) * kDim), sum);
  st_global(p.o + row * kDim + column, sum);
}

}  // namespace strobe

// The three are launched one after the other.
STROBE_KERNEL(strobe::kThreads, 1) kernel(STROBE_GRID_CONSTANT strobe::Params p) {
  if (p.stage == 0) strobe::scores(p);
  if (p.stage == 1) strobe::softmax(p);
  if (p.stage == 2) strobe::values(p);
}

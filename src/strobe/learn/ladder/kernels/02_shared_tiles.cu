// 02  Standard attention with tiles in shared memory
//
// What changed: a block of 16 x 16 threads computes a 16 x 16 tile of the result. It brings 16 x 16 tiles of both
//   factors into shared memory together, and each number that was fetched serves 16 threads. The softmax has a warp
//   for each row, so that neighbours read neighbours.
// Why it should help: 16 times fewer reads of memory and caches in the products; the softmax reads whole lines.
// Predicted: x 2 the speed of 01. Not 16: there are still two loads for each multiplication, only from a nearer
//   place.
// Measured: x 5.85, 5.12 TFLOP/s (NVIDIA H200; docs/ladder.md says how)
// What limits it now: shared-memory loads, and the N x N matrix, which is written twice and read four times.
#include "ladder.cuh"

namespace strobe {

constexpr int kThreads = 256, kSide = 16;
typedef SharedTile<kSide> Square;
static_assert(kSmem == 2 * Square::bytes(kSide), "the shared memory that Python asks for");

// The 16 x 16 tile of the result that this block owns.
struct Corner {
  int slice, row, column;
};
STROBE_DEVICE Corner corner(const Params& p, int columns) {
  const int across = (columns + kSide - 1) / kSide, down = (p.len_q + kSide - 1) / kSide;
  const int tile = block_idx() % (across * down);
  return Corner{int(block_idx()) / (across * down), tile / across * kSide, tile % across * kSide};
}

// One number of a product, its sum taken tile by tile; left(row, i) and right(i, column) fetch the factors.
template <class Left, class Right> STROBE_DEVICE float tiled_dot(int depth, Left left, Right right) {
  const Square a{smem_base()}, b{smem_base() + Square::bytes(kSide)};
  const int row = thread_idx() / kSide, column = thread_idx() % kSide;
  float sum = 0.f;
  for (int start = 0; start < depth; start += kSide) {
    a.set(row, column, start + column < depth ? left(row, start + column) : 0.f);
    b.set(row, column, start + row < depth ? right(start + row, column) : 0.f);
    sync_block();  // the tiles are complete
    for (int i = 0; i < kSide; ++i) sum = fma(a.get(row, i), b.get(i, column), sum);
    sync_block();  // nobody reads them any more
  }
  return sum;
}

STROBE_DEVICE void scores(const Params& p) {
  const Corner at = corner(p, p.len_k);
  const int query = at.row + thread_idx() / kSide, key = at.column + thread_idx() % kSide;
  const float* q = p.q + i64(at.slice) * p.len_q * kDim;
  const float* k = p.k + i64(at.slice) * p.len_k * kDim;
  const float sum = tiled_dot(
      kDim, [&](int r, int i) { return at.row + r < p.len_q ? ld_global(q + i64(at.row + r) * kDim + i) : 0.f; },
      [&](int i, int c) { return at.column + c < p.len_k ? ld_global(k + i64(at.column + c) * kDim + i) : 0.f; });
  if (query >= p.len_q || key >= p.len_k) return;
  st_global(p.workspace + (i64(at.slice) * p.len_q + query) * p.len_k + key,
            key < visible_keys(p, query) ? sum * p.scale : neg_inf());
}

// One warp per row; P takes the place of S.
STROBE_DEVICE void softmax(const Params& p) {
  const i64 row = i64(block_idx()) * (kThreads / 32) + thread_idx() / 32;
  const int lane = thread_idx() % 32;
  if (row >= i64(p.slices) * p.len_q) return;
  float* s = p.workspace + row * p.len_k;
  float m = neg_inf(), l = 0.f;
  for (int key = lane; key < p.len_k; key += 32) m = fmax(m, ld_global_fresh(s + key));
  m = row_max(fmax(m, shfl_xor(m, 16)));
  const float safe = m == neg_inf() ? 0.f : m;  // the row sees nothing
  for (int key = lane; key < p.len_k; key += 32) l += exp_natural(ld_global_fresh(s + key) - safe);
  l = row_sum(l + shfl_xor(l, 16));
  const float inverse = l > 0.f ? 1.f / l : 0.f;
  for (int key = lane; key < p.len_k; key += 32)
    st_global(s + key, exp_natural(ld_global_fresh(s + key) - safe) * inverse);
  if (lane == 0) st_global(p.lse + row, l > 0.f ? m + log_natural(l) : neg_inf());
}

STROBE_DEVICE void values(const Params& p) {
  const Corner at = corner(p, kDim);
  const int query = at.row + thread_idx() / kSide, column = at.column + thread_idx() % kSide;
  const float* weights = p.workspace + i64(at.slice) * p.len_q * p.len_k;
  const float* v = p.v + i64(at.slice) * p.len_k * kDim;
  const float sum = tiled_dot(
      p.len_k,
      [&](int r, int i) { return at.row + r < p.len_q ? ld_global(weights + i64(at.row + r) * p.len_k + i) : 0.f; },
      [&](int i, int c) { return ld_global(v + i64(i) * kDim + at.column + c); });
  if (query < p.len_q) st_global(p.o + (i64(at.slice) * p.len_q + query) * kDim + column, sum);
}

}  // namespace strobe

// The three are launched one after the other.
STROBE_KERNEL(strobe::kThreads, 1) kernel(STROBE_GRID_CONSTANT strobe::Params p) {
  if (p.stage == 0) strobe::scores(p);
  if (p.stage == 1) strobe::softmax(p);
  if (p.stage == 2) strobe::values(p);
}

// b0  The standard backward: P and dS in memory
//
// What changed: the other direction. The output was O = P V with P = softmax(S), S = scale Q K^T. Given dO, the chain
//   rule asks for five products: S = Q K^T, dP = dO V^T, dV = P^T dO, dQ = dS K, dK = dS^T Q. Between them stands the
//   derivative of the softmax, row by row: dS = P (dP - rowsum(P dP)). Each step is a kernel, made of 02's tiles.
// Why it should help: it does not. It is what automatic differentiation of 02 does, and the thing to beat: P and dS are
//   N x N. A standard forward pass would have kept P; here the first kernel writes it, from the LSE, so that all rungs
//   start from the same inputs.
// Predicted: x 1 the speed of 02 for equal work: the same loop over 16 x 16 tiles, five products instead of two.
// Measured: x 1.12, 5.71 TFLOP/s (NVIDIA H200; docs/ladder.md says how)
// What limits it now: shared-memory loads, as in 02, and memory that grows with the square of N: P and dS of 16 heads
//   and 4096 tokens take 2 GiB.
#include "ladder.cuh"

namespace strobe {

constexpr int kThreads = 256, kSide = 16;
typedef SharedTile<kSide> Square;
static_assert(kSmem == 2 * Square::bytes(kSide), "the shared memory that Python asks for");

// The 16 x 16 tile of the result that this block owns.
struct Corner {
  int slice, row, column;
};
STROBE_DEVICE Corner corner(int rows, int columns) {
  const int across = (columns + kSide - 1) / kSide, down = (rows + kSide - 1) / kSide;
  const int tile = block_idx() % (across * down);
  return Corner{int(block_idx()) / (across * down), tile / across * kSide, tile % across * kSide};
}

// A matrix of one slice in memory. Beyond its edges there are zeros.
struct Matrix {
  const float* slices;
  int rows, columns;
  STROBE_DEVICE float get(int slice, int row, int column) const {
    const i64 at = (i64(slice) * rows + row) * columns + column;
    return row < rows && column < columns ? ld_global(slices + at) : 0.f;
  }
};

// This thread's number of A B, of A^T B or of A B^T, summed over `depth` tile by tile. Neighbouring threads read
// neighbours in memory, transposed or not: the tile is turned on its way into shared memory.
template <bool kTransposeA, bool kTransposeB>
STROBE_DEVICE float product(const Matrix& a, const Matrix& b, const Corner& at, int depth) {
  const Square a_tile{smem_base()}, b_tile{smem_base() + Square::bytes(kSide)};
  const int y = thread_idx() / kSide, x = thread_idx() % kSide;
  float sum = 0.f;
  for (int start = 0; start < depth; start += kSide) {
    if (kTransposeA) a_tile.set(x, y, a.get(at.slice, start + y, at.row + x));
    else a_tile.set(y, x, a.get(at.slice, at.row + y, start + x));
    if (kTransposeB) b_tile.set(x, y, b.get(at.slice, at.column + y, start + x));
    else b_tile.set(y, x, b.get(at.slice, start + y, at.column + x));
    sync_block();  // the tiles are complete
    for (int i = 0; i < kSide; ++i) sum = fma(a_tile.get(y, i), b_tile.get(i, x), sum);
    sync_block();  // nobody reads them any more
  }
  return sum;
}

STROBE_DEVICE void store(float* slices, int rows, int columns, const Corner& at, float x) {
  const int row = at.row + thread_idx() / kSide, column = at.column + thread_idx() % kSide;
  if (row < rows && column < columns) st_global(slices + (i64(at.slice) * rows + row) * columns + column, x);
}

// Products 1 and 2, for each pair of a query and a key: P = exp(scale Q K^T - LSE) and dP = dO V^T.
STROBE_DEVICE void weights(const Params& p, float* to) {
  const Corner at = corner(p.len_q, p.len_k);
  const int query = at.row + thread_idx() / kSide, key = at.column + thread_idx() % kSide;
  const float s = product<false, true>({p.q, p.len_q, kDim}, {p.k, p.len_k, kDim}, at, kDim) * p.scale;
  const bool visible = query < p.len_q && key < visible_keys(p, query);
  store(to, p.len_q, p.len_k, at, visible ? exp_natural(s - ld_global(p.lse + i64(at.slice) * p.len_q + query)) : 0.f);
}
STROBE_DEVICE void weight_gradients(const Params& p, float* to) {
  const Corner at = corner(p.len_q, p.len_k);
  store(to, p.len_q, p.len_k, at, product<false, true>({p.d_o, p.len_q, kDim}, {p.v, p.len_k, kDim}, at, kDim));
}

// One warp per row: the derivative of the softmax. dS takes the place of dP.
STROBE_DEVICE void score_gradients(const Params& p, const float* weights, float* dp) {
  const i64 row = i64(block_idx()) * (kThreads / 32) + thread_idx() / 32;
  if (row >= i64(p.slices) * p.len_q) return;
  const i64 first = row * p.len_k, end = first + p.len_k;
  float sum = 0.f;
  for (i64 i = first + thread_idx() % 32; i < end; i += 32)
    sum = fma(ld_global(weights + i), ld_global_fresh(dp + i), sum);
  sum = row_sum(sum + shfl_xor(sum, 16));
  for (i64 i = first + thread_idx() % 32; i < end; i += 32)
    st_global(dp + i, ld_global(weights + i) * (ld_global_fresh(dp + i) - sum));
}

// Products 3, 4 and 5, for each number of a gradient: dV = P^T dO, dQ = scale dS K, dK = scale dS^T Q.
STROBE_DEVICE void gradient_v(const Params& p, const Matrix& weights) {
  const Corner at = corner(p.len_k, kDim);
  store(p.dv, p.len_k, kDim, at, product<true, false>(weights, {p.d_o, p.len_q, kDim}, at, p.len_q));
}
STROBE_DEVICE void gradient_q(const Params& p, const Matrix& ds) {
  const Corner at = corner(p.len_q, kDim);
  store(p.dq, p.len_q, kDim, at, product<false, false>(ds, {p.k, p.len_k, kDim}, at, p.len_k) * p.scale);
}
STROBE_DEVICE void gradient_k(const Params& p, const Matrix& ds) {
  const Corner at = corner(p.len_k, kDim);
  store(p.dk, p.len_k, kDim, at, product<true, false>(ds, {p.q, p.len_q, kDim}, at, p.len_q) * p.scale);
}

}  // namespace strobe

// The six are launched one after the other.
STROBE_KERNEL(strobe::kThreads, 1) kernel(STROBE_GRID_CONSTANT strobe::Params p) {
  float *weights = p.workspace, *ds = p.workspace + i64(p.slices) * p.len_q * p.len_k;
  if (p.stage == 0) strobe::weights(p, weights);
  if (p.stage == 1) strobe::weight_gradients(p, ds);
  if (p.stage == 2) strobe::score_gradients(p, weights, ds);
  if (p.stage == 3) strobe::gradient_v(p, {weights, p.len_q, p.len_k});
  if (p.stage == 4) strobe::gradient_q(p, {ds, p.len_q, p.len_k});
  if (p.stage == 5) strobe::gradient_k(p, {ds, p.len_q, p.len_k});
}

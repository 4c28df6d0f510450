// Standard attention as three kernels, each as one would first write it: fp32 arithmetic, 16 x 16 tiles in shared
// memory, one thread per number of the result. Between them the matrices of scores and of weights, N x N each in fp32,
// travel to memory and back:
//     S = scale * Q K^T  ->  memory  ->  P = softmax(S)  ->  memory  ->  O = P V
// It is here to be measured against, not to be used.
#pragma once
#include <strobe/ptx/math.cuh>
#include <strobe/ptx/memory.cuh>
#include <strobe/ptx/warp.cuh>
#include <strobe/tile/softmax.cuh>

namespace strobe {

constexpr int kSide = 16;  // of a tile; a block has kSide * kSide threads

// Elements as they lie in memory.
template <class T> struct Stored {
  typedef u16 type;
  STROBE_DEVICE static float load(const u16* p) { return to_float<T>(ld_global(p)); }
  STROBE_DEVICE static void store(u16* p, float x) { st_global(p, u16(pack2<T>(x, 0.f) & 0xffffu)); }
};
template <> struct Stored<float> {
  typedef float type;
  STROBE_DEVICE static float load(const float* p) { return ld_global(p); }
  STROBE_DEVICE static void store(float* p, float x) { st_global(p, x); }
};

// Which head and which 16 x 16 tile of its result a block owns.
struct Corner {
  int batch, head, row, column;
};
template <class Params> STROBE_DEVICE Corner corner(const Params& p, int rows, int columns) {
  const int across = (columns + kSide - 1) / kSide, down = (rows + kSide - 1) / kSide;
  u32 i = block_idx();
  const int column = i % across;
  i /= across;
  const int row = i % down, slice = i / down;
  return Corner{slice / p.heads, slice % p.heads, row * kSide, column * kSide};
}

STROBE_DEVICE u32 cell(int tile, int row, int column) {
  return smem_base() + ((tile * kSide + row) * (kSide + 1) + column) * 4;
}

// One number of a product: the sum over `depth`, a tile at a time. `left(row, i)` and `right(i, column)` give the
// factors.
template <class Left, class Right>
STROBE_DEVICE float tiled_dot(int depth, int row, int column, Left left, Right right) {
  float sum = 0.f;
  for (int start = 0; start < depth; start += kSide) {
    st_shared(cell(0, row, column), start + column < depth ? left(row, start + column) : 0.f);
    st_shared(cell(1, row, column), start + row < depth ? right(start + row, column) : 0.f);
    sync_block();
    for (int i = 0; i < kSide; ++i) sum = fma(ld_shared_f32(cell(0, row, i)), ld_shared_f32(cell(1, i, column)), sum);
    sync_block();
  }
  return sum;
}

template <class Config, class Mask, class Params> STROBE_DEVICE void standard_naive_scores(const Params& p) {
  typedef Stored<typename Config::Element> Element;
  const Corner at = corner(p, p.len_q, p.stride_s);
  const int row = thread_idx() / kSide, column = thread_idx() % kSide;
  const typename Element::type* q = p.q + at.batch * p.q_batch + at.head * p.q_head;
  const typename Element::type* k = p.k + at.batch * p.k_batch + (at.head / p.group) * p.k_head;
  const float dot = tiled_dot(
      p.dim, row, column,
      [&](int r, int i) { return at.row + r < p.len_q ? Element::load(q + i64(at.row + r) * p.q_row + i) : 0.f; },
      [&](int i, int c) {
        return at.column + c < p.len_k ? Element::load(k + i64(at.column + c) * p.k_row + i) : 0.f;
      });
  const int query = at.row + row, key = at.column + column;
  if (query >= p.len_q || key >= p.stride_s) return;
  const Mask mask{p.len_q, p.len_k, p.mask};
  const bool visible = key < p.len_k && mask.lo(query) <= key && key < mask.hi(query);
  st_global(p.s + (i64(at.batch * p.heads + at.head) * p.len_q + query) * p.stride_s + key,
            visible ? dot * p.scale : neg_inf());
}

// One block per row.
template <class Config, class Mask, class Params> STROBE_DEVICE void standard_naive_softmax(const Params& p) {
  constexpr int kThreads = kSide * kSide;
  const float* s = p.s + i64(block_idx()) * p.stride_s;
  float* weights = p.p + i64(block_idx()) * p.stride_s;
  const int thread = thread_idx();
  float top = neg_inf();
  for (int i = thread; i < p.len_k; i += kThreads) top = fmax(top, ld_global(s + i));
  for (int reach = 16; reach; reach /= 2) top = fmax(top, shfl_xor(top, reach));
  if (thread % 32 == 0) st_shared(smem_base() + thread / 32 * 4, top);
  sync_block();
  for (int i = 0; i < kThreads / 32; ++i) top = fmax(top, ld_shared_f32(smem_base() + i * 4));
  if (top == neg_inf()) top = 0.f;  // the row sees nothing
  sync_block();
  float sum = 0.f;
  for (int i = thread; i < p.len_k; i += kThreads) sum += exp2_approx((ld_global(s + i) - top) * kLog2e);
  for (int reach = 16; reach; reach /= 2) sum += shfl_xor(sum, reach);
  if (thread % 32 == 0) st_shared(smem_base() + thread / 32 * 4, sum);
  sync_block();
  sum = 0.f;
  for (int i = 0; i < kThreads / 32; ++i) sum += ld_shared_f32(smem_base() + i * 4);
  const float inverse = sum > 0.f ? 1.f / sum : 0.f;
  for (int i = thread; i < p.len_k; i += kThreads)
    st_global(weights + i, exp2_approx((ld_global(s + i) - top) * kLog2e) * inverse);
}

template <class Config, class Mask, class Params> STROBE_DEVICE void standard_naive_values(const Params& p) {
  typedef Stored<typename Config::Element> Element;
  const Corner at = corner(p, p.len_q, p.dim_v);
  const int row = thread_idx() / kSide, column = thread_idx() % kSide;
  const float* weights = p.p + i64(at.batch * p.heads + at.head) * p.len_q * p.stride_s;
  const typename Element::type* v = p.v + at.batch * p.v_batch + (at.head / p.group) * p.v_head;
  const float dot = tiled_dot(
      p.len_k, row, column,
      [&](int r, int i) { return at.row + r < p.len_q ? ld_global(weights + i64(at.row + r) * p.stride_s + i) : 0.f; },
      [&](int i, int c) {
        return at.column + c < p.dim_v ? Element::load(v + i64(i) * p.v_row + at.column + c) : 0.f;
      });
  if (at.row + row < p.len_q && at.column + column < p.dim_v)
    Element::store(p.o + at.batch * p.o_batch + at.head * p.o_head + i64(at.row + row) * p.o_row + at.column + column,
                   dot);
}

}  // namespace strobe

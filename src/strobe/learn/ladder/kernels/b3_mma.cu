// b3  The matrix units
//
// What changed: all five products run on mma.sync, with what 06 to 09 have taught: bf16, swizzled tiles, cp.async
//   into two buffers, ldmatrix. The scores are transposed: S^T = K Q^T, its rows are keys. A warp owns 16 of the
//   block's 64 keys, and then P^T and dS^T are already in registers as the left operands of dV += P^T dO and
//   dK += dS^T Q, as P was in 09. Only dQ = dS K sums over the keys of all warps: for it, dS goes through shared
//   memory. dQ is summed up in fp32 in the workspace, and a last kernel rounds it to bf16.
// Why it should help: 09 is 9 times as fast as 05, and this is the same change. Twice as many keys a block halve the
//   atomic sums.
// Predicted: x 7 the speed of b2. Not 9: a warp's atomic sum touches 8 rows of dQ, in pieces of 32 bytes.
// Measured: x 7.54, 131 TFLOP/s (NVIDIA H200; docs/ladder.md says how)
// What limits it now: the atomic sums, one instruction for each number of dQ and 64 keys; and all that limits 09, which
//   is mma.sync itself.
#include <strobe/ptx/atomic.cuh>
#include "ladder.cuh"

namespace strobe {

constexpr int kThreads = 128, kRows = 32, kKeys = 64;  // four warps: 16 keys each; of dQ 16 rows, half of the columns
// A thread has what mma gives it: two rows, 8 apart, and of every 8 columns two neighbours.
STROBE_DEVICE int my_row(int a) { return thread_idx() % 32 / 4 + 8 * a; }
STROBE_DEVICE int my_column(int b) { return 2 * (thread_idx() % 4) + b / 2 * 8 + b % 2; }
// Read anew wherever it is used: else the compiler keeps all addresses that follow from it in registers, and they do
// not fit beside dK and dV.
STROBE_DEVICE int lane() { return thread_idx_again() % 32; }
// A thread's part of kColumns columns of the warp's result.
template <int kColumns> struct Sums {
  float x[2][kColumns / 4] = {};
};

// A tile of bf16 numbers in shared memory, row by row; the 16-byte chunks (8 columns) of a row are permuted by the row.
template <int kColumns> struct HalfTile {
  STROBE_DEVICE static constexpr int bytes(int rows) { return rows * kColumns * 2; }
  u32 base;
  STROBE_DEVICE u32 at(int row, int column) const {
    return base + (row * kColumns + ((column / 8) ^ (row & 7)) * 8 + column % 8) * 2;
  }
  // Rows [first, first + rows) of a matrix of `length` rows; what lies beyond is zero.
  STROBE_DEVICE void load_async(const u16* matrix, int first, int rows, int length, int threads) const {
    for (int i = thread_idx_again(); i < rows * kColumns / 8; i += threads) {
      const int row = i / (kColumns / 8), column = i % (kColumns / 8) * 8;
      const bool there = first + row < length;
      cp_async_16(at(row, column), there ? matrix + i64(first + row) * kColumns + column : matrix, there);
    }
  }
};
typedef HalfTile<kDim> Tile;   // of K, V, Q or dO
typedef HalfTile<64> Weights;  // dS^T in the left half: the swizzle wants rows of eight chunks
constexpr int kStages = 2, kOffsetV = Tile::bytes(kKeys), kOffsetQ = kOffsetV + Tile::bytes(kKeys);
constexpr int kOffsetDo = kOffsetQ + kStages * Tile::bytes(kRows), kOffsetDs = kOffsetDo + kStages * Tile::bytes(kRows);
static_assert(kSmem == kOffsetDs + Weights::bytes(kKeys), "the shared memory that Python asks for");

// 16 x 16 numbers of an operand, as mma wants them. left_rows and right_rows: the product sums along the rows of the
// tile; left_columns and right_columns: along its columns, and ldmatrix transposes.
template <class T> STROBE_DEVICE void left_rows(u32 (&x)[4], const T& tile, int row, int i) {
  ldmatrix_x4(tile.at(row + lane() % 16, i + lane() / 16 * 8), x[0], x[1], x[2], x[3]);
}
template <class T> STROBE_DEVICE void left_columns(u32 (&x)[4], const T& tile, int column, int i) {
  ldmatrix_x4_trans(tile.at(i + lane() % 8 + lane() / 16 * 8, column + lane() / 8 % 2 * 8), x[0], x[1], x[2], x[3]);
}
template <class T> STROBE_DEVICE void right_rows(u32 (&x)[4], const T& tile, int row, int i) {
  ldmatrix_x4(tile.at(row + lane() % 8 + lane() / 16 * 8, i + lane() / 8 % 2 * 8), x[0], x[1], x[2], x[3]);
}
template <class T> STROBE_DEVICE void right_columns(u32 (&x)[4], const T& tile, int column, int i) {
  ldmatrix_x4_trans(tile.at(i + lane() % 16, column + lane() / 16 * 8), x[0], x[1], x[2], x[3]);
}

// D += A B: the warp's 16 rows, kColumns columns, a sum over kDepth. left(a, i) and right(b, n, i) fetch the operands.
template <int kDepth, int kColumns, class Left, class Right>
STROBE_DEVICE void multiply(Sums<kColumns>& d, Left left, Right right) {
#pragma unroll
  for (int i = 0; i < kDepth; i += 16) {
    u32 a[4], b[4];
    left(a, i);
#pragma unroll
    for (int n = 0; n < kColumns; n += 16) {
      float *d0 = d.x[0] + n / 4, *d1 = d.x[1] + n / 4;
      right(b, n, i);
      mma_m16n8k16<bf16>(d0[0], d0[1], d1[0], d1[1], a[0], a[1], a[2], a[3], b[0], b[1]);
      mma_m16n8k16<bf16>(d0[2], d0[3], d1[2], d1[3], a[0], a[1], a[2], a[3], b[2], b[3]);
    }
  }
}

// Four neighbouring scores of both rows are, once packed, the left operand of the next product.
template <int kColumns> STROBE_DEVICE void pack(u32 (&a)[4], const Sums<kColumns>& s, int i) {
  const float *s0 = s.x[0] + i / 4, *s1 = s.x[1] + i / 4;
  a[0] = pack2<bf16>(s0[0], s0[1]), a[1] = pack2<bf16>(s1[0], s1[1]);
  a[2] = pack2<bf16>(s0[2], s0[3]), a[3] = pack2<bf16>(s1[2], s1[3]);
}

struct Workspace {
  float *dq, *delta;
  STROBE_DEVICE explicit Workspace(const Params& p)
      : dq(p.workspace), delta(p.workspace + i64(p.slices) * p.len_q * kDim) {}
};

// One warp per row; and zeros where dQ will be summed up.
STROBE_DEVICE void delta(const Params& p) {
  const i64 row = i64(block_idx()) * (kThreads / 32) + thread_idx() / 32;
  if (row >= i64(p.slices) * p.len_q) return;
  float sum = 0.f;
  for (i64 i = row * kDim + thread_idx() % 32; i < (row + 1) * kDim; i += 32) {
    sum = fma(to_float<bf16>(ld_global(p.d_o + i)), to_float<bf16>(ld_global(p.o + i)), sum);
    st_global(Workspace(p).dq + i, 0.f);
  }
  sum = row_sum(sum + shfl_xor(sum, 16));
  if (thread_idx() % 32 == 0) st_global(Workspace(p).delta + row, sum);
}

// The warp's 16 rows, from `first` on.
STROBE_DEVICE void store(u16* to, const Sums<kDim>& sum, float factor, int first, int length) {
#pragma unroll
  for (int a = 0; a < 2; ++a)
#pragma unroll
    for (int c = 0; c < kDim / 4; c += 2)
      if (first + my_row(a) < length)
        st_global(reinterpret_cast<u32*>(to + i64(first + my_row(a)) * kDim + my_column(c)),
                  pack2<bf16>(sum.x[a][c] * factor, sum.x[a][c + 1] * factor));
}

STROBE_DEVICE void gradients(const Params& p) {
  const int blocks = (p.len_k + kKeys - 1) / kKeys, slice = block_idx() / blocks, key0 = block_idx() % blocks * kKeys;
  const i64 rows = i64(slice) * p.len_q, queries = rows * kDim, keys = i64(slice) * p.len_k * kDim;
  const int warp = thread_idx() / 32, my_keys = 16 * warp, my_queries = warp % 2 * 16, my_half = warp / 2 * kDim / 2;
  const Workspace workspace(p);
  const Tile k{smem_base()}, v{smem_base() + kOffsetV};
  const Weights ds_tile{smem_base() + kOffsetDs};
  k.load_async(p.k + keys, key0, kKeys, p.len_k, kThreads);
  v.load_async(p.v + keys, key0, kKeys, p.len_k, kThreads);
  const auto buffer = [&](int row0, int offset) {
    return Tile{smem_base() + offset + row0 / kRows % kStages * Tile::bytes(kRows)};
  };
  const auto fetch = [&](int row0) {
    buffer(row0, kOffsetQ).load_async(p.q + queries, row0, kRows, p.len_q, kThreads);
    buffer(row0, kOffsetDo).load_async(p.d_o + queries, row0, kRows, p.len_q, kThreads);
    cp_async_commit();
  };

  Sums<kDim> dk, dv;
  const int first = p.causal ? max(0, key0 - (p.len_k - p.len_q)) : 0;  // the first query that sees any of these keys
  if (first < p.len_q) fetch(first / kRows * kRows);
  for (int row0 = first / kRows * kRows; row0 < p.len_q; row0 += kRows) {
    cp_async_wait<0>();
    sync_block();  // everybody's copies have arrived, and nobody reads the other buffers and dS any more
    if (row0 + kRows < p.len_q) fetch(row0 + kRows);
    const Tile q = buffer(row0, kOffsetQ), d_o = buffer(row0, kOffsetDo);

    // S^T = K Q^T, dP^T = V dO^T: the warp's 16 keys, all queries
    Sums<kRows> s, dp;
    multiply<kDim>(s, [&](u32 (&a)[4], int i) { left_rows(a, k, my_keys, i); },
                   [&](u32 (&b)[4], int n, int i) { right_rows(b, q, n, i); });
    multiply<kDim>(dp, [&](u32 (&a)[4], int i) { left_rows(a, v, my_keys, i); },
                   [&](u32 (&b)[4], int n, int i) { right_rows(b, d_o, n, i); });

    // P^T = exp(S^T - LSE), dS^T = P^T (dP^T - delta): a column is a query
#pragma unroll
    for (int b = 0; b < kRows / 4; ++b) {
      const int query = row0 + my_column(b);
      const int seen = query < p.len_q ? visible_keys(p, query) : 0;
      const float lse = seen > 0 ? ld_global(p.lse + rows + query) * kLog2e : 0.f;
      const float delta = seen > 0 ? ld_global(workspace.delta + rows + query) : 0.f;
#pragma unroll
      for (int a = 0; a < 2; ++a) {
        s.x[a][b] = key0 + my_keys + my_row(a) < seen ? exp2_approx(s.x[a][b] * p.scale_log2 - lse) : 0.f;
        dp.x[a][b] = s.x[a][b] * (dp.x[a][b] - delta);
      }
    }
#pragma unroll
    for (int a = 0; a < 2; ++a)
#pragma unroll
      for (int b = 0; b < kRows / 4; b += 2)
        st_shared(ds_tile.at(my_keys + my_row(a), my_column(b)), pack2<bf16>(dp.x[a][b], dp.x[a][b + 1]));

    // dV += P^T dO, dK += dS^T Q: the warp's 16 keys
    multiply<kRows>(dv, [&](u32 (&a)[4], int i) { pack(a, s, i); },
                    [&](u32 (&b)[4], int n, int i) { right_columns(b, d_o, n, i); });
    multiply<kRows>(dk, [&](u32 (&a)[4], int i) { pack(a, dp, i); },
                    [&](u32 (&b)[4], int n, int i) { right_columns(b, q, n, i); });
    sync_block();  // dS is complete

    // dQ += dS K: 16 queries and half of the columns, the keys of all warps
    Sums<kDim / 2> dq;
    multiply<kKeys>(dq, [&](u32 (&a)[4], int i) { left_columns(a, ds_tile, my_queries, i); },
                    [&](u32 (&b)[4], int n, int i) { right_columns(b, k, my_half + n, i); });
#pragma unroll
    for (int a = 0; a < 2; ++a) {
      const int query = row0 + my_queries + my_row(a);
#pragma unroll
      for (int c = 0; c < kDim / 8; ++c)
        if (query < p.len_q) atomic_add(workspace.dq + (rows + query) * kDim + my_half + my_column(c), dq.x[a][c]);
    }
  }
  cp_async_wait<0>();
  store(p.dk + keys, dk, p.scale, key0 + my_keys, p.len_k);
  store(p.dv + keys, dv, 1.f, key0 + my_keys, p.len_k);
}

// One thread for two numbers of dQ.
STROBE_DEVICE void round_dq(const Params& p) {
  const i64 at = 2 * (i64(block_idx()) * kThreads + thread_idx());
  if (at >= i64(p.slices) * p.len_q * kDim) return;
  const float* dq = Workspace(p).dq + at;
  st_global(reinterpret_cast<u32*>(p.dq + at), pack2<bf16>(ld_global(dq) * p.scale, ld_global(dq + 1) * p.scale));
}

}  // namespace strobe

// The three are launched one after the other.
STROBE_KERNEL(strobe::kThreads, 1) kernel(STROBE_GRID_CONSTANT strobe::Params p) {
  if (p.stage == 0) strobe::delta(p);
  if (p.stage == 1) strobe::gradients(p);
  if (p.stage == 2) strobe::round_dq(p);
}

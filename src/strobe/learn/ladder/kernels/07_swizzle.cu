// 07  Swizzle
//
// What changed: one line. Where a 16-byte chunk of a tile lies in its row now depends on the row: chunk number XOR
//   row % 8.
// Why it should help: eight rows of the same columns, which is what a matrix operand is, now lie in eight different
//   groups of banks. Padding would do as well, but costs memory, and neither wide copies nor the copy engine of
//   later rungs can place padding.
// Predicted: x 1.5 the speed of 06: Q, K and P are read in one pass instead of eight, V in one instead of four; the
//   number of load instructions is what it was.
// Measured: x 1.58, 55.1 TFLOP/s (NVIDIA H200; docs/ladder.md says how)
// What limits it now: the number of load instructions, and waiting: nobody computes while the next keys are on their
//   way.
#include "ladder.cuh"

namespace strobe {

constexpr int kThreads = 128, kRows = 64, kKeys = 64;  // four warps of 16 rows
// A thread has what mma gives it: two rows, 8 apart, and of every 8 keys or columns two neighbours.
constexpr int kMyRows = 2, kMyKeys = kKeys / 4, kMyColumns = kDim / 4;
STROBE_DEVICE int my_row(int a) { return thread_idx() / 32 * 16 + thread_idx() % 32 / 4 + 8 * a; }
STROBE_DEVICE int my_column(int b) { return 2 * (thread_idx() % 4) + b / 2 * 8 + b % 2; }  // or key

// A tile of bf16 numbers in shared memory, row by row; the 16-byte chunks (8 columns) of a row are permuted by the row.
template <int kColumns> struct HalfTile {
  STROBE_DEVICE static constexpr int bytes(int rows) { return rows * kColumns * 2; }
  u32 base;
  STROBE_DEVICE u32 at(int row, int column) const {
    return base + (row * kColumns + ((column / 8) ^ (row & 7)) * 8 + column % 8) * 2;
  }
  STROBE_DEVICE u32 pair(int row, int column) const { return ld_shared(at(row, column)); }  // and its right neighbour
  STROBE_DEVICE u32 single(int row, int column) const {
    return (ld_shared(at(row, column & ~1)) >> (16 * (column & 1))) & 0xffffu;
  }
  STROBE_DEVICE u32 pair_below(int row, int column) const {
    return single(row, column) | single(row + 1, column) << 16;
  }
  // Rows [first, first + rows) of a matrix of `length` rows; what lies beyond is zero.
  STROBE_DEVICE void load(const u16* matrix, int first, int rows, int length, int threads) const {
    for (int i = thread_idx(); i < rows * kColumns / 2; i += threads) {
      const int row = i / (kColumns / 2), column = i % (kColumns / 2) * 2;
      const int* from = reinterpret_cast<const int*>(matrix + i64(first + row) * kColumns + column);
      st_shared(at(row, column), first + row < length ? u32(ld_global(from)) : 0u);
    }
  }
};
typedef HalfTile<kDim> Tile;      // of Q, K or V
typedef HalfTile<kKeys> Weights;  // P
constexpr int kOffsetK = Tile::bytes(kRows), kOffsetV = kOffsetK + Tile::bytes(kKeys);
constexpr int kOffsetP = kOffsetV + Tile::bytes(kKeys);
static_assert(kSmem == kOffsetP + Weights::bytes(kRows), "the shared memory that Python asks for");

STROBE_DEVICE void attend(const Params& p) {
  const int blocks = (p.len_q + kRows - 1) / kRows, slice = block_idx() / blocks, row0 = block_idx() % blocks * kRows;
  const int g = thread_idx() % 32 / 4, t = my_column(0);  // where a thread's parts of the factors begin
  const Tile q_tile{smem_base()}, k_tile{smem_base() + kOffsetK}, v_tile{smem_base() + kOffsetV};
  const Weights p_tile{smem_base() + kOffsetP};
  const Element* k = p.k + i64(slice) * p.len_k * kDim;
  const Element* v = p.v + i64(slice) * p.len_k * kDim;
  q_tile.load(p.q + i64(slice) * p.len_q * kDim, row0, kRows, p.len_q, kThreads);

  float o[kMyRows][kMyColumns] = {}, m[kMyRows], l[kMyRows] = {};
  for (int a = 0; a < kMyRows; ++a) m[a] = neg_inf();
  const int keys = visible_keys(p, min(row0 + kRows, p.len_q) - 1);  // of the last row, which sees the most
  for (int key0 = 0; key0 < keys; key0 += kKeys) {
    k_tile.load(k, key0, kKeys, p.len_k, kThreads);
    v_tile.load(v, key0, kKeys, p.len_k, kThreads);
    sync_block();  // K, V and Q have arrived

    // S = Q K^T: the warp's 16 rows, all keys
    float s[kMyRows][kMyKeys] = {};
#pragma unroll
    for (int i = 0; i < kDim; i += 16) {
      const u32 a0 = q_tile.pair(my_row(0), i + t), a1 = q_tile.pair(my_row(1), i + t);
      const u32 a2 = q_tile.pair(my_row(0), i + t + 8), a3 = q_tile.pair(my_row(1), i + t + 8);
#pragma unroll
      for (int n = 0; n < kKeys; n += 8) {
        const u32 b0 = k_tile.pair(n + g, i + t), b1 = k_tile.pair(n + g, i + t + 8);
        mma_m16n8k16<bf16>(s[0][n / 4], s[0][n / 4 + 1], s[1][n / 4], s[1][n / 4 + 1], a0, a1, a2, a3, b0, b1);
      }
    }

    // The online softmax: what was summed before belongs to the old maximum, and alpha brings it to the new one.
#pragma unroll
    for (int a = 0; a < kMyRows; ++a) {
      const int query = row0 + my_row(a);
      float top = neg_inf(), sum = 0.f;
#pragma unroll
      for (int b = 0; b < kMyKeys; ++b) {
        s[a][b] = key0 + my_column(b) < visible_keys(p, query) ? s[a][b] * p.scale_log2 : neg_inf();
        top = fmax(top, s[a][b]);
      }
      const float m_old = m[a];
      m[a] = fmax(m_old, quad_max(top));
      const float safe = m[a] == neg_inf() ? 0.f : m[a], alpha = exp2_approx(m_old - safe);
#pragma unroll
      for (int b = 0; b < kMyKeys; ++b) {
        s[a][b] = exp2_approx(s[a][b] - safe);
        sum += s[a][b];
      }
      // It is read back as the left operand of the next product. A thread reads what it wrote: no barrier is needed.
#pragma unroll
      for (int b = 0; b < kMyKeys; b += 2)
        st_shared(p_tile.at(my_row(a), my_column(b)), pack2<bf16>(s[a][b], s[a][b + 1]));
      l[a] = alpha * l[a] + quad_sum(sum);
#pragma unroll
      for (int c = 0; c < kMyColumns; ++c) o[a][c] *= alpha;
    }

    // O = O + P V
#pragma unroll
    for (int i = 0; i < kKeys; i += 16) {
      const u32 a0 = p_tile.pair(my_row(0), i + t), a1 = p_tile.pair(my_row(1), i + t);
      const u32 a2 = p_tile.pair(my_row(0), i + t + 8), a3 = p_tile.pair(my_row(1), i + t + 8);
#pragma unroll
      for (int n = 0; n < kDim; n += 8) {
        const u32 b0 = v_tile.pair_below(i + t, n + g), b1 = v_tile.pair_below(i + t + 8, n + g);
        mma_m16n8k16<bf16>(o[0][n / 4], o[0][n / 4 + 1], o[1][n / 4], o[1][n / 4 + 1], a0, a1, a2, a3, b0, b1);
      }
    }
    sync_block();  // nobody reads K, V and P any more
  }

#pragma unroll
  for (int a = 0; a < kMyRows; ++a) {
    const int query = row0 + my_row(a);
    if (query >= p.len_q) continue;
    const i64 row = i64(slice) * p.len_q + query;
    const float inverse = l[a] > 0.f ? 1.f / l[a] : 0.f;
#pragma unroll
    for (int c = 0; c < kMyColumns; c += 2)
      st_global(reinterpret_cast<u32*>(p.o + row * kDim + my_column(c)),
                pack2<bf16>(o[a][c] * inverse, o[a][c + 1] * inverse));
    if (my_column(0) == 0) st_global(p.lse + row, l[a] > 0.f ? m[a] * kLn2 + log_natural(l[a]) : neg_inf());
  }
}

}  // namespace strobe

STROBE_KERNEL(strobe::kThreads, 1) kernel(STROBE_GRID_CONSTANT strobe::Params p) { strobe::attend(p); }

// 09  P in registers, and ldmatrix
//
// What changed: operands are fetched by ldmatrix.x4, four 8 x 8 matrices at once and already spread over the warp as
//   mma wants them; for V it transposes on the way. P does not go through shared memory at all: in 08 each thread
//   read back just what it had written, for two neighbouring scores of a thread are, once packed, a register of the
//   left operand of the next product.
// Why it should help: one load where there were four (Q, K) or eight (V) and some shifts; none at all for P.
// Predicted: x 2 the speed of 08: load instructions fall to less than a fifth, and they were what it waited for.
// Measured: x 1.86, 209 TFLOP/s (NVIDIA H200; docs/ladder.md says how)
// What limits it now: each warp reads all of K and V for its 16 rows. The library's Ampere kernel, forward_sm80.cuh,
//   is this rung with 32 rows a warp, a masked and an unmasked loop, and stores of 16 bytes. Beyond that lies what
//   mma.sync can do on Hopper: two thirds of the machine.
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
  // Rows [first, first + rows) of a matrix of `length` rows; what lies beyond is zero.
  STROBE_DEVICE void load_async(const u16* matrix, int first, int rows, int length, int threads) const {
    for (int i = thread_idx(); i < rows * kColumns / 8; i += threads) {
      const int row = i / (kColumns / 8), column = i % (kColumns / 8) * 8;
      const bool there = first + row < length;
      cp_async_16(at(row, column), there ? matrix + i64(first + row) * kColumns + column : matrix, there);
    }
  }
};
typedef HalfTile<kDim> Tile;  // of Q, K or V
constexpr int kStages = 2, kOffsetK = Tile::bytes(kRows), kOffsetV = kOffsetK + kStages * Tile::bytes(kKeys);
constexpr int kEnd = kOffsetV + kStages * Tile::bytes(kKeys);
static_assert(kSmem == kEnd, "the shared memory that Python asks for");

STROBE_DEVICE void attend(const Params& p) {
  const int blocks = (p.len_q + kRows - 1) / kRows, slice = block_idx() / blocks, row0 = block_idx() % blocks * kRows;
  const int lane = thread_idx() % 32, warp_row = thread_idx() / 32 * 16;
  const Tile q_tile{smem_base()};
  const Element* k = p.k + i64(slice) * p.len_k * kDim;
  const Element* v = p.v + i64(slice) * p.len_k * kDim;
  const auto k_tile = [&](int at) { return Tile{smem_base() + kOffsetK + at / kKeys % kStages * Tile::bytes(kKeys)}; };
  const auto v_tile = [&](int at) { return Tile{smem_base() + kOffsetV + at / kKeys % kStages * Tile::bytes(kKeys)}; };
  const auto fetch = [&](int key0) {
    k_tile(key0).load_async(k, key0, kKeys, p.len_k, kThreads);
    v_tile(key0).load_async(v, key0, kKeys, p.len_k, kThreads);
    cp_async_commit();
  };
  q_tile.load_async(p.q + i64(slice) * p.len_q * kDim, row0, kRows, p.len_q, kThreads);

  float o[kMyRows][kMyColumns] = {}, m[kMyRows], l[kMyRows] = {};
  for (int a = 0; a < kMyRows; ++a) m[a] = neg_inf();
  const int keys = visible_keys(p, min(row0 + kRows, p.len_q) - 1);  // of the last row, which sees the most
  if (keys > 0) fetch(0);
  for (int key0 = 0; key0 < keys; key0 += kKeys) {
    cp_async_wait<0>();
    sync_block();  // everybody's copies have arrived, and nobody reads the other buffers any more
    if (key0 + kKeys < keys) fetch(key0 + kKeys);

    // S = Q K^T: the warp's 16 rows, all keys
    float s[kMyRows][kMyKeys] = {};
#pragma unroll
    for (int i = 0; i < kDim; i += 16) {
      u32 a[4], b[4];
      ldmatrix_x4(q_tile.at(warp_row + lane % 16, i + lane / 16 * 8), a[0], a[1], a[2], a[3]);
#pragma unroll
      for (int n = 0; n < kKeys; n += 16) {
        float *d0 = s[0] + n / 4, *d1 = s[1] + n / 4;
        ldmatrix_x4(k_tile(key0).at(n + lane % 8 + lane / 16 * 8, i + lane / 8 % 2 * 8), b[0], b[1], b[2], b[3]);
        mma_m16n8k16<bf16>(d0[0], d0[1], d1[0], d1[1], a[0], a[1], a[2], a[3], b[0], b[1]);
        mma_m16n8k16<bf16>(d0[2], d0[3], d1[2], d1[3], a[0], a[1], a[2], a[3], b[2], b[3]);
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
      l[a] = alpha * l[a] + quad_sum(sum);
#pragma unroll
      for (int c = 0; c < kMyColumns; ++c) o[a][c] *= alpha;
    }

    // O = O + P V
#pragma unroll
    for (int i = 0; i < kKeys; i += 16) {
      const float *s0 = s[0] + i / 4, *s1 = s[1] + i / 4;
      const u32 a[4] = {pack2<bf16>(s0[0], s0[1]), pack2<bf16>(s1[0], s1[1]), pack2<bf16>(s0[2], s0[3]),
                        pack2<bf16>(s1[2], s1[3])};
      u32 b[4];
#pragma unroll
      for (int n = 0; n < kDim; n += 16) {
        float *d0 = o[0] + n / 4, *d1 = o[1] + n / 4;
        ldmatrix_x4_trans(v_tile(key0).at(i + lane % 16, n + lane / 16 * 8), b[0], b[1], b[2], b[3]);
        mma_m16n8k16<bf16>(d0[0], d0[1], d1[0], d1[1], a[0], a[1], a[2], a[3], b[0], b[1]);
        mma_m16n8k16<bf16>(d0[2], d0[3], d1[2], d1[3], a[0], a[1], a[2], a[3], b[2], b[3]);
      }
    }
  }
  cp_async_wait<0>();

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

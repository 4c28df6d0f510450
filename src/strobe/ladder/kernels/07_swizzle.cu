// 07  Swizzle
//
// What changed: one line. Where a 16-byte chunk of a tile lies in its row now depends on the row: chunk number XOR row % 8.
// Why it should help: eight rows of the same columns, which is what a matrix operand is, now lie in eight different groups of banks.
//   Padding would do as well, but costs memory, and neither wide copies nor the copy engine of later rungs can place padding.
// Predicted: x 1.5 the speed of 06: Q, K and P are read in one pass instead of eight, V in one instead of four; the number of load
//   instructions is what it was.
// What limits it now: the number of load instructions, and waiting: nobody computes while the next keys are on their way.
#include "ladder.cuh"

namespace strobe {

constexpr int kThreads = 128, kRows = 64, kKeys = 64;  // four warps of 16 rows

// A tile of bf16 numbers in shared memory, row by row; in a row, the 16-byte chunks (8 columns) are permuted by the row.
template <int kColumns> struct HalfTile {
  STROBE_DEVICE static constexpr int bytes(int rows) { return rows * kColumns * 2; }
  u32 base;
  STROBE_DEVICE u32 at(int row, int column) const { return base + (row * kColumns + ((column / 8) ^ (row & 7)) * 8 + column % 8) * 2; }
  STROBE_DEVICE u32 pair(int row, int column) const { return ld_shared(at(row, column)); }  // and its right neighbour; column is even
  STROBE_DEVICE u32 single(int row, int column) const { return (ld_shared(at(row, column & ~1)) >> (16 * (column & 1))) & 0xffffu; }
  STROBE_DEVICE u32 pair_below(int row, int column) const { return single(row, column) | single(row + 1, column) << 16; }
  // Rows [first, first + rows) of a matrix of `length` rows; what lies beyond is zero.
  STROBE_DEVICE void load(const u16* matrix, int first, int rows, int length) const {
    for (int i = thread_idx(); i < rows * kColumns / 2; i += kThreads) {
      const int row = i / (kColumns / 2), column = i % (kColumns / 2) * 2;
      const int* from = reinterpret_cast<const int*>(matrix + i64(first + row) * kColumns + column);
      st_shared(at(row, column), first + row < length ? u32(ld_global(from)) : 0u);
    }
  }
};
typedef HalfTile<kDim> Tile;      // of Q, K or V
typedef HalfTile<kKeys> Weights;  // P
constexpr int kOffsetK = Tile::bytes(kRows), kOffsetV = kOffsetK + Tile::bytes(kKeys), kOffsetP = kOffsetV + Tile::bytes(kKeys);
static_assert(kSmem == kOffsetP + Weights::bytes(kRows), "the shared memory that Python asks for");

STROBE_DEVICE void attend(const Params& p) {
  const int blocks = (p.len_q + kRows - 1) / kRows, slice = block_idx() / blocks, row0 = block_idx() % blocks * kRows;
  const int lane = thread_idx() % 32, warp_row = thread_idx() / 32 * 16;
  const int g = lane / 4, t = 2 * (lane % 4);  // a thread's rows are g and g + 8, its columns t and t + 1, and so on in steps of 8
  const Tile q_tile{smem_base()}, k_tile{smem_base() + kOffsetK}, v_tile{smem_base() + kOffsetV};
  const Weights p_tile{smem_base() + kOffsetP};
  const u16* k = p.k + i64(slice) * p.len_k * kDim;
  const u16* v = p.v + i64(slice) * p.len_k * kDim;
  q_tile.load(p.q + i64(slice) * p.len_q * kDim, row0, kRows, p.len_q);

  float o[kDim / 2] = {}, m[2] = {neg_inf(), neg_inf()}, l[2] = {0.f, 0.f};
  const int seen[2] = {visible_keys(p, row0 + warp_row + g), visible_keys(p, row0 + warp_row + g + 8)};
  const int keys = visible_keys(p, min(row0 + kRows, p.len_q) - 1);  // of the last row, which sees the most
  for (int key0 = 0; key0 < keys; key0 += kKeys) {
    k_tile.load(k, key0, kKeys, p.len_k);
    v_tile.load(v, key0, kKeys, p.len_k);
    sync_block();  // K, V and Q have arrived

    // S = Q K^T: the warp's 16 rows, all keys
    float s[kKeys / 2] = {};
#pragma unroll
    for (int i = 0; i < kDim; i += 16) {
      const u32 a0 = q_tile.pair(warp_row + g, i + t), a1 = q_tile.pair(warp_row + g + 8, i + t);
      const u32 a2 = q_tile.pair(warp_row + g, i + t + 8), a3 = q_tile.pair(warp_row + g + 8, i + t + 8);
#pragma unroll
      for (int n = 0; n < kKeys; n += 8) {
        float* d = s + n / 2;
        mma_m16n8k16<bf16>(d[0], d[1], d[2], d[3], a0, a1, a2, a3, k_tile.pair(n + g, i + t), k_tile.pair(n + g, i + t + 8));
      }
    }

    // The online softmax: what was summed before belongs to the old maximum, and alpha brings it to the new one.
    float top[2] = {neg_inf(), neg_inf()}, sum[2] = {0.f, 0.f}, safe[2], alpha[2];
#pragma unroll
    for (int i = 0; i < kKeys / 2; ++i) {
      const int r = fragment_row(i);
      s[i] = key0 + t + fragment_column(i) < seen[r] ? s[i] * p.scale_log2 : neg_inf();
      top[r] = fmax(top[r], s[i]);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float m_old = m[r];
      m[r] = fmax(m_old, quad_max(top[r]));
      safe[r] = m[r] == neg_inf() ? 0.f : m[r];
      alpha[r] = exp2_approx(m_old - safe[r]);
    }
#pragma unroll
    for (int i = 0; i < kKeys / 2; ++i) {
      const int r = fragment_row(i);
      s[i] = exp2_approx(s[i] - safe[r]);
      sum[r] += s[i];
    }
    // To be read back as the left operand of the next product. Each thread happens to read what it wrote: no barrier is needed.
#pragma unroll
    for (int i = 0; i < kKeys / 2; i += 2)
      st_shared(p_tile.at(warp_row + g + 8 * fragment_row(i), t + fragment_column(i)), pack2<bf16>(s[i], s[i + 1]));
#pragma unroll
    for (int r = 0; r < 2; ++r) l[r] = alpha[r] * l[r] + quad_sum(sum[r]);
#pragma unroll
    for (int i = 0; i < kDim / 2; ++i) o[i] *= alpha[fragment_row(i)];

    // O = O + P V
#pragma unroll
    for (int i = 0; i < kKeys; i += 16) {
      const u32 a0 = p_tile.pair(warp_row + g, i + t), a1 = p_tile.pair(warp_row + g + 8, i + t);
      const u32 a2 = p_tile.pair(warp_row + g, i + t + 8), a3 = p_tile.pair(warp_row + g + 8, i + t + 8);
#pragma unroll
      for (int n = 0; n < kDim; n += 8) {
        float* d = o + n / 2;
        mma_m16n8k16<bf16>(d[0], d[1], d[2], d[3], a0, a1, a2, a3, v_tile.pair_below(i + t, n + g), v_tile.pair_below(i + t + 8, n + g));
      }
    }
    sync_block();  // nobody reads K, V and P any more
  }

#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int query = row0 + warp_row + g + 8 * r;
    if (query >= p.len_q) continue;
    const i64 row = i64(slice) * p.len_q + query;
    const float inverse = l[r] > 0.f ? 1.f / l[r] : 0.f;
#pragma unroll
    for (int i = 0; i < kDim / 2; i += 4)
      st_global(reinterpret_cast<u32*>(p.o + row * kDim + t + 2 * i), pack2<bf16>(o[i + 2 * r] * inverse, o[i + 2 * r + 1] * inverse));
    if (lane % 4 == 0) st_global(p.lse + row, l[r] > 0.f ? m[r] * kLn2 + log_natural(l[r]) : neg_inf());
  }
}

}  // namespace strobe

STROBE_KERNEL(strobe::kThreads, 1) kernel(STROBE_GRID_CONSTANT strobe::Params p) { strobe::attend(p); }

// 05  FlashAttention-2: queries outside, one division at the end
//
// What changed: the loops are swapped. A block owns 64 queries of a head and goes over the keys once, so that O, m
//   and l stay in registers until they are finished. O is not kept normalised: it is rescaled when the maximum
//   grows, and divided once, at the end.
// Why it should help: there are N / 64 blocks for each head instead of one; O is written once and never read; and a
//   causal block stops at its diagonal, which it could not with the keys outside.
// Predicted: x 8 the speed of 04 where 16 heads left 7 of 8 multiprocessors idle; with as many heads as
//   multiprocessors, x 1.3.
// Measured: x 21.95, 22.3 TFLOP/s (NVIDIA H200; docs/ladder.md says how)
// What limits it now: fp32 arithmetic on scalar units, and the shared-memory loads that feed it: 60 TFLOP/s at the
//   very best, where the matrix units offer 990.
#include "ladder.cuh"

namespace strobe {

constexpr int kThreads = 256, kRows = 64, kKeys = 64;
// A thread has kMyRows x kMyKeys scores and kMyRows x kMyColumns numbers of O, 16 rows and 16 keys or columns apart.
constexpr int kMyRows = 4, kMyKeys = 4, kMyColumns = kDim / 16;
STROBE_DEVICE int my_row(int a) { return thread_idx() / 16 + 16 * a; }
STROBE_DEVICE int my_column(int b) { return thread_idx() % 16 + 16 * b; }  // or key
typedef SharedTile<kDim> Tile;    // of Q, K or V
typedef SharedTile<kKeys> Weights;  // P
constexpr int kOffsetK = Tile::bytes(kRows), kOffsetV = kOffsetK + Tile::bytes(kKeys);
constexpr int kOffsetP = kOffsetV + Tile::bytes(kKeys);
static_assert(kSmem == kOffsetP + Weights::bytes(kRows), "the shared memory that Python asks for");

STROBE_DEVICE void attend(const Params& p) {
  const int blocks = (p.len_q + kRows - 1) / kRows, slice = block_idx() / blocks, row0 = block_idx() % blocks * kRows;
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

    // S = Q K^T, a patch of scores a thread
    float s[kMyRows][kMyKeys] = {};
    for (int i = 0; i < kDim; ++i) {
      float left[kMyRows], right[kMyKeys];
      for (int a = 0; a < kMyRows; ++a) left[a] = q_tile.get(my_row(a), i);
      for (int b = 0; b < kMyKeys; ++b) right[b] = k_tile.get(my_column(b), i);
      for (int a = 0; a < kMyRows; ++a)
        for (int b = 0; b < kMyKeys; ++b) s[a][b] = fma(left[a], right[b], s[a][b]);
    }

    // The online softmax: what was summed before belongs to the old maximum, and alpha brings it to the new one.
    for (int a = 0; a < kMyRows; ++a) {
      const int query = row0 + my_row(a);
      float top = neg_inf(), sum = 0.f;
      for (int b = 0; b < kMyKeys; ++b) {
        s[a][b] = key0 + my_column(b) < visible_keys(p, query) ? s[a][b] * p.scale : neg_inf();
        top = fmax(top, s[a][b]);
      }
      const float m_old = m[a];
      m[a] = fmax(m_old, row_max(top));
      const float safe = m[a] == neg_inf() ? 0.f : m[a], alpha = exp_natural(m_old - safe);
      for (int b = 0; b < kMyKeys; ++b) {
        s[a][b] = exp_natural(s[a][b] - safe);
        sum += s[a][b];
        p_tile.set(my_row(a), my_column(b), s[a][b]);
      }
      l[a] = alpha * l[a] + row_sum(sum);
      for (int c = 0; c < kMyColumns; ++c) o[a][c] *= alpha;
    }
    sync_block();  // P is complete

    // O = O + P V, not normalised
    for (int i = 0; i < kKeys; ++i) {
      float left[kMyRows], right[kMyColumns];
      for (int a = 0; a < kMyRows; ++a) left[a] = p_tile.get(my_row(a), i);
      for (int c = 0; c < kMyColumns; ++c) right[c] = v_tile.get(i, my_column(c));
      for (int a = 0; a < kMyRows; ++a)
        for (int c = 0; c < kMyColumns; ++c) o[a][c] = fma(left[a], right[c], o[a][c]);
    }
    sync_block();  // nobody reads K, V and P any more
  }

  for (int a = 0; a < kMyRows; ++a) {
    const int query = row0 + my_row(a);
    if (query >= p.len_q) continue;
    const i64 row = i64(slice) * p.len_q + query;
    const float inverse = l[a] > 0.f ? 1.f / l[a] : 0.f;
    for (int c = 0; c < kMyColumns; ++c) st_global(p.o + row * kDim + my_column(c), o[a][c] * inverse);
    if (my_column(0) == 0) st_global(p.lse + row, l[a] > 0.f ? m[a] + log_natural(l[a]) : neg_inf());
  }
}

}  // namespace strobe

STROBE_KERNEL(strobe::kThreads, 1) kernel(STROBE_GRID_CONSTANT strobe::Params p) { strobe::attend(p); }

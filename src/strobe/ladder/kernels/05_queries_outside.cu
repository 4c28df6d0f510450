// 05  FlashAttention-2: queries outside, one division at the end
//
// What changed: the loops are swapped. A block owns 64 queries of a head and goes over the keys once, so that O, m and l stay in
//   registers until they are finished. O is not kept normalised: it is rescaled when the maximum grows, and divided once, at the end.
// Why it should help: there are N / 64 blocks for each head instead of one; O is written once and never read; and a causal block stops
//   at its diagonal, which it could not with the keys outside.
// Predicted: x 8 the speed of 04 where 16 heads left 7 of 8 multiprocessors idle; with as many heads as multiprocessors, x 1.3.
// What limits it now: fp32 arithmetic on scalar units, and the shared-memory loads that feed it: 60 TFLOP/s at the very best, where the
//   matrix units offer 990.
#include "ladder.cuh"

namespace strobe {

constexpr int kThreads = 256, kRows = 64, kKeys = 64, kPatch = 4;  // a thread has kPatch x kPatch scores, 16 rows and 16 keys apart
constexpr int kColumns = kDim / 16;                                // and kPatch x kColumns numbers of O, 16 rows and 16 columns apart
typedef SharedTile<kDim> Tile;    // of Q, K or V
typedef SharedTile<kKeys> Weights;  // P
constexpr int kOffsetK = Tile::bytes(kRows), kOffsetV = kOffsetK + Tile::bytes(kKeys), kOffsetP = kOffsetV + Tile::bytes(kKeys);
static_assert(kSmem == kOffsetP + Weights::bytes(kRows), "the shared memory that Python asks for");

STROBE_DEVICE void attend(const Params& p) {
  const int blocks = (p.len_q + kRows - 1) / kRows, slice = block_idx() / blocks, row0 = block_idx() % blocks * kRows;
  const int y = thread_idx() / 16, x = thread_idx() % 16;
  const Tile q_tile{smem_base()}, k_tile{smem_base() + kOffsetK}, v_tile{smem_base() + kOffsetV};
  const Weights p_tile{smem_base() + kOffsetP};
  const float* k = p.k + i64(slice) * p.len_k * kDim;
  const float* v = p.v + i64(slice) * p.len_k * kDim;
  q_tile.load(p.q + i64(slice) * p.len_q * kDim, row0, kRows, p.len_q, kThreads);

  float o[kPatch][kColumns] = {}, m[kPatch], l[kPatch] = {};
  for (int a = 0; a < kPatch; ++a) m[a] = neg_inf();
  const int keys = visible_keys(p, min(row0 + kRows, p.len_q) - 1);  // of the last row, which sees the most
  for (int key0 = 0; key0 < keys; key0 += kKeys) {
    k_tile.load(k, key0, kKeys, p.len_k, kThreads);
    v_tile.load(v, key0, kKeys, p.len_k, kThreads);
    sync_block();  // K, V and Q have arrived

    // S = Q K^T, a patch of scores a thread
    float s[kPatch][kPatch] = {};
    for (int i = 0; i < kDim; ++i) {
      float left[kPatch], right[kPatch];
      for (int a = 0; a < kPatch; ++a) left[a] = q_tile.get(y + 16 * a, i);
      for (int b = 0; b < kPatch; ++b) right[b] = k_tile.get(x + 16 * b, i);
      for (int a = 0; a < kPatch; ++a)
        for (int b = 0; b < kPatch; ++b) s[a][b] = fma(left[a], right[b], s[a][b]);
    }

    // The online softmax: what was summed before belongs to the old maximum, and alpha brings it to the new one.
    for (int a = 0; a < kPatch; ++a) {
      const int query = row0 + y + 16 * a;
      float top = neg_inf(), sum = 0.f;
      for (int b = 0; b < kPatch; ++b) {
        s[a][b] = key0 + x + 16 * b < visible_keys(p, query) ? s[a][b] * p.scale : neg_inf();
        top = fmax(top, s[a][b]);
      }
      const float m_old = m[a];
      m[a] = fmax(m_old, row_max(top));
      const float safe = m[a] == neg_inf() ? 0.f : m[a], alpha = exp_natural(m_old - safe);
      for (int b = 0; b < kPatch; ++b) {
        const float weight = exp_natural(s[a][b] - safe);
        p_tile.set(y + 16 * a, x + 16 * b, weight);
        sum += weight;
      }
      l[a] = alpha * l[a] + row_sum(sum);
      for (int c = 0; c < kColumns; ++c) o[a][c] *= alpha;
    }
    sync_block();  // P is complete

    // O = O + P V, not normalised
    for (int i = 0; i < kKeys; ++i) {
      float left[kPatch], right[kColumns];
      for (int a = 0; a < kPatch; ++a) left[a] = p_tile.get(y + 16 * a, i);
      for (int c = 0; c < kColumns; ++c) right[c] = v_tile.get(i, x + 16 * c);
      for (int a = 0; a < kPatch; ++a)
        for (int c = 0; c < kColumns; ++c) o[a][c] = fma(left[a], right[c], o[a][c]);
    }
    sync_block();  // nobody reads K, V and P any more
  }

  for (int a = 0; a < kPatch; ++a) {
    const int query = row0 + y + 16 * a;
    if (query >= p.len_q) continue;
    const i64 row = i64(slice) * p.len_q + query;
    const float inverse = l[a] > 0.f ? 1.f / l[a] : 0.f;
    for (int c = 0; c < kColumns; ++c) st_global(p.o + row * kDim + x + 16 * c, o[a][c] * inverse);
    if (x == 0) st_global(p.lse + row, l[a] > 0.f ? m[a] + log_natural(l[a]) : neg_inf());
  }
}

}  // namespace strobe

STROBE_KERNEL(strobe::kThreads, 1) kernel(STROBE_GRID_CONSTANT strobe::Params p) { strobe::attend(p); }

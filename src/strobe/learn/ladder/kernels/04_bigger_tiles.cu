// 04  Bigger tiles
//
// What changed: tiles of 64 queries and 64 keys. A thread has 4 x 4 scores instead of one, and keeps them in
//   registers while it works.
// Why it should help: traffic falls with the size of the tile. In the simplest model one side of B rows stays and
//   the other is fetched N / B times: fetching K and V so costs 2 N^2 d / B numbers, and beats the 4 N^2 of standard
//   attention only if B > d / 2; 16 is too small for any head dim above 32. And a thread that has loaded 4 + 4
//   numbers makes 16 products of them: half a load for each multiplication, where there were two.
// Predicted: x 4 the speed of 03: from two loads a multiplication to a half, with a quarter of the traffic besides.
// Measured: x 3.34, 1.02 TFLOP/s (NVIDIA H200; docs/ladder.md says how)
// What limits it now: one block for each head, so most of the GPU idles; and O still goes to memory and back for
//   every tile of keys.
#include "ladder.cuh"

namespace strobe {

constexpr int kThreads = 256, kRows = 64, kKeys = 64;
constexpr int kMyRows = 4, kMyKeys = 4;  // a thread has kMyRows x kMyKeys scores, 16 rows and 16 keys apart
STROBE_DEVICE int my_row(int a) { return thread_idx() / 16 + 16 * a; }
STROBE_DEVICE int my_column(int b) { return thread_idx() % 16 + 16 * b; }  // or key
typedef SharedTile<kDim> Tile;    // of Q, K or V
typedef SharedTile<kKeys> Weights;  // P
constexpr int kOffsetK = Tile::bytes(kRows), kOffsetV = kOffsetK + Tile::bytes(kKeys);
constexpr int kOffsetP = kOffsetV + Tile::bytes(kKeys);
static_assert(kSmem == kOffsetP + Weights::bytes(kRows), "the shared memory that Python asks for");

STROBE_DEVICE void attend(const Params& p) {
  const int slice = block_idx();
  const Tile q_tile{smem_base()}, k_tile{smem_base() + kOffsetK}, v_tile{smem_base() + kOffsetV};
  const Weights p_tile{smem_base() + kOffsetP};
  const Element* q = p.q + i64(slice) * p.len_q * kDim;
  const Element* k = p.k + i64(slice) * p.len_k * kDim;
  const Element* v = p.v + i64(slice) * p.len_k * kDim;
  Element* o = p.o + i64(slice) * p.len_q * kDim;
  float* row_m = p.workspace + i64(slice) * p.len_q;  // the statistics of the rows, in memory as O is
  float* row_l = row_m + i64(p.slices) * p.len_q;

  for (int key0 = 0; key0 < p.len_k; key0 += kKeys) {
    k_tile.load(k, key0, kKeys, p.len_k, kThreads);
    v_tile.load(v, key0, kKeys, p.len_k, kThreads);
    const bool first = key0 == 0, last = key0 + kKeys >= p.len_k;
    for (int row0 = 0; row0 < p.len_q; row0 += kRows) {
      q_tile.load(q, row0, kRows, p.len_q, kThreads);
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
      float alpha[kMyRows], l_old[kMyRows], l[kMyRows], m[kMyRows];
      for (int a = 0; a < kMyRows; ++a) {
        const int query = row0 + my_row(a);
        const bool fresh = first || query >= p.len_q;
        const float m_old = fresh ? neg_inf() : ld_global_fresh(row_m + query);
        l_old[a] = fresh ? 0.f : ld_global_fresh(row_l + query);
        float top = neg_inf(), sum = 0.f;
        for (int b = 0; b < kMyKeys; ++b) {
          s[a][b] = key0 + my_column(b) < visible_keys(p, query) ? s[a][b] * p.scale : neg_inf();
          top = fmax(top, s[a][b]);
        }
        m[a] = fmax(m_old, row_max(top));
        const float safe = m[a] == neg_inf() ? 0.f : m[a];
        for (int b = 0; b < kMyKeys; ++b) {
          const float weight = exp_natural(s[a][b] - safe);
          p_tile.set(my_row(a), my_column(b), weight);
          sum += weight;
        }
        alpha[a] = exp_natural(m_old - safe);
        l[a] = alpha[a] * l_old[a] + row_sum(sum);
      }
      sync_block();  // P is complete

      // O stays normalised: take the old division back, rescale, add, divide again.
      for (int column = my_column(0); column < kDim; column += 16) {
        float sum[kMyRows] = {};
        for (int i = 0; i < kKeys; ++i) {
          const float value = v_tile.get(i, column);
          for (int a = 0; a < kMyRows; ++a) sum[a] = fma(p_tile.get(my_row(a), i), value, sum[a]);
        }
        for (int a = 0; a < kMyRows; ++a) {
          const int query = row0 + my_row(a);
          if (query >= p.len_q) continue;
          const float o_old = first ? 0.f : ld_global_fresh(o + i64(query) * kDim + column);
          const float inverse = l[a] > 0.f ? 1.f / l[a] : 0.f;
          st_global(o + i64(query) * kDim + column, (o_old * l_old[a] * alpha[a] + sum[a]) * inverse);
        }
      }
      for (int a = 0; a < kMyRows; ++a) {
        const int query = row0 + my_row(a);
        if (my_column(0) != 0 || query >= p.len_q) continue;
        st_global(row_m + query, m[a]);
        st_global(row_l + query, l[a]);
        if (last) st_global(p.lse + i64(slice) * p.len_q + query, l[a] > 0.f ? m[a] + log_natural(l[a]) : neg_inf());
      }
      sync_block();  // nobody reads Q and P any more, nor, after the last queries, K and V
    }
  }
}

}  // namespace strobe

STROBE_KERNEL(strobe::kThreads, 1) kernel(STROBE_GRID_CONSTANT strobe::Params p) { strobe::attend(p); }

// 03  FlashAttention as in the first paper, in tiles of 16
//
// What changed: one kernel, and no N x N matrix. A block owns a head. It goes over the keys in tiles of 16 and, for
//   each of them, over all queries in tiles of 16; scores and weights live in shared memory for the moment that they
//   are needed. The softmax is online: O, the row maximum m and the row sum l are kept in memory, and corrected each
//   time that a tile brings a larger maximum.
// Why it should help: S and P are never stored; memory grows with N, not N^2. That is the whole idea, and this is
//   the kernel that everybody writes first.
// Predicted: x 0.1 the speed of 02. Slower! A head is one block: 16 heads keep 16 of 132 multiprocessors busy. The
//   arithmetic is that of 02, with as many loads for each multiplication. And the traffic is no better than that of
//   a good standard attention: with tiles of B keys, Q, and O to and fro, are moved N / B times, 3 N^2 d / 16
//   numbers in all, more than the 4 N^2 of S and P as soon as d > 21.
// Measured: x 0.06, 0.305 TFLOP/s (NVIDIA H200; docs/ladder.md says how)
// What limits it now: traffic of Q and O, two shared-memory loads for each multiplication, and too few blocks.
#include "ladder.cuh"

namespace strobe {

constexpr int kThreads = 256, kRows = 16, kKeys = 16;
typedef SharedTile<kDim> Tile;    // of Q, K or V
typedef SharedTile<kKeys> Weights;  // P
constexpr int kOffsetK = Tile::bytes(kRows), kOffsetV = kOffsetK + Tile::bytes(kKeys);
constexpr int kOffsetP = kOffsetV + Tile::bytes(kKeys);
static_assert(kSmem == kOffsetP + Weights::bytes(kRows), "the shared memory that Python asks for");

STROBE_DEVICE void attend(const Params& p) {
  const int slice = block_idx(), y = thread_idx() / 16, x = thread_idx() % 16;
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

      // S = Q K^T, one score a thread
      const int query = row0 + y, key = key0 + x;
      float s = 0.f;
      for (int i = 0; i < kDim; ++i) s = fma(q_tile.get(y, i), k_tile.get(x, i), s);
      s = key < visible_keys(p, query) ? s * p.scale : neg_inf();

      // The online softmax: what was summed before belongs to the old maximum, and alpha brings it to the new one.
      const bool there = query < p.len_q;
      const float m_old = first || !there ? neg_inf() : ld_global_fresh(row_m + query);
      const float l_old = first || !there ? 0.f : ld_global_fresh(row_l + query);
      const float m = fmax(m_old, row_max(s)), safe = m == neg_inf() ? 0.f : m;
      const float alpha = exp_natural(m_old - safe), weight = exp_natural(s - safe);
      const float l = alpha * l_old + row_sum(weight), inverse = l > 0.f ? 1.f / l : 0.f;
      p_tile.set(y, x, weight);
      sync_block();  // P is complete

      // O stays normalised: take the old division back, rescale, add, divide again.
      for (int column = x; column < kDim; column += 16) {
        float sum = 0.f;
        for (int i = 0; i < kKeys; ++i) sum = fma(p_tile.get(y, i), v_tile.get(i, column), sum);
        if (!there) continue;
        const float o_old = first ? 0.f : ld_global_fresh(o + i64(query) * kDim + column);
        st_global(o + i64(query) * kDim + column, (o_old * l_old * alpha + sum) * inverse);
      }
      if (there && x == 0) {
        st_global(row_m + query, m);
        st_global(row_l + query, l);
        if (last) st_global(p.lse + i64(slice) * p.len_q + query, l > 0.f ? m + log_natural(l) : neg_inf());
      }
      sync_block();  // nobody reads Q and P any more, nor, after the last queries, K and V
    }
  }
}

}  // namespace strobe

STROBE_KERNEL(strobe::kThreads, 1) kernel(STROBE_GRID_CONSTANT strobe::Params p) { strobe::attend(p); }

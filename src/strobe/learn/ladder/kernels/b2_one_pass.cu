// b2  One pass: five products, dQ by atomic sums
//
// What changed: two passes become one. In b1 P and dS are recomputed twice, once for dK and dV and once for dQ. Here
//   the block that owns keys also multiplies its tile of dS by K. That is a part of dQ: the part that comes from these
//   keys. Blocks with other keys have other parts of the same rows, so they meet in memory and add: dQ begins at zero,
//   and every block adds to it atomically.
// Why it should help: five products instead of seven, and K, V, Q and dO are read by one pass instead of two.
// Predicted: x 1.3 the speed of b1. Five products instead of seven would be x 1.4. The atomic sums take some of it
//   back: each number of dQ is added N / 32 times.
// Measured: x 1.51, 17.4 TFLOP/s (NVIDIA H200; docs/ladder.md says how)
// What limits it now: scalar units, as in b1 and 05. And there is a price that no clock shows: which block adds first
//   differs from run to run, fp32 sums depend on their order, and so dQ differs in its last bits from run to run.
#include <strobe/ptx/atomic.cuh>
#include "ladder.cuh"

namespace strobe {

constexpr int kThreads = 256, kRows = 32, kKeys = 32;
constexpr int kPatch = 2;  // a thread has kPatch x kPatch scores, 16 rows and 16 keys apart
constexpr int kColumns = kDim / 16;                                // and kPatch x kColumns numbers of a gradient
typedef SharedTile<kDim> Tile;      // of Q, dO, K or V
typedef SharedTile<kKeys> Weights;  // P or dS
constexpr int kOffsetDo = Tile::bytes(kRows), kOffsetK = kOffsetDo + Tile::bytes(kRows);
constexpr int kOffsetV = kOffsetK + Tile::bytes(kKeys);
constexpr int kOffsetP = kOffsetV + Tile::bytes(kKeys), kOffsetDs = kOffsetP + Weights::bytes(kRows);
static_assert(kSmem == kOffsetDs + Weights::bytes(kRows), "the shared memory that Python asks for");

struct Block {
  Tile q{smem_base()}, d_o{smem_base() + kOffsetDo}, k{smem_base() + kOffsetK}, v{smem_base() + kOffsetV};
  Weights p{smem_base() + kOffsetP}, ds{smem_base() + kOffsetDs};
  int y = thread_idx() / 16, x = thread_idx() % 16;
};

// One warp per row; and zeros where dQ will be summed up.
STROBE_DEVICE void delta(const Params& p) {
  const i64 row = i64(block_idx()) * (kThreads / 32) + thread_idx() / 32;
  if (row >= i64(p.slices) * p.len_q) return;
  float sum = 0.f;
  for (int i = thread_idx() % 32; i < kDim; i += 32)
    sum = fma(ld_global(p.d_o + row * kDim + i), ld_global(p.o + row * kDim + i), sum);
  for (int i = thread_idx() % 32; i < kDim; i += 32) st_global(p.dq + row * kDim + i, 0.f);
  sum = row_sum(sum + shfl_xor(sum, 16));
  if (thread_idx() % 32 == 0) st_global(p.workspace + row, sum);
}

// P and dS of one tile, from Q, K, dO, V in shared memory, into shared memory. P = 0 where a query does not see a key.
STROBE_DEVICE void recompute(const Params& p, const Block& b, int slice, int row0, int key0) {
  float s[kPatch][kPatch] = {}, dp[kPatch][kPatch] = {};  // S = Q K^T, dP = dO V^T
  for (int i = 0; i < kDim; ++i) {
    float q[kPatch], d_o[kPatch], k[kPatch], v[kPatch];
    for (int a = 0; a < kPatch; ++a) q[a] = b.q.get(b.y + 16 * a, i), d_o[a] = b.d_o.get(b.y + 16 * a, i);
    for (int c = 0; c < kPatch; ++c) k[c] = b.k.get(b.x + 16 * c, i), v[c] = b.v.get(b.x + 16 * c, i);
    for (int a = 0; a < kPatch; ++a)
      for (int c = 0; c < kPatch; ++c) s[a][c] = fma(q[a], k[c], s[a][c]), dp[a][c] = fma(d_o[a], v[c], dp[a][c]);
  }
  for (int a = 0; a < kPatch; ++a) {
    const int query = row0 + b.y + 16 * a;
    const bool there = query < p.len_q;
    const i64 row = i64(slice) * p.len_q + query;
    const float lse = there ? ld_global(p.lse + row) : 0.f, delta = there ? ld_global(p.workspace + row) : 0.f;
    for (int c = 0; c < kPatch; ++c) {
      const bool visible = there && key0 + b.x + 16 * c < visible_keys(p, query);
      const float weight = visible ? exp_natural(s[a][c] * p.scale - lse) : 0.f;
      b.p.set(b.y + 16 * a, b.x + 16 * c, weight);
      b.ds.set(b.y + 16 * a, b.x + 16 * c, weight * (dp[a][c] - delta) * p.scale);
    }
  }
}

STROBE_DEVICE void store(float* to, const float (&sum)[kPatch][kColumns], const Block& b, int first, int length) {
  for (int a = 0; a < kPatch; ++a)
    for (int c = 0; c < kColumns; ++c)
      if (first + b.y + 16 * a < length) st_global(to + i64(first + b.y + 16 * a) * kDim + b.x + 16 * c, sum[a][c]);
}

STROBE_DEVICE void gradients(const Params& p) {
  const Block b;
  const int blocks = (p.len_k + kKeys - 1) / kKeys, slice = block_idx() / blocks, key0 = block_idx() % blocks * kKeys;
  const i64 queries = i64(slice) * p.len_q * kDim, keys = i64(slice) * p.len_k * kDim;
  b.k.load(p.k + keys, key0, kKeys, p.len_k, kThreads);
  b.v.load(p.v + keys, key0, kKeys, p.len_k, kThreads);
  float dk[kPatch][kColumns] = {}, dv[kPatch][kColumns] = {};
  const int first = p.causal ? max(0, key0 - (p.len_k - p.len_q)) : 0;  // the first query that sees any of these keys
  for (int row0 = first / kRows * kRows; row0 < p.len_q; row0 += kRows) {
    b.q.load(p.q + queries, row0, kRows, p.len_q, kThreads);
    b.d_o.load(p.d_o + queries, row0, kRows, p.len_q, kThreads);
    sync_block();  // the four tiles have arrived
    recompute(p, b, slice, row0, key0);
    sync_block();  // P and dS are complete
    // dV += P^T dO, dK += dS^T Q: they belong to the block's keys, and stay
    for (int i = 0; i < kRows; ++i) {
      float weight[kPatch], ds[kPatch];
      for (int a = 0; a < kPatch; ++a) weight[a] = b.p.get(i, b.y + 16 * a), ds[a] = b.ds.get(i, b.y + 16 * a);
      for (int c = 0; c < kColumns; ++c) {
        const float d_o = b.d_o.get(i, b.x + 16 * c), q = b.q.get(i, b.x + 16 * c);
        for (int a = 0; a < kPatch; ++a) dv[a][c] = fma(weight[a], d_o, dv[a][c]), dk[a][c] = fma(ds[a], q, dk[a][c]);
      }
    }
    // dQ += dS K: it belongs to the queries, which all blocks of keys share
    float dq[kPatch][kColumns] = {};
    for (int i = 0; i < kKeys; ++i) {
      float ds[kPatch];
      for (int a = 0; a < kPatch; ++a) ds[a] = b.ds.get(b.y + 16 * a, i);
      for (int c = 0; c < kColumns; ++c) {
        const float k = b.k.get(i, b.x + 16 * c);
        for (int a = 0; a < kPatch; ++a) dq[a][c] = fma(ds[a], k, dq[a][c]);
      }
    }
    for (int a = 0; a < kPatch; ++a)
      for (int c = 0; c < kColumns; ++c)
        if (row0 + b.y + 16 * a < p.len_q)
          atomic_add(p.dq + queries + i64(row0 + b.y + 16 * a) * kDim + b.x + 16 * c, dq[a][c]);
    sync_block();  // nobody reads Q, dO, P and dS any more
  }
  store(p.dk + keys, dk, b, key0, p.len_k);
  store(p.dv + keys, dv, b, key0, p.len_k);
}

}  // namespace strobe

// The two are launched one after the other.
STROBE_KERNEL(strobe::kThreads, 1) kernel(STROBE_GRID_CONSTANT strobe::Params p) {
  if (p.stage == 0) strobe::delta(p);
  if (p.stage == 1) strobe::gradients(p);
}

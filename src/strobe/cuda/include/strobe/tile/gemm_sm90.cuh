// The two matrix products of attention on wgmma, for one warpgroup that owns 64 query rows. Both only issue: fence
// before, commit and wait after.
#pragma once
#include <strobe/ptx/wgmma.cuh>
#include <strobe/tile/swizzle.cuh>

namespace strobe {

constexpr u32 kGroupBytes = 8 * kPanelRowBytes;  // eight rows of a panel: the unit of the swizzle

// Offsets of the products of a chain, in the 16-byte units of descriptors. Along K a K-major operand moves by 32 bytes
// inside a panel, then to the next panel; an MN-major one, which has 16-bit elements, moves by 16 rows.
template <int kRows> struct AlongK {
  static constexpr STROBE_DEVICE int step(int i) { return i / 4 * (kRows * int(kPanelRowBytes) / 16) + i % 4 * 2; }
};
struct DownRows {
  static constexpr STROBE_DEVICE int step(int i) { return i * (16 * int(kPanelRowBytes) / 16); }
};

STROBE_DEVICE u64 k_major(u32 tile) { return wgmma_desc(tile, 0, kGroupBytes); }
STROBE_DEVICE u64 mn_major(u32 tile, int rows) { return wgmma_desc(tile, rows * kPanelRowBytes, kGroupBytes); }

// S = Q K^T: q a 64-row tile, k the first kKeys rows of a tile of kRowsK, both in shared memory.
template <class T, int kKeys, int kDim, int kRowsK> STROBE_DEVICE void gemm_qk(float (&s)[kKeys / 2], u64 q, u64 k) {
  Wgmma<T, kKeys>::template ss_zero<kDim / kMmaK<T>, AlongK<64>, AlongK<kRowsK>>(s, q, k);
}

// S^T = K Q^T: k 64 rows of a tile of kRowsK, q a tile of kQueries rows, both in shared memory.
template <class T, int kQueries, int kDim, int kRowsK>
STROBE_DEVICE void gemm_kq(float (&s)[kQueries / 2], u64 k, u64 q) {
  Wgmma<T, kQueries>::template ss_zero<kDim / kMmaK<T>, AlongK<kRowsK>, AlongK<kQueries>>(s, k, q);
}

// dQ = dS K, 64 x 64: ds a panel of dS^T, k a panel of K, both of kKeys rows and MN-major.
template <class T, int kKeys> STROBE_DEVICE void gemm_dsk(float (&dq)[32], u64 ds, u64 k) {
  Wgmma<T, 64>::template ss_tt_zero<kKeys / kMmaK<T>, DownRows, DownRows>(dq, ds, k);
}

// O += P V: P in registers, v a tile of kKeys rows.
template <class T, int kKeys, int kDimV> STROBE_DEVICE void gemm_pv(float (&o)[kDimV / 2], u32 (&p)[kKeys / 4], u64 v) {
  Wgmma<T, kDimV>::template rs_t<kKeys / kMmaK<T>, DownRows>(o, p, v);
}
template <class T, int kKeys, int kDimV>
STROBE_DEVICE void gemm_pv(Accumulators<T, kDimV>& o, u32 (&p)[kKeys / 4], u64 v) {
  o.template rs_t<kKeys / kMmaK<T>, DownRows>(p, v);
}

}  // namespace strobe

// Standard attention as three kernels on the matrix units: what fused attention is measured against once arithmetic is
// not the excuse.
//     S = scale * Q K^T  ->  memory  ->  P = softmax(S)  ->  memory  ->  O = P V
// S and P are N x N in the inputs' own 16 bits, as PyTorch's half-precision form has them; a row of theirs is padded to
// `stride_s`.
#pragma once
#include <strobe/ptx/warp.cuh>
#include <strobe/tile/copy.cuh>
#include <strobe/tile/gemm_sm80.cuh>
#include <strobe/tile/softmax.cuh>

namespace strobe {

// A warp's kRows x kColumns of fp32 results leave through shared memory, so that rows are written in 16-byte pieces.
// `tile` has kTileRows rows, of which this warp writes and reads its own only. `value(t, i)` is accumulator i of row
// block t.
template <class T, int kTiles, int kTileRows, int kColumns, class Value>
STROBE_DEVICE void store_rows(u32 tile, int warp_row, u16* out, i64 row_stride, int rows_there, int columns_there,
                              Value value) {
  const int lane = thread_idx() % 32;
  sync_warp();
#pragma unroll
  for (int t = 0; t < kTiles; ++t)
#pragma unroll
    for (int r = 0; r < 2; ++r)
#pragma unroll
      for (int i = 0; i < kColumns / 8; ++i)
        st_shared(tile + chunk_offset(kTileRows, warp_row + 16 * t + lane / 4 + 8 * r, i) + 4 * (lane % 4),
                  pack2<T>(value(t, 4 * i + 2 * r), value(t, 4 * i + 2 * r + 1)));
  sync_warp();
  constexpr int kChunks = kColumns / 8;
#pragma unroll
  for (int i = 0; i < kTiles * 16 * kChunks / 32; ++i) {
    const int row = warp_row + (i * 32 + lane) / kChunks, chunk = (i * 32 + lane) % kChunks;
    if (row < rows_there && chunk * 8 < columns_there)
      st_global(out + row * row_stride + chunk * 8, ld_shared_x4(tile + chunk_offset(kTileRows, row, chunk)));
  }
}

template <class Config, class Mask, class Params> STROBE_DEVICE void standard_mma_scores(const Params& p) {
  using T = typename Config::Element;
  constexpr int kBlockM = Config::kBlockM, kBlockN = Config::kBlockN, kDim = Config::kDim, kThreads = 128,
                kTiles = kBlockM / 64;
  const int across = (p.stride_s + kBlockN - 1) / kBlockN, down = (p.len_q + kBlockM - 1) / kBlockM;
  u32 index = block_idx();
  const int key0 = index % across * kBlockN;
  index /= across;
  const int row0 = index % down * kBlockM, slice = index / down, batch = slice / p.heads, head = slice % p.heads;
  const u32 q_tile = smem_base(), k_tile = q_tile + tile_bytes<T>(kBlockM, kDim);
  copy_tile_async<kBlockM, kDim, kThreads, false, false>(
      q_tile, p.q + batch * p.q_batch + head * p.q_head + i64(row0) * p.q_row, p.q_row, p.len_q - row0, p.dim);
  copy_tile_async<kBlockN, kDim, kThreads, false, false>(
      k_tile, p.k + batch * p.k_batch + (head / p.group) * p.k_head + i64(key0) * p.k_row, p.k_row, p.len_k - key0,
      p.dim);
  cp_async_commit();
  cp_async_wait<0>();
  sync_block();

  const int lane = thread_idx() % 32, warp_row = thread_idx() / 32 * 16 * kTiles;
  float s[kTiles][kBlockN / 2];
  gemm_qk<T, kTiles, kBlockM, kBlockN, kDim>(s, lane_address_a(q_tile + warp_row * kPanelRowBytes, kBlockM),
                                             lane_address_b(k_tile, kBlockN));
  const Mask mask{p.len_q, p.len_k, p.mask};
#pragma unroll
  for (int t = 0; t < kTiles; ++t) {
    const int row = row0 + warp_row + 16 * t + lane / 4, column = key0 + 2 * (lane % 4);
#pragma unroll
    for (int i = 0; i < kBlockN / 2; ++i) s[t][i] *= p.scale;
    const int lo[2] = {mask.lo(row) - column, mask.lo(row + 8) - column},
              hi[2] = {mask.hi(row) - column, mask.hi(row + 8) - column};
    mask_fragment<true>(s[t], lo, hi);
  }
  sync_block();  // everyone is done with Q and K: their place serves for the result
  store_rows<T, kTiles, kBlockM, kBlockN>(q_tile, warp_row, p.s + (i64(slice) * p.len_q + row0) * p.stride_s + key0,
                                          p.stride_s, p.len_q - row0, p.stride_s - key0,
                                          [&](int t, int i) { return s[t][i]; });
}

// One warp per row: maximum, sum, weights. The row comes from memory once and from the cache twice.
template <class Config, class Mask, class Params> STROBE_DEVICE void standard_mma_softmax(const Params& p) {
  using T = typename Config::Element;
  constexpr int kWarps = 4;
  const i64 row = i64(block_idx()) * kWarps + thread_idx() / 32;
  if (row >= i64(p.batch) * p.heads * p.len_q) return;
  const int lane = thread_idx() % 32;
  const int* s = reinterpret_cast<const int*>(p.s + row * p.stride_s);
  u32* weights = reinterpret_cast<u32*>(p.p + row * p.stride_s);
  const int pairs = p.stride_s / 2;
  float top = neg_inf();
  for (int i = lane; i < pairs; i += 32) {
    const u32 x = u32(ld_global(s + i));
    top = fmax(top, fmax(to_float<T>(u16(x & 0xffffu)), to_float<T>(u16(x >> 16))));
  }
#pragma unroll
  for (int reach = 16; reach; reach /= 2) top = fmax(top, shfl_xor(top, reach));
  const float shift = top == neg_inf() ? 0.f : -top * kLog2e;
  float sum = 0.f;
  for (int i = lane; i < pairs; i += 32) {
    const u32 x = u32(ld_global(s + i));
    sum += exp2_approx(fma(to_float<T>(u16(x & 0xffffu)), kLog2e, shift)) +
           exp2_approx(fma(to_float<T>(u16(x >> 16)), kLog2e, shift));
  }
#pragma unroll
  for (int reach = 16; reach; reach /= 2) sum += shfl_xor(sum, reach);
  const float inverse = sum > 0.f ? 1.f / sum : 0.f;
  for (int i = lane; i < pairs; i += 32) {
    const u32 x = u32(ld_global(s + i));
    st_global(weights + i, pack2<T>(exp2_approx(fma(to_float<T>(u16(x & 0xffffu)), kLog2e, shift)) * inverse,
                                    exp2_approx(fma(to_float<T>(u16(x >> 16)), kLog2e, shift)) * inverse));
  }
}

template <class Config, class Mask, class Params> STROBE_DEVICE void standard_mma_values(const Params& p) {
  using T = typename Config::Element;
  constexpr int kBlockM = Config::kBlockM, kKeys = 64, kDimV = Config::kDim, kThreads = 128, kTiles = kBlockM / 64;
  const int down = (p.len_q + kBlockM - 1) / kBlockM;
  const int row0 = block_idx() % down * kBlockM, slice = block_idx() / down, batch = slice / p.heads,
            head = slice % p.heads;
  const u16* weights = p.p + (i64(slice) * p.len_q + row0) * p.stride_s;
  const u16* v = p.v + batch * p.v_batch + (head / p.group) * p.v_head;
  constexpr u32 kStage = tile_bytes<T>(kBlockM, kKeys) + tile_bytes<T>(kKeys, kDimV);
  const auto load = [&](int n) {
    const u32 p_tile = smem_base() + (n & 1) * kStage;
    copy_tile_async<kBlockM, kKeys, kThreads, false, false>(p_tile, weights + n * kKeys, p.stride_s, p.len_q - row0,
                                                            p.stride_s - n * kKeys);
    copy_tile_async<kKeys, kDimV, kThreads, false, false>(
        p_tile + tile_bytes<T>(kBlockM, kKeys), v + i64(n) * kKeys * p.v_row, p.v_row, p.len_k - n * kKeys, p.dim_v);
    cp_async_commit();
  };
  const int warp_row = thread_idx() / 32 * 16 * kTiles, blocks = (p.len_k + kKeys - 1) / kKeys;
  float o[kTiles][kDimV / 2];
#pragma unroll
  for (int t = 0; t < kTiles; ++t)
#pragma unroll
    for (int i = 0; i < kDimV / 2; ++i) o[t][i] = 0.f;
  load(0);
  for (int n = 0; n < blocks; ++n) {
    cp_async_wait<0>();
    sync_block();  // block n is here, and nobody reads the other buffer any more
    if (n + 1 < blocks) load(n + 1);
    const u32 p_tile = smem_base() + (n & 1) * kStage;
    const u32 p_lane = lane_address_a(p_tile + warp_row * kPanelRowBytes, kBlockM);
    u32 fragment[kTiles][kKeys / 4];
#pragma unroll
    for (int t = 0; t < kTiles; ++t)
#pragma unroll
      for (int step = 0; step < kKeys / 16; ++step) {
        u32* a = &fragment[t][4 * step];
        ldmatrix_x4(step_columns(p_lane, kBlockM, step) + t * (16 * kPanelRowBytes), a[0], a[1], a[2], a[3]);
      }
    gemm_pv<T, kTiles, kKeys, kDimV>(o, fragment, lane_address_a(p_tile + tile_bytes<T>(kBlockM, kKeys), kKeys));
  }
  sync_block();
  store_rows<T, kTiles, kBlockM, kDimV>(smem_base(), warp_row,
                                        p.o + batch * p.o_batch + head * p.o_head + i64(row0) * p.o_row, p.o_row,
                                        p.len_q - row0, p.dim_v, [&](int t, int i) { return o[t][i]; });
}

}  // namespace strobe

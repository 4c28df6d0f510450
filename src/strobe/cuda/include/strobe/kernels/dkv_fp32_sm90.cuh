// dK and dV on Hopper for fp32 inputs, in three bf16 terms each (tile/terms.cuh). dq_fp32_sm90.cuh has dQ.
//
// A block owns 64 keys, one consumer warpgroup computes dV and the other dK, as in dkv_sm90.cuh, which says what
// becomes of S and dP and how P^T goes from one to the other. In a consumer one product waits for the other; the tensor
// cores have the other consumer's meanwhile.
#pragma once
#include <strobe/kernels/dkv_sm90.cuh>
#include <strobe/tile/terms.cuh>

namespace strobe {

template <class Config, class Mask, class Score, class Params> struct DkvFp32Sm90
    : DkvSm90<Config, Mask, Score, Params> {
  using Dkv = DkvSm90<Config, Mask, Score, Params>;
  using Offset = typename Dkv::Offset;
  using Bytes = typename Dkv::Bytes;
  using Keys = typename Dkv::Keys;
  using Dkv::blocks;
  using Dkv::d_o;
  using Dkv::do_before;
  using Dkv::p;
  using Dkv::q;
  using Dkv::q_before;
  using Dkv::smem;
  using Dkv::tile;
  static constexpr int kBlockM = Config::kBlockM, kDim = Config::kDim, kDimV = Config::kDimV;
  static constexpr int kScores = kBlockM / 2;  // of one thread

  STROBE_DEVICE DkvFp32Sm90(const Params& params, const KeyTile& tile, bool producer, bool gives_weights)
      : Dkv(params, tile, 0, producer, gives_weights) {}

  // ---- producer: one thread -----------------------------------------------------------------------------------------
  STROBE_DEVICE void produce() {
    if (!blocks.any()) return;
    Dkv::template load_kv<kTerms * kDim>(Offset::k, &p.map_k_terms, smem + Offset::kv_barriers, 0);
    Dkv::template load_kv<kTerms * kDimV>(Offset::v, &p.map_v_terms, smem + Offset::kv_barriers + 8, 0);
    wait_for_previous_grid();  // the statistics are delta.cuh's
#pragma unroll 1
    for (int head = tile.head_k * p.group; head < (tile.head_k + 1) * p.group; ++head)
#pragma unroll 1
      for (int m = blocks.first; m < blocks.end; ++m) {
        Dkv::template load<kTerms * kDim>(q, Offset::q, &p.map_q_terms, Offset::lse, p.lse2, 0, head, m);
        Dkv::template load<kTerms * kDimV>(d_o, Offset::d_o, &p.map_d_o_terms, Offset::delta, p.delta, 0, head, m);
      }
  }

  // ---- consumers ----------------------------------------------------------------------------------------------------
  // S^T or dP^T, from a tile of keys and a buffer of queries.
  template <int kColumns, class Ring>
  STROBE_DEVICE void first_product(float (&s)[kScores], u32 keys, u32 queries, const Ring& ring) const {
    ring.wait_full();
    wgmma_fence();
    gemm_terms<kBlockM, kColumns, 64, kBlockM>(
        s, k_major(keys), k_major(queries + ring.stage * tile_bytes<bf16>(kBlockM, kTerms * kColumns)));
    wgmma_commit();
    wgmma_wait<0>();
    pin(s);
  }
  // dV += P^T dO, or dK += dS^T Q.
  template <int kColumns, class Ring> STROBE_DEVICE void second_product(float (&d)[kColumns / 2],
                                                                        const float (&s)[kScores], u32 queries,
                                                                        Ring& ring) const {
    Terms<kScores / 2> left;
    left.split(s);
    float sum[kColumns / 2];  // of this block
    ring.wait_full();
    wgmma_fence();
    gemm_terms_t<kColumns, kBlockM>(
        sum, left, mn_major(queries + ring.stage * tile_bytes<bf16>(kBlockM, kTerms * kColumns), kBlockM));
    wgmma_commit();
    wgmma_wait<0>();
    pin(sum);
    ring.release_and_advance();
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) d[i] += sum[i];
  }
  template <int kColumns>
  STROBE_DEVICE void store(float (&d)[kColumns / 2], float scale, float* to, i64 row, int columns) const {
    Fp32Rows{to, row, tile.k.length - tile.key0, columns}.store(Rounded<float, kColumns>{d, scale}, 0);
  }

  STROBE_DEVICE void consume_dv() {
    const Keys keys(Dkv::mask(), tile.key0, tile.q.length, tile.k.length, smem + Offset::keys);
    float dv[kDimV / 2];
#pragma unroll
    for (float& x : dv) x = 0.f;
    if (blocks.any()) mbar_wait(smem + Offset::kv_barriers, 0);
    const auto step = [&](int head, int m) {
      float s[kScores];
      first_product<kDim>(s, smem + Offset::k, smem + Offset::q, q);
      Dkv::exponentials(s, keys, head, m);
      q.release_and_advance();
      second_product<kDimV>(dv, s, smem + Offset::d_o, do_before);
    };
    every_block(step);
    store<kDimV>(dv, 1.f, tile.rows_of(p.dv, p.dv_batch, p.dv_head, p.dv_row), p.dv_row, p.dim_v);
  }
  STROBE_DEVICE void consume_dk() {
    const Keys keys(tile.key0);
    float dk[kDim / 2];
#pragma unroll
    for (float& x : dk) x = 0.f;
    if (blocks.any()) mbar_wait(smem + Offset::kv_barriers + 8, 0);
    const auto step = [&](int, int) {
      float dp[kScores];
      first_product<kDimV>(dp, smem + Offset::v, smem + Offset::d_o, d_o);
      Dkv::gradients(dp, keys);
      d_o.release_and_advance();
      second_product<kDim>(dk, dp, smem + Offset::q, q_before);
    };
    every_block(step);
    store<kDim>(dk, p.scale_grad, tile.rows_of(p.dk, p.dk_batch, p.dk_head, p.dk_row), p.dk_row, p.dim);
  }
  template <class Step> STROBE_DEVICE void every_block(Step step) const {
#pragma unroll 1
    for (int head = tile.head_k * p.group; head < (tile.head_k + 1) * p.group; ++head)
#pragma unroll 1
      for (int m = blocks.first; m < blocks.end; ++m) step(head, m);
  }
};

template <class Config, class Mask, class Score, class Params> STROBE_DEVICE void dkv_fp32_sm90(const Params& p) {
  using Dkv = DkvFp32Sm90<Config, Mask, Score, Params>;
  const KeyTile tile = decode_key_tile<Config>(block_idx(), p);
  if (tile.key0 >= tile.k.length) return;  // varlen sequences shorter than the longest one
  if (thread_idx() == 0)
    for (const TensorMap* map : {&p.map_q_terms, &p.map_k_terms, &p.map_v_terms, &p.map_d_o_terms})
      tma_prefetch_map(map);
  init_block<Dkv>();
  const u32 warpgroup = warp_uniform(thread_idx() / 128);
  share_registers<Config>(warpgroup);
  if (warpgroup == 0) {
    Dkv work(p, tile, true, false);
    if (thread_idx() == 0) work.produce();
  } else if (warpgroup == 1) Dkv(p, tile, false, true).consume_dv();
  else Dkv(p, tile, false, false).consume_dk();
}

}  // namespace strobe

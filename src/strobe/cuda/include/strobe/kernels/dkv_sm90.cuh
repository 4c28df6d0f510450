// dK and dV on Hopper for head dims above 128. dq_sm90.cuh has dQ.
//
// A block owns 64 keys of one key head and loops over the blocks of 64 queries that see them, of all query heads of the
// group. The accumulators of dK and dV do not fit into the registers of one warpgroup, so two of them share the work:
//     the one for dV:  S^T = K Q^T,    P^T = exp(S^T - LSE),        dV += P^T dO
//     the one for dK:  dP^T = V dO^T,  dS^T = P^T (dP^T - delta),   dK += dS^T Q
// P^T goes from the first to the second through shared memory, in fp32 and thread by thread. In both, the second
// product of a block is in flight with the first product of the next one.
//
// Above head dim 256 registers hold only half of the columns of dK and of dV. Each half has a thread block of its own
// (kColumnParts = 2), and both compute S and dP. Blocks of queries are then shorter. Where shared memory has room for
// only one of them (kStages = 1), the second product of a block ends before the next block is loaded.
#pragma once
#include <strobe/pipeline/ring.cuh>
#include <strobe/pipeline/schedule.cuh>
#include <strobe/pipeline/scores.cuh>
#include <strobe/pipeline/staging.cuh>
#include <strobe/pipeline/warp_roles.cuh>
#include <strobe/ptx/bulk.cuh>
#include <strobe/tile/gemm_sm90.cuh>

namespace strobe {

template <class Config, class Mask, class Score, class Params> struct DkvSm90 {
  using T = typename Config::Element;
  static constexpr int kBlockM = Config::kBlockM, kBlockN = Config::kBlockN, kDim = Config::kDim, kDimV = Config::kDimV;
  static constexpr int kScores = kBlockM / 2;  // of one thread
  static constexpr bool kOneBox = Config::kOneBoxPerTile;
  static constexpr int kParts = Config::kColumnParts, kColumnsK = kDim / kParts, kColumnsV = kDimV / kParts;
  static constexpr bool kOverlaps = Config::kStages > 1;
  static_assert(kBlockN == 64 && kColumnsK <= 256, "a warpgroup has a row for each key");

  using Buffers = Ring<Config::kStages>;
  using Single = Ring<1>;
  using Offset = typename Config::Offset;  // of regions of shared memory, laid out by this kernel's module in cuda/
  using Bytes = typename Config::Bytes;    // of one buffer there

  const Params& p;
  const KeyTile tile;
  const QueryBlocks blocks;
  u32 smem;
  const int part;     // of the columns
  Buffers q, d_o;     // where the first product of a block finds its operand
  Buffers q_before;   // dK: Q of the block before
  Buffers do_before;  // dV: dO of the block before
  Single weights_ring;

  STROBE_DEVICE DkvSm90(const Params& params, const KeyTile& tile, int part, bool producer, bool gives_weights)
      : p(params), tile(tile),
        blocks(visible_query_blocks<kBlockM, kBlockN>(mask(), tile.key0, tile.q.length, tile.k.length)),
        smem(smem_base()), part(part), q(smem + Offset::ring_q, producer), d_o(smem + Offset::ring_do, producer),
        q_before(q), do_before(d_o), weights_ring(smem + Offset::ring_p, gives_weights) {}

  STROBE_DEVICE static void init_barriers() {
    mbar_init(smem_base() + Offset::kv_barriers, 1);
    mbar_init(smem_base() + Offset::kv_barriers + 8, 1);
    Buffers::init(smem_base() + Offset::ring_q, 8);  // one arrival a warp of the consumers
    Buffers::init(smem_base() + Offset::ring_do, 8);
    Single::init(smem_base() + Offset::ring_p, 4, 4);  // from the warps of one consumer to those of the other
    mbar_init_fence();
  }

  STROBE_DEVICE Mask mask() const { return mask_of<Mask, Config>(p, tile.q.length, tile.k.length, tile.positions); }
  STROBE_DEVICE const void* stat(const void* stats, int head, int m) const {
    const i64 first = first_stat<Config>(p, head, tile.batch, tile.q.first);
    return static_cast<const char*>(stats) + (first + m * kBlockM) * 4;
  }
  STROBE_DEVICE Box query_box(int head, int m) const {
    return Config::Queries::template box<kBlockM>(tile.q, head, m * kBlockM);
  }

  // ---- producer: one thread -----------------------------------------------------------------------------------------
  // A tile of Q or dO, and the statistics of its rows.
  template <int kColumns> STROBE_DEVICE void load(Buffers& ring, u32 offset, const TensorMap* map, u32 offset_row,
                                                  const void* stats, u32 offset_dropout, int head, int m) {
    constexpr u32 kBytes = tile_bytes<T>(kBlockM, kColumns);
    const u32 full = ring.begin_load(kBytes + Bytes::lse + (Config::kDropout ? Bytes::lse : 0)),
              row = ring.stage * Bytes::lse;
    tma_load_tile<T, kOneBox, kBlockM, kColumns>(smem + offset + ring.stage * kBytes, map, full, query_box(head, m));
    bulk_load(smem + offset_row + row, stat(stats, head, m), Bytes::lse, full);
    if (Config::kDropout) bulk_load(smem + offset_dropout + row, stat(p.dropout_rows, head, m), Bytes::lse, full);
    ring.next();
  }
  template <int kColumns> STROBE_DEVICE void load_kv(u32 offset, const TensorMap* map, u32 full, int buffer_rows) {
    mbar_arrive_expect_tx(full, tile_bytes<T>(kBlockN, kColumns));
    tma_load_tile<T, kOneBox, kBlockN, kColumns>(
        smem + offset, map, full, Config::Keys::template box<64>(tile.k, tile.head_kv, tile.key0, buffer_rows));
  }
  STROBE_DEVICE void produce() {
    if (!blocks.any()) return;
    load_kv<kDim>(0, &p.map_k, smem + Offset::kv_barriers, p.k_batch_rows);
    load_kv<kDimV>(Offset::v, &p.map_v, smem + Offset::kv_barriers + 8, p.v_batch_rows);
    wait_for_previous_grid();  // delta.cuh writes the statistics
#pragma unroll 1
    for (int head = tile.head_k * p.group; head < (tile.head_k + 1) * p.group; ++head)
#pragma unroll 1
      for (int m = blocks.first; m < blocks.end; ++m) {
        load<kDim>(q, Offset::q, &p.map_q, Offset::lse, p.lse2, Offset::dropout, head, m);
        load<kDimV>(d_o, Offset::d_o, &p.map_d_o, Offset::delta, p.delta, Offset::dropout + 2 * Bytes::lse, head, m);
      }
  }

  // ---- the consumer for dV ------------------------------------------------------------------------------------------
  using Keys = KeyFragment<Mask, kBlockM>;
  STROBE_DEVICE u32 exchange(int i) const { return smem + Offset::p + i * 512 + thread_idx() % 128 * 16; }

  // S^T -> P^T. The dK consumer gets P^T times the slope of the score.
  STROBE_DEVICE void exponentials(float (&s)[kScores], const Keys& keys, int head, int m) {
    const u32 rows = smem + 4 * keys.column, lse = rows + Offset::lse + q.stage * Bytes::lse;
    const Score score = Score::template of<Config>(p, tile.batch, head);
    const auto at = where<Score, Config, true>(tile, tile.positions, head, keys.key, m * kBlockM + keys.column);
    const bool masked = blocks.masked(m);
    typename Keys::Bounds bounds;
    if (masked) bounds = keys.bounds(m);
    weights_ring.wait_empty();
#pragma unroll
    for (int i = 0; i < kScores; i += 4) {
      float l[2], x[4];
      ld_shared_x2(lse + 8 * i, l[0], l[1]);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float y = score(s[i + j], at, i + j), weight = exp2_approx(fma(y, p.scale_log2, -l[j & 1]));
        const bool hidden = masked && bounds.hides(i + j);
        x[j] = hidden             ? 0.f
               : Score::kIdentity ? weight
                                  : times_slope<Score>(weight, score.slope(s[i + j], y, at, i + j));
        s[i + j] = hidden ? 0.f : weight;
      }
      st_shared(exchange(i), u32x4{as_bits(x[0]), as_bits(x[1]), as_bits(x[2]), as_bits(x[3])});
    }
    sync_warp();
    if (elected()) mbar_arrive(weights_ring.full_barrier());
    weights_ring.next();
    if (Config::kDropout) {
#pragma unroll
      for (int i = 0; i < kScores; i += 4) {
        bool keep[4];
        keys.kept(keep, rows + Offset::dropout + q.stage * Bytes::lse + 8 * i, i, p.dropout_threshold);
#pragma unroll
        for (int j = 0; j < 4; ++j) s[i + j] = keep[j] ? s[i + j] : 0.f;
      }
      if (!kOverlaps) sync_warp();  // all lanes have read what the next block overwrites
    }
  }
  STROBE_DEVICE void issue_dv(Accumulators<T, kColumnsV>& dv, u32 (&weights)[kScores / 2]) const {
    const u32 columns = part * tile_bytes<T>(kBlockM, kColumnsV);
    do_before.wait_full();
    wgmma_fence();
    gemm_pv<T, kBlockM, kColumnsV>(dv, weights,
                                   mn_major(smem + Offset::d_o + do_before.stage * Bytes::d_o + columns, kBlockM));
    wgmma_commit();
  }
  template <bool kFirst> STROBE_DEVICE void step_dv(Accumulators<T, kColumnsV>& dv, u32 (&weights)[kScores / 2],
                                                    const Keys& keys, int head, int m) {
    float s[kScores];
    q.wait_full();
    wgmma_fence();
    gemm_kq<T, kBlockM, kDim, kBlockN>(s, k_major(smem), k_major(smem + Offset::q + q.stage * Bytes::q));
    wgmma_commit();
    if (!kFirst) issue_dv(dv, weights);
    wgmma_wait<kFirst ? 0 : 1>();
    pin(s);
    exponentials(s, keys, head, m);
    q.release_and_advance();
    wgmma_wait<0>();
    pin(weights);
    if (!kFirst) do_before.release_and_advance();
    pack_fragment<T>(weights, s);
    if (!kOverlaps) {
      issue_dv(dv, weights);
      wgmma_wait<0>();
      pin(weights);
      do_before.release_and_advance();
    }
  }

  // ---- the consumer for dK ------------------------------------------------------------------------------------------
  // dP^T -> dS^T.
  STROBE_DEVICE void gradients(float (&dp)[kScores], const Keys& keys) {
    const u32 rows = smem + 4 * keys.column, delta = rows + Offset::delta + d_o.stage * Bytes::lse,
              dropout = rows + Offset::dropout + (2 + d_o.stage) * Bytes::lse;
    weights_ring.wait_full();
#pragma unroll
    for (int i = 0; i < kScores; i += 4) {
      float d[2];
      bool keep[4] = {true, true, true, true};
      ld_shared_x2(delta + 8 * i, d[0], d[1]);
      const u32x4 x = ld_shared_x4(exchange(i));
      const float weight[4] = {as_float(x.x), as_float(x.y), as_float(x.z), as_float(x.w)};
      if (Config::kDropout) keys.kept(keep, dropout + 8 * i, i, p.dropout_threshold);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (Config::kDropout) dp[i + j] = keep[j] ? dp[i + j] : 0.f;
        dp[i + j] = weight[j] * centred<Config::kDropout>(dp[i + j], p.dropout_scale, d[j & 1]);
      }
    }
    sync_warp();
    weights_ring.release_and_advance();
  }
  STROBE_DEVICE void issue_dk(Accumulators<T, kColumnsK>& dk, u32 (&slopes)[kScores / 2]) const {
    const u32 columns = part * tile_bytes<T>(kBlockM, kColumnsK);
    q_before.wait_full();
    wgmma_fence();
    gemm_pv<T, kBlockM, kColumnsK>(dk, slopes,
                                   mn_major(smem + Offset::q + q_before.stage * Bytes::q + columns, kBlockM));
    wgmma_commit();
  }
  template <bool kFirst>
  STROBE_DEVICE void step_dk(Accumulators<T, kColumnsK>& dk, u32 (&slopes)[kScores / 2], const Keys& keys) {
    float dp[kScores];
    d_o.wait_full();
    wgmma_fence();
    gemm_kq<T, kBlockM, kDimV, kBlockN>(dp, k_major(smem + Offset::v),
                                        k_major(smem + Offset::d_o + d_o.stage * Bytes::d_o));
    wgmma_commit();
    if (!kFirst) issue_dk(dk, slopes);
    wgmma_wait<kFirst ? 0 : 1>();
    pin(dp);
    gradients(dp, keys);
    d_o.release_and_advance();
    wgmma_wait<0>();
    pin(slopes);
    if (!kFirst) q_before.release_and_advance();
    pack_fragment<T>(slopes, dp);
    if (!kOverlaps) {
      issue_dk(dk, slopes);
      wgmma_wait<0>();
      pin(slopes);
      q_before.release_and_advance();
    }
  }

  // ---- both ---------------------------------------------------------------------------------------------------------
  // Calls first(head, m) for the first block and then(head, m) for the others. Returns whether there are any blocks.
  template <class First, class Then> STROBE_DEVICE bool for_each_block(First first, Then then) const {
    if (!blocks.any()) return false;
    int m = blocks.first, head = tile.head_k * p.group;
    first(head, m);
#pragma unroll 1
    for (int i = blocks.count() * p.group; i > 1; --i) {
      m = blocks.next(m);
      head += m == blocks.first;
      then(head, m);
    }
    return true;
  }
  template <int kColumns> STROBE_DEVICE void store(Accumulators<T, kColumns>& d, float scale, u32 offset,
                                                   const TensorMap* map, const Fp32Rows& to, int consumer) const {
    const Staging<T, kOneBox, kColumns, panels<T>(kColumns), false> staging{smem + offset, consumer,
                                                                            part * panels<T>(kColumns)};
    const float both[2] = {scale, scale};
    if constexpr (Config::kPartialOut) {
      d.scale(both);
      return to.store(d, 0);
    }
    bar_sync(kBarrierConsumers, 256);  // nobody reads K or V any more
    staging.store(d, both, map, Config::Keys::Stored::template box<64>(tile.k.whole(), tile.head_k, tile.key0), true);
    if (thread_idx() % 128 == 0) tma_store_wait_read<0>();  // shared memory must outlive the copy
  }
  STROBE_DEVICE void consume_dv() {
    const Keys keys(mask(), tile.key0, tile.q.length, tile.k.length, smem + Offset::keys);
    Accumulators<T, kColumnsV> dv;
    u32 weights[kScores / 2];
    dv.zero();
    if (blocks.any()) mbar_wait(smem + Offset::kv_barriers, 0);
    if (for_each_block([&](int head, int m) { step_dv<true>(dv, weights, keys, head, m); },
                       [&](int head, int m) { step_dv<!kOverlaps>(dv, weights, keys, head, m); }) &&
        kOverlaps) {
      issue_dv(dv, weights);
      wgmma_wait<0>();
    }
    const int first = part * kColumnsV;
    const Fp32Rows to{tile.rows_of(p.dv, p.dv_batch, p.dv_head, p.dv_row) + first, p.dv_row, tile.k.length - tile.key0,
                      p.dim_v - first};
    store(dv, p.dropout_scale, Offset::v, &p.map_dv, to, 0);
  }
  STROBE_DEVICE void consume_dk() {
    const Keys keys(tile.key0);
    Accumulators<T, kColumnsK> dk;
    u32 slopes[kScores / 2];
    dk.zero();
    if (blocks.any()) mbar_wait(smem + Offset::kv_barriers + 8, 0);
    if (for_each_block([&](int, int) { step_dk<true>(dk, slopes, keys); },
                       [&](int, int) { step_dk<!kOverlaps>(dk, slopes, keys); }) &&
        kOverlaps) {
      issue_dk(dk, slopes);
      wgmma_wait<0>();
    }
    const int first = part * kColumnsK;
    const Fp32Rows to{tile.rows_of(p.dk, p.dk_batch, p.dk_head, p.dk_row) + first, p.dk_row, tile.k.length - tile.key0,
                      p.dim - first};
    store(dk, p.scale_grad, 0, &p.map_dk, to, 1);
  }
};

template <class Config, class Mask, class Score, class Params> STROBE_DEVICE void dkv_sm90(const Params& p) {
  using Dkv = DkvSm90<Config, Mask, Score, Params>;
  const int part = remainder(block_idx(), Config::kColumnParts);
  const KeyTile tile = decode_key_tile<Config>(quotient(block_idx(), Config::kColumnParts), p);
  if (tile.key0 >= tile.k.length) return;  // varlen sequences shorter than the longest one
  if (thread_idx() == 0)
    for (const TensorMap* map : {&p.map_q, &p.map_d_o, &p.map_k, &p.map_v}) tma_prefetch_map(map);
  init_block<Dkv>();
  launch_dependents();
  const u32 warpgroup = warp_uniform(thread_idx() / 128);
  share_registers<Config>(warpgroup);
  if (warpgroup == 0) {
    Dkv work(p, tile, part, true, false);
    if (thread_idx() == 0) work.produce();
  } else {
    Accumulators<typename Config::Element, Dkv::kColumnsK>::declare();  // kDim >= kDimV: the warpgroups share the names
    if (warpgroup == 1) Dkv(p, tile, part, false, true).consume_dv();
    else Dkv(p, tile, part, false, false).consume_dk();
  }
}

}  // namespace strobe

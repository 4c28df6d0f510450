// FlashAttention backward for Hopper, head dims up to 128: TMA, mbarriers, wgmma, warp specialisation.
//
// A block owns kBlockN = 128 keys of one key head, 64 for each of two consumer warpgroups. It loops over the blocks of
// queries that see them, of all query heads of the group, and recomputes P from the LSE. Scores are transposed (rows
// are keys), because then P^T and dS^T are in registers as the A operand of dV and dK:
//     S^T = K Q^T, dP^T = V dO^T      in flight together
//     P^T = exp(S^T - LSE)            overlapped with dP^T
//     dS^T = P^T (dP^T - delta)
//     dV += P^T dO, dK += dS^T Q
//     dQ = dS K                       dS through shared memory: this product sums over the keys of both warpgroups
// dQ is computed one block late. So nothing in a block waits for the other warpgroup: the two drift apart, and the
// exponentials of one overlap with the products of the other. The adding warps (dq_sum.cuh) accumulate dQ of all key
// blocks in fp32 in global memory. delta.cuh prepares LSE, delta and zeros before; convert_dq.cuh rounds dQ afterwards,
// unless key blocks take turns (dq_turns.cuh): then the last turn rounds.
#pragma once
#include <strobe/pipeline/dq_turns.cuh>
#include <strobe/pipeline/key_scores.cuh>
#include <strobe/pipeline/ring.cuh>
#include <strobe/pipeline/scores.cuh>
#include <strobe/pipeline/warp_roles.cuh>
#include <strobe/tile/gemm_sm90.cuh>

namespace strobe {

template <class Config, class Mask, class Score, class Params> struct BackwardSm90 {
  using T = typename Config::Element;
  static constexpr int kBlockM = Config::kBlockM, kBlockN = Config::kBlockN, kDim = Config::kDim, kDimV = Config::kDimV;
  static constexpr int kScores = kBlockM / 2;              // of one thread
  static constexpr bool kOneBox = Config::kOneBoxPerTile;  // one TMA box holds a tile
  // A warpgroup computes 64 x 64 numbers of dQ: half of its rows, or half of its columns.
  static constexpr int kDimQ = kBlockM == 128 ? 64 : 128;
  static_assert(kBlockN == 128 && kBlockM * kDimQ == 2 * kDqFloats && kDim <= kDimQ, "two warpgroups cover dQ");

  using Pair = Ring<2>;
  using Offset = typename Config::Offset;  // of regions of shared memory, laid out by this kernel's module in cuda/
  using Bytes = typename Config::Bytes;    // of one buffer there

  const Params& p;
  const KeyTile tile;
  const QueryBlocksOf<Config> blocks;
  u32 smem;
  Pair q, d_o;         // buffers of Q and dO
  Pair ds_in, ds_out;  // of dS: the consumers write a block, and read it one block later

  STROBE_DEVICE BackwardSm90(const Params& params, const KeyTile& tile, bool producer)
      : p(params), tile(tile), blocks(query_blocks<Config>(p, mask(), tile)), smem(smem_base()),
        q(smem + Offset::ring_q, producer), d_o(smem + Offset::ring_do, producer), ds_in(smem + Offset::ring_ds, true),
        ds_out(smem + Offset::ring_ds, false) {}

  STROBE_DEVICE static void init_barriers() {
    mbar_init(smem_base() + Offset::kv_barriers, 1);
    mbar_init(smem_base() + Offset::kv_barriers + 8, 1);
    Pair::init(smem_base() + Offset::ring_q, 8);  // one arrival a warp of the consumers
    Pair::init(smem_base() + Offset::ring_do, 8);
    Pair::init(smem_base() + Offset::ring_ds, 8, 8);
    mbar_init_fence();
  }

  STROBE_DEVICE Mask mask() const { return mask_of<Mask, Config>(p, tile.q.length, tile.k.length, tile.positions); }
  STROBE_DEVICE i64 stat(int head, int m) const {  // the first of a block of queries
    return first_stat<Config>(p, head, tile.batch, tile.q.first) + m * kBlockM;
  }
  STROBE_DEVICE Box query_box(int head, int m) const {
    return Config::Queries::template box<kBlockM>(tile.q, head, m * kBlockM);
  }
  template <class Visit> STROBE_DEVICE void for_each_block(Visit visit) const {
    if (blocks.any()) for_each_query_block(blocks, p, start(), tile.head_k, visit);
  }
  // The query head of the block at which `left` blocks are left, that one included.
  STROBE_DEVICE int head_at(int left, int head_k) const {
    return (head_k + 1) * p.group - 1 - quotient(left - 1, blocks.count());
  }
  STROBE_DEVICE int start() const {
    return blocks.begin() + (Config::kRotate ? quotient(tile.key0 / kBlockN * blocks.end, p.key_blocks) : 0);
  }

  // ---- producer: one thread -----------------------------------------------------------------------------------------
  STROBE_DEVICE void load_rows(u32 offset, const void* stats, int head, int m, u32 bytes, u32 stage, u32 full) {
    bulk_load(smem + offset + stage * Bytes::lse, static_cast<const char*>(stats) + stat(head, m) * 4, bytes, full);
  }
  STROBE_DEVICE void load_q(int head, int m) {
    const u32 full = q.begin_load(Bytes::q + Bytes::lse + (Config::kDropout ? Bytes::lse : 0));
    tma_load_tile<T, kOneBox, kBlockM, kDim>(smem + Offset::q + q.stage * Bytes::q, &p.map_q, full, query_box(head, m));
    load_rows(Offset::lse, p.lse2, head, m, Bytes::lse, q.stage, full);
    if (Config::kDropout) load_rows(Offset::dropout, p.dropout_rows, head, m, Bytes::lse, q.stage, full);
    q.next();
  }
  STROBE_DEVICE void load_do(int head, int m) {
    const u32 full = d_o.begin_load(Bytes::d_o + Bytes::lse);
    tma_load_tile<T, kOneBox, kBlockM, kDimV>(smem + Offset::d_o + d_o.stage * Bytes::d_o, &p.map_d_o, full,
                                              query_box(head, m));
    load_rows(Offset::delta, p.delta, head, m, Bytes::lse, d_o.stage, full);
    d_o.next();
  }
  template <int kColumns> STROBE_DEVICE void load_kv(u32 offset, const TensorMap* map, u32 full, int buffer_rows) {
    mbar_arrive_expect_tx(full, tile_bytes<T>(kBlockN, kColumns));
    const Box box = Config::Keys::template box<kBlockN>(tile.k, tile.head_kv, tile.key0, buffer_rows);
    tma_load_tile<T, kOneBox, kBlockN, kColumns>(smem + offset, map, full, box);
  }
  STROBE_DEVICE void produce() {
    if (!blocks.any()) return;
    load_kv<kDim>(0, &p.map_k, smem + Offset::kv_barriers, p.k_batch_rows);
    load_kv<kDimV>(Offset::v, &p.map_v, smem + Offset::kv_barriers + 8, p.v_batch_rows);
    wait_for_previous_grid();  // delta.cuh writes the statistics
    for_each_block([&](int head, int m) {
      load_q(head, m);
      load_do(head, m);
    });
  }

  // ---- adding warps: one for each consumer --------------------------------------------------------------------------
  STROBE_DEVICE DqSum dq_sum(int consumer) const { return DqSum{smem + Offset::dq + consumer * kDqBytes, consumer}; }
  STROBE_DEVICE Turn turn(int m) const { return turn_of<Config>(mask(), tile, blocks.end, p.key_blocks, m); }
  STROBE_DEVICE void add_dq() const {
    [[maybe_unused]] int sent = -1;
    wait_for_previous_grid();  // the sums, or the turns, are zero now
    for_each_block([&](int head, int m) {
      const DqSum sum = dq_sum(thread_idx_again() / 32 - 1);  // recomputed in the loop: registers are few
      if constexpr (Config::kTurns) add_in_turn<Config>(p, tile, sum, head, m, turn(m), sent);
      else sum.add(p.dq_sum + dq_part<Config>(p, tile, head, m, sum.consumer) * kDqFloats);
    });
    if constexpr (Config::kTurns) pass_turn(p, sent);
  }

  // ---- consumers: the products --------------------------------------------------------------------------------------
  struct Fragments {
    float dk[kDim / 2] = {}, dv[kDimV / 2] = {};
  };
  STROBE_DEVICE u64 own_keys(u32 offset, int consumer) const {
    return k_major(smem + offset + consumer * 64 * kPanelRowBytes);
  }
  // S^T = K Q^T and dP^T = V dO^T of this consumer's 64 keys.
  STROBE_DEVICE void issue_s(float (&s)[kScores], int consumer) const {
    q.wait_full();
    wgmma_fence();
    gemm_kq<T, kBlockM, kDim, kBlockN>(s, own_keys(0, consumer), k_major(smem + Offset::q + q.stage * Bytes::q));
    wgmma_commit();
  }
  STROBE_DEVICE void issue_dp(float (&dp)[kScores], int consumer) const {
    d_o.wait_full();
    wgmma_fence();
    const u64 rows = k_major(smem + Offset::d_o + d_o.stage * Bytes::d_o);
    gemm_kq<T, kBlockM, kDimV, kBlockN>(dp, own_keys(Offset::v, consumer), rows);
    wgmma_commit();
  }
  // dV += P^T dO and dK += dS^T Q.
  STROBE_DEVICE void issue_dv(float (&dv)[kDimV / 2], u32 (&weights)[kScores / 2]) const {
    wgmma_fence();
    gemm_pv<T, kBlockM, kDimV>(dv, weights, mn_major(smem + Offset::d_o + d_o.stage * Bytes::d_o, kBlockM));
    wgmma_commit();
  }
  STROBE_DEVICE void issue_dk(float (&dk)[kDim / 2], u32 (&slopes)[kScores / 2]) const {
    wgmma_fence();
    gemm_pv<T, kBlockM, kDim>(dk, slopes, mn_major(smem + Offset::q + q.stage * Bytes::q, kBlockM));
    wgmma_commit();
  }
  // dQ = dS K of the block before: 64 of its rows (a panel of dS^T) or 64 of its columns (a panel of K).
  STROBE_DEVICE void issue_dq(float (&dq)[32], int consumer) const {
    constexpr bool kRows = kBlockM == 128;
    const u32 panel = consumer * kBlockN * kPanelRowBytes;
    ds_out.wait_full();
    wgmma_fence();
    gemm_dsk<T, kBlockN>(dq, mn_major(smem + Offset::ds + ds_out.stage * Bytes::ds + (kRows ? panel : 0), kBlockN),
                         mn_major(smem + (kRows ? 0 : panel), kBlockN));
    wgmma_commit();
  }

  // ---- consumers: the work between them -----------------------------------------------------------------------------
  using Scores = KeyScores<Config, Mask, Score, Params>;
  using Keys = typename Scores::Keys;
  STROBE_DEVICE Scores scores(const Keys& keys) const {
    return Scores{p, tile, keys, {smem + Offset::pairs + (thread_idx() / 32 - 4) * Scores::Pairs::kBytes}};
  }
  STROBE_DEVICE void load_bias(const Keys& keys, int m, int left) const {
    if constexpr (Score::kStaged)
      if (left > 0) scores(keys).load_bias(head_at(left, tile.head_k), m);
  }
  STROBE_DEVICE QueryRows rows(const Keys& keys, int m, int left) const {
    const u32 first = smem + 4 * keys.column;
    return QueryRows{head_at(left, tile.head_k), m, blocks.masked(m), first + q.stage * Bytes::lse,
                     first + d_o.stage * Bytes::lse};
  }
  // dS^T to shared memory, [key][query], for the products of both warpgroups.
  STROBE_DEVICE void store_ds(const u32 (&slopes)[kScores / 2], int consumer) {
    const u32 tid = thread_idx() % 128, lane = tid % 32, row = 64 * consumer + 16 * (tid / 32) + (lane & 15);
    const u32 to = smem + Offset::ds + ds_in.stage * Bytes::ds;
    ds_in.wait_empty();
#pragma unroll
    for (int j = 0; j < kBlockM / 16; ++j)
      stmatrix_x4(to + chunk_offset(kBlockN, row, 2 * j + (lane >> 4)), slopes[4 * j], slopes[4 * j + 1],
                  slopes[4 * j + 2], slopes[4 * j + 3]);
    fence_proxy_async();
    sync_warp();
    if (elected()) mbar_arrive(ds_in.full_barrier());
    ds_in.next();
  }
  STROBE_DEVICE void put_dq(float (&dq)[32], int consumer, int m, int left) {
    ds_out.release_and_advance();
    if (Config::kTurns && turn(m).last) {
      finish_dq<Config>(p, dq_sum(consumer), dq, turn(m).number > 0, [&] {
        const KeyTile again = tile_again<Config>(p);
        const int head = head_at(left, again.head_k), row = DqRows<kBlockM>::first(m, consumer),
                  column = DqRows<kBlockM>::column(consumer);
        float* const first = again.q.rows(p.dq, p.dq_batch, p.dq_head, p.dq_row, head, row) + column;
        return Fp32Rows{first, p.dq_row, again.q.length - row, p.dim - column};
      });
    } else dq_sum(consumer).put(dq);
  }

  // ---- consumers: the loop ------------------------------------------------------------------------------------------
  // One block of queries; `left` counts it and those after it. kFirst: no earlier block has a dQ that is due.
  template <bool kFirst> STROBE_DEVICE void attend(Fragments& f, const Keys& keys, int consumer, int m, int left) {
    const QueryRows queries = rows(keys, m, left);
    float s[kScores], dp[kScores], dq[32];
    u32 weights[kScores / 2], slopes[kScores / 2];
    constexpr bool kHasDq = Config::kWantQ && !kFirst;
    issue_s(s, consumer);
    issue_dp(dp, consumer);
    wgmma_wait<1>();
    pin(s);
    const auto load_next = [&] { load_bias(keys, blocks.next(m), left - 1); };
    const Score score = Score::template of<Config>(p, tile.batch, queries.head);
    if (!Config::kSparse || blocks.partial(m))
      scores(keys).weights_and_slopes(score, weights, slopes, s, dp, queries, load_next);
    else scores(keys).weights_and_slopes(inside<Config>(score), weights, slopes, s, dp, queries, load_next);
    if (Config::kWantQ) store_ds(slopes, consumer);
    else sync_warp();  // all lanes have read the statistics before one of them gives their buffers back
    if (kHasDq) issue_dq(dq, consumer);
    if (Config::kWantKV) {
      issue_dv(f.dv, weights);
      issue_dk(f.dk, slopes);
      wgmma_wait<1>();  // dQ and dV are done
      pin(f.dv);
    } else wgmma_wait<0>();
    d_o.release_and_advance();
    if (kHasDq) {
      pin(dq);
      put_dq(dq, consumer, blocks.previous(m), left + 1);
    }
    wgmma_wait<0>();
    pin(f.dk);
    q.release_and_advance();
  }

  STROBE_DEVICE void consume(int consumer) {
    const Keys keys(mask(), tile.key0 + 64 * consumer, tile.q.length, tile.k.length,
                    smem + Offset::keys + consumer * kKeyFragmentBytes);
    Fragments f;
    if (blocks.any()) {
      mbar_wait(smem + Offset::kv_barriers, 0);
      mbar_wait(smem + Offset::kv_barriers + 8, 0);
      int block = start(), left = blocks.count() * p.group;
      load_bias(keys, block, left);
      attend<true>(f, keys, consumer, block, left);
#pragma unroll 1
      while (--left > 0) {
        block = blocks.next(block);
        attend<false>(f, keys, consumer, block, left);
      }
      if (Config::kWantQ) {
        float dq[32];
        issue_dq(dq, consumer);
        wgmma_wait<0>();
        pin(dq);
        put_dq(dq, consumer, block, 1);
      }
    }
    if (Config::kWantKV) store(f, consumer);
  }

  // dV and dK: staged over V and K, which nobody reads any more, or as fp32 straight from the registers.
  STROBE_DEVICE void store(const Fragments& f, int consumer) const {
    if (!Config::kPartialOut) bar_sync(kBarrierConsumers, 256);
    const KeyTile again = tile_again<Config>(p);
    const int rows = again.k.length - again.key0;
    store_rows<kDimV>(f.dv, p.dropout_scale, Offset::v, &p.map_dv,
                      Fp32Rows{again.rows_of(p.dv, p.dv_batch, p.dv_head, p.dv_row), p.dv_row, rows, p.dim_v},
                      consumer);
    store_rows<kDim>(f.dk, p.scale_grad, 0, &p.map_dk,
                     Fp32Rows{again.rows_of(p.dk, p.dk_batch, p.dk_head, p.dk_row), p.dk_row, rows, p.dim}, consumer);
    if (!Config::kPartialOut && thread_idx() % 128 == 0)
      tma_store_wait_read<0>();  // shared memory must outlive the copies
  }
  template <int kColumns> STROBE_DEVICE void store_rows(const float (&d)[kColumns / 2], float scale, u32 offset,
                                                        const TensorMap* map, const Fp32Rows& to, int consumer) const {
    const int first = tile.key0 + 64 * consumer;
    const Staging<T, kOneBox, kColumns, panels<T>(kColumns), false> staging{
        smem + offset + consumer * tile_bytes<T>(64, kColumns), consumer};
    const float both[2] = {scale, scale};
    if constexpr (Config::kPartialOut) to.store(Rounded<T, kColumns>{d, scale}, 64 * consumer);
    else
      staging.store(Rounded<T, kColumns>{d}, both, map,
                    Config::Keys::Stored::template box<64>(tile.k.whole(), tile.head_k, first), first < tile.k.length);
  }
};

template <class Config, class Mask, class Score, class Params> STROBE_DEVICE void backward_sm90(const Params& p) {
  using Backward = BackwardSm90<Config, Mask, Score, Params>;
  const KeyTile tile = decode_key_tile<Config>(block_idx(), p);
  if (tile.key0 >= tile.k.length) return;  // varlen sequences shorter than the longest one
  if (thread_idx() == 0)
    for (const TensorMap* map : {&p.map_q, &p.map_d_o, &p.map_k, &p.map_v}) tma_prefetch_map(map);
  init_block<Backward>();
  launch_dependents();
  const u32 warpgroup = warp_uniform(thread_idx() / 128), warp = warp_uniform(thread_idx() / 32);
  share_registers<Config>(warpgroup);
  if (warpgroup == 0) {
    Backward work(p, tile, true);
    if (thread_idx() == 0) work.produce();
    else if (Config::kWantQ && (warp == 1 || warp == 2)) work.add_dq();
  } else Backward(p, tile, false).consume(warpgroup - 1);
}

}  // namespace strobe

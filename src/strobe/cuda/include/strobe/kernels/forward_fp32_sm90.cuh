// FlashAttention forward for Hopper on fp32 inputs, in three bf16 terms each (tile/terms.cuh). split_terms.cuh has
// written those of Q, K and V to memory; P is split in registers.
//
// Like forward_sm90.cuh, a block is persistent, with a producer of one thread and kConsumers consumer warpgroups of 64
// query rows each. A product is six, so the tensor cores have six times as much to do for each exponential as with
// 16-bit inputs, and the consumers, each in turn with its softmax, keep them busy without overlap inside a warpgroup:
//     S = Q K_n^T,  P = exp(S - m),  O = O * alpha + P V_n
#pragma once
#include <strobe/pipeline/output_rows.cuh>
#include <strobe/pipeline/ring.cuh>
#include <strobe/pipeline/scores.cuh>
#include <strobe/pipeline/staging.cuh>
#include <strobe/pipeline/warp_roles.cuh>
#include <strobe/tile/terms.cuh>

namespace strobe {

template <class Config, class Mask, class Score, class Params> struct ForwardFp32Sm90 {
  using T = typename Config::Element;  // of the terms
  static constexpr int kBlockN = Config::kBlockN, kDim = Config::kDim, kDimV = Config::kDimV;
  static constexpr int kConsumers = Config::kConsumers, kBlockM = Config::kBlockM;
  static constexpr int kScores = kBlockN / 2, kOutputs = kDimV / 2;  // of one thread
  static constexpr bool kOneBox = Config::kOneBoxPerTile;
  static_assert(kBlockM == 64 * kConsumers, "64 rows a consumer");
  using RingQ = Ring<Config::kQSlots>;
  using RingKV = Ring<Config::kStages>;
  using Offset = typename Config::Offset;  // of regions of shared memory, laid out by this kernel's module in cuda/
  using Bytes = typename Config::Bytes;    // of one buffer there

  const Params& p;
  u32 smem;
  RingQ q;
  RingKV k, v;

  STROBE_DEVICE ForwardFp32Sm90(const Params& params, bool producer)
      : p(params), smem(smem_base()), q(smem + Offset::ring_q, producer), k(smem + Offset::ring_k, producer),
        v(smem + Offset::ring_v, producer) {}

  STROBE_DEVICE static void init_barriers() {
    RingQ::init(smem_base() + Offset::ring_q, 4 * kConsumers);  // one arrival a warp of the consumers
    RingKV::init(smem_base() + Offset::ring_k, 4 * kConsumers);
    RingKV::init(smem_base() + Offset::ring_v, 4 * kConsumers);
    mbar_init_fence();
  }

  STROBE_DEVICE u32 tile_info() const { return smem + Offset::tile_info + Bytes::tile_info * q.stage; }
  STROBE_DEVICE u32 q_tile(int w) const { return smem + (q.stage * kConsumers + w) * Bytes::q; }
  STROBE_DEVICE Mask mask(const Tile& tile) const {
    return mask_of<Mask, Config>(p, tile.q.length, tile.k.length, tile.positions);
  }
  STROBE_DEVICE KeyBlocks blocks_of(const Tile& tile, int first_row, int rows) const {
    return key_blocks<Config>(p, mask(tile), tile, first_row, rows);
  }

  // ---- producer: one thread -----------------------------------------------------------------------------------------
  template <int kColumns>
  STROBE_DEVICE void load(RingKV& ring, u32 offset, const TensorMap* map, const Tile& tile, int n) const {
    constexpr u32 kBytes = tile_bytes<T>(kBlockN, kTerms * kColumns);
    const u32 full = ring.begin_load(kBytes);
    tma_load_tile<T, kOneBox, kBlockN, kTerms * kColumns>(
        smem + offset + ring.stage * kBytes, map, full,
        Config::Keys::template box<kBlockN>(tile.k, quotient(tile.head, p.group), n * kBlockN));
    ring.next();
  }
  STROBE_DEVICE void announce(const Tile& tile, bool any_keys) {
    q.wait_empty();
    publish_tile<Config>(tile_info(), tile);
    if (any_keys) {
      mbar_arrive_expect_tx(q.full_barrier(), kConsumers * Bytes::q);
#pragma unroll 1
      for (int w = 0; w < kConsumers; ++w)
        tma_load_tile<T, kOneBox, 64, kTerms * kDim>(q_tile(w), &p.map_q_terms, q.full_barrier(),
                                                     box_of_consumer<Config>(tile, w));
    } else mbar_arrive(q.full_barrier());
    q.next();
  }
  STROBE_DEVICE void produce() {
    wait_for_previous_grid();  // the terms are split_terms.cuh's
#pragma unroll 1
    for (int work = block_idx(), next; work < p.tiles; work = next) {
      next = take_tile(p);  // early: its latency passes during the copies
      const Tile tile = decode_tile<Config>(work, p);
      if (tile.row0 >= tile.q.length) continue;  // varlen sequences shorter than the longest one
      const KeyBlocks blocks = blocks_of(tile, tile.row0, kBlockM);
      int n = blocks.begin();
      if (blocks.any()) load<kDim>(k, Offset::k, &p.map_k_terms, tile, n);
      announce(tile, blocks.any());
#pragma unroll 1
      for (; blocks.has(n); n = blocks.next(n)) {
        load<kDimV>(v, Offset::v, &p.map_v_terms, tile, n);  // first: its buffer is free before the next keys' is
        if (blocks.has_next(n)) load<kDim>(k, Offset::k, &p.map_k_terms, tile, blocks.next(n));
      }
    }
    announce(Tile{Sequence{}, -1, 0, 0, Part{}}, false);  // no more
  }

  // ---- consumers ----------------------------------------------------------------------------------------------------
  struct Rows {  // of a thread: `row` and row + 8
    int row;
    Softmax<> softmax;
    float o[kOutputs];
  };
  STROBE_DEVICE void attend(Rows& r, const Tile& tile, const KeyBlocks& mine, int consumer, int n) {
    float s[kScores];
    k.wait_full();
    wgmma_fence();
    gemm_terms<kBlockN, kDim, 64, kBlockN>(s, k_major(q_tile(consumer)),
                                           k_major(smem + Offset::k + k.stage * Bytes::k));
    wgmma_commit();
    wgmma_wait<0>();
    pin(s);
    k.release_and_advance();

    const int column = n * kBlockN + 2 * int(thread_idx() % 4);
    const Score score = Score::template of<Config>(p, tile.batch, tile.head);
    logits_of_queries<Config>(s, score, tile, [&] { return tile.positions; }, r.row, column, true);
    if (mine.masked(n)) mask_queries<true>(s, mask(tile), r.row, r.row + 8, column);
    r.softmax.template maxima<true>(s);
    r.softmax.template weights<0, kScores>(s);
    Terms<kScores / 2> weights;
    weights.split(s);

    float o[kOutputs];  // of this block
    v.wait_full();
    wgmma_fence();
    gemm_terms_t<kDimV, kBlockN>(o, weights, mn_major(smem + Offset::v + v.stage * Bytes::v, kBlockN));
    wgmma_commit();
    wgmma_wait<0>();
    pin(o);
    v.release_and_advance();
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) r.o[i] = fma(r.o[i], r.softmax.alpha[fragment_row(i)], o[i]);
  }

  STROBE_DEVICE void store(Rows& r, const Tile& tile, int consumer) const {
    float inverse[2];
    OutputRows<Config, Params>{p, tile}.finish(r.softmax, r.row, inverse);
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) r.o[i] *= inverse[fragment_row(i)];
    float* const first = tile.q.rows(p.o, p.o_batch, p.o_head, p.o_row, tile.head, tile.row0);
    Fp32Rows{first, p.o_row, tile.q.length - tile.row0, p.dim_v}.store(Rounded<float, kDimV>{r.o}, 64 * consumer);
  }

  STROBE_DEVICE void consume(int consumer) {
    const int thread_row = 64 * consumer + 16 * (thread_idx() % 128 / 32) + thread_idx() % 32 / 4;
#pragma unroll 1
    for (;;) {
      q.wait_full();
      const Tile tile = read_tile<Config>(tile_info());
      if (tile.row0 < 0) return;
      const KeyBlocks all = blocks_of(tile, tile.row0, kBlockM), mine = blocks_of(tile, tile.row0 + 64 * consumer, 64);
      Rows r;
      r.row = tile.row0 + thread_row;
      r.softmax.reset(p.scale_log2);
#pragma unroll
      for (float& x : r.o) x = 0.f;
#pragma unroll 1
      for (int n = all.begin(); all.has(n); n = all.next(n)) {
        if (n < mine.end && n >= mine.first) attend(r, tile, mine, consumer, n);
        else k.skip(), v.skip();
      }
      if (elected()) q.release();
      q.next();
      store(r, tile, consumer);
    }
  }
};

template <class Config, class Mask, class Score, class Params> STROBE_DEVICE void forward_fp32_sm90(const Params& p) {
  using Forward = ForwardFp32Sm90<Config, Mask, Score, Params>;
  if (thread_idx() == 0)
    for (const TensorMap* map : {&p.map_q_terms, &p.map_k_terms, &p.map_v_terms}) tma_prefetch_map(map);
  init_block<Forward>();
  const u32 warpgroup = warp_uniform(thread_idx() / 128);
  share_registers<Config>(warpgroup);
  if (warpgroup == 0) {
    if (thread_idx() == 0) Forward(p, true).produce();
  } else Forward(p, false).consume(warpgroup - 1);
}

}  // namespace strobe

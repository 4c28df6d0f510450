// FlashAttention forward for Hopper: TMA, mbarriers, wgmma, warp specialisation.
//
// A block is one producer warpgroup, of which one thread issues every load (of pages: all threads), and kConsumers
// consumer warpgroups that own 64 query rows each. It is persistent: it takes tile after tile from a counter (of pages:
// from its piece of a work list). The rings of K and V run on across tiles. In a consumer, block n goes like this:
//     issue S_n = Q K_n^T            both in flight together; P is the register operand
//     issue O  += P_{n+1} V_{n+1}
//     wait for S_n:  the first kExpsBeforeWait weights, exp(S_n - m), overlapped with P V
//     wait for O:    the other weights; P_n replaces P_{n+1}
// (keys are visited from the last to the first, so n + 1 comes before n). The row maximum m is speculative: that of the
// blocks before. Should a score be far above it, the weights are computed again, and O *= exp(m_old - m_new).
// kInvariant: each row decides that for itself, so that its bits do not depend on its neighbours.
#pragma once
#include <strobe/pipeline/missing_keys.cuh>
#include <strobe/pipeline/ping_pong.cuh>
#include <strobe/pipeline/scores.cuh>
#include <strobe/pipeline/split_kv.cuh>
#include <strobe/pipeline/state_parts.cuh>
#include <strobe/pipeline/warp_roles.cuh>
#include <strobe/tile/gemm_sm90.cuh>

namespace strobe {

template <class Config, class Mask, class Score, class Params> struct ForwardSm90 {
  using T = typename Config::Element;
  static constexpr int kBlockN = Config::kBlockN, kDim = Config::kDim, kDimV = Config::kDimV;
  static constexpr int kConsumers = Config::kConsumers, kBlockM = 64 * kConsumers, kPackGqa = Config::kPackGqa;
  static constexpr int kScores = kBlockN / 2;  // of one thread
  static_assert(kBlockM == Config::kBlockM && kDimV <= kDim, "O fits over Q");
  // O is staged in shared memory on its way out: over the Q of its own tile or, where there is only one Q slot, in a
  // buffer of its own, some panels at a time. Without room for that (kWaitsForO) the next Q waits until O has left.
  static constexpr bool kPrivateO = Config::kStorePanels > 0, kOneBox = Config::kOneBoxPerTile;
  static constexpr int kStorePanels = kPrivateO ? Config::kStorePanels : panels<T>(kDimV);
  static constexpr bool kWaitsForO = !kPrivateO && Config::kQSlots == 1;
  using StagingO =
      Staging<Either<Config::kPartialOut && !Config::kSplit, float, T>, kOneBox, kDimV, kStorePanels, kPrivateO>;
  using Blocks = KeyBlocksOf<Config>;
  using RingQ = Ring<Config::kQSlots>;
  using RingKV = Ring<Config::kStages>;
  using StoredQ = StagedSlot<!kPrivateO, RingQ>;
  using Parts = StateParts<Config>;        // of an O to merge with
  using Offset = typename Config::Offset;  // of regions of shared memory, laid out by this kernel's module in cuda/
  using Bytes = typename Config::Bytes;    // of one buffer there

  const Params& p;
  u32 smem;
  RingQ q;
  RingKV k, v;
  Parts parts;
  bool producer;
  int consumer;
  PingPong<Config::kPingPong, kConsumers> turns;  // one turn for every key block of the tile but the first
  MissingKeys<Config> missing;

  STROBE_DEVICE ForwardSm90(const Params& params, bool producer, int consumer = 0)
      : p(params), smem(smem_base()), q(smem + Offset::ring_q, producer), k(smem + Offset::ring_k, producer),
        v(smem + Offset::ring_v, producer), parts(p, smem + Offset::state_barriers, smem + Offset::v),
        producer(producer), consumer(consumer), turns{consumer} {}

  STROBE_DEVICE static void init_barriers() {
    // A Q slot is empty once every warp is done with Q, or every warpgroup's O has left from there.
    RingQ::init(smem_base() + Offset::ring_q, kPrivateO ? 4 * kConsumers : kConsumers);
    RingKV::init(smem_base() + Offset::ring_k, 4 * kConsumers, KeyLoader<Config>::kArrivals);  // one arrival a warp
    RingKV::init(smem_base() + Offset::ring_v, 4 * kConsumers, KeyLoader<Config>::kArrivals);
    Parts::init(smem_base() + Offset::state_barriers);
    mbar_init_fence();
  }

  STROBE_DEVICE u32 tile_info() const { return smem + Offset::tile_info + Bytes::tile_info * q.stage; }
  STROBE_DEVICE u32 q_tile(int w) const { return smem + (q.stage * kConsumers + w) * Bytes::q; }
  STROBE_DEVICE Positions positions(const Tile& tile) const {  // read where they are needed: that takes fewer registers
    return Config::kPositions && !producer ? read_positions(tile_info() + kTileInfoPositions) : tile.positions;
  }
  STROBE_DEVICE Mask mask(const Tile& tile) const {
    return mask_of<Mask, Config>(p, tile.q.length, tile.k.length, positions(tile));
  }
  STROBE_DEVICE Blocks blocks_of(const Tile& tile, int first_row, int rows) const {
    return key_blocks<Config>(p, mask(tile), tile, first_row, rows);
  }

  // ---- producer: one thread, or, of pages, all that `loads` says --------------------------------------------------
  STROBE_DEVICE void load_keys(KeyLoader<Config>& loader, int n) {
    loader.template load<kDim>(p, k, smem + Offset::k, Bytes::k, keys_of<T>(p), n);
  }
  STROBE_DEVICE void load_values(KeyLoader<Config>& loader, int n) {
    loader.template load<kDimV>(p, v, smem + Offset::v, Bytes::v, values_of<T>(p), n);
  }
  STROBE_DEVICE void load_queries(const Tile& tile) {
    mbar_arrive_expect_tx(q.full_barrier(), kConsumers * Bytes::q);
#pragma unroll 1
    for (int w = 0; w < kConsumers; ++w)
      tma_load_tile<T, kOneBox, 64, kDim>(q_tile(w), &p.map_q, q.full_barrier(), box_of_consumer<Config>(tile, w));
  }

  STROBE_DEVICE void produce() {
    using Work = WorkOf<Config>;
#pragma unroll 1
    for (int index = Work::first(p), end = Work::end(p), next; index < end; index = next) {
      next = Work::next(p, index);  // early: its latency passes during the copies
      const Tile tile = Work::tile(index, p);
      if (tile.row0 < tile.q.length) load_tile(tile);
    }
    if (leads<Config>()) announce(Tile{Sequence{}, -1, 0, 0, Part{}}, false);  // no more
  }
  STROBE_DEVICE void announce(const Tile& tile, bool any_keys) {
    q.wait_empty();
    publish_tile<Config>(tile_info(), tile);
    if (any_keys) load_queries(tile);
    else mbar_arrive(q.full_barrier());
  }
  STROBE_DEVICE void load_tile(const Tile& tile) {
    const Blocks blocks = blocks_of(tile, tile.row0, kBlockM);
    const bool any_keys = blocks.any(), gathers = Config::Keys::kGathered;
    int n = blocks.begin();
    KeyLoader<Config> loader{tile, quotient(tile.head, p.group), blocks.first * kBlockN};
    if (gathers && leads<Config>()) announce(tile, any_keys);  // first: a warp waits for what it gathers
    if (any_keys) load_keys(loader, n);
    if (!gathers && leads<Config>()) announce(tile, any_keys);
    q.next();
    if (parts.merge) parts.load(p, tile, v, q);
#pragma unroll 1
    for (; blocks.has(n); n = blocks.next(n)) {  // V one block behind K: the order in which the consumers need them
      if (blocks.has_next(n)) load_keys(loader, blocks.next(n));
      if (parts.merge) parts.make_room(blocks.before(n), q);
      load_values(loader, n);
    }
  }

  // ---- consumers: the steps of a key block --------------------------------------------------------------------------
  struct Fragments {
    Accumulators<T, kDimV> o;
    u32 weights[kScores / 2];
    Softmax<> softmax;
    State<Config::kMerge> state;
    Score score;
    Dropout<Config::kDropout> dropout;
    STROBE_DEVICE Fragments(const Params& p, const Tile& tile, int row)
        : score(Score::template of<Config>(p, tile.batch, tile.head)),
          dropout(p, dropout_head_key(p.seed, tile.batch, tile.head), row) {
      o.zero();
      softmax.reset(p.scale_log2);
      if constexpr (Config::kMerge)
        OutputRows<Config, Params>{p, tile}.template load_state<!Parts::kEnabled>(o, state.lse, row);
    }
  };

  // S_n = Q K_n^T of the first kKeys keys.
  template <int kKeys> STROBE_DEVICE void issue_qk(float (&s)[kKeys / 2], u64 q_desc) {
    wgmma_fence();
    gemm_qk<T, kKeys, kDim, kBlockN>(s, q_desc, k_major(smem + Offset::k) + u64(k.stage * (Bytes::k / 16)));
    wgmma_commit();
  }
  template <int kIssuedSince, int N> STROBE_DEVICE void wait_qk(float (&s)[N]) {
    missing.look(k.stage);
    wgmma_wait<kIssuedSince>();
    pin(s);
    k.release_and_advance();
  }
  // O += P V. Its registers belong to the tensor cores until it has been waited for.
  STROBE_DEVICE void issue_pv(Fragments& f) {
    wgmma_fence();
    gemm_pv<T, kBlockN, kDimV>(f.o, f.weights, mn_major(smem + Offset::v, kBlockN) + u64(v.stage * (Bytes::v / 16)));
    wgmma_commit();
  }

  // S_n, nothing else in flight.
  template <int kKeys> STROBE_DEVICE void qk(float (&s)[kKeys / 2], u64 q_desc, Fragments& f) {
    k.wait_full();
    issue_qk<kKeys>(s, q_desc);
    wait_qk<0>(s);
    f.state.resume(f.softmax, p);
  }
  // O += P V, nothing else in flight.
  STROBE_DEVICE void pv(Fragments& f) {
    v.wait_full();
    issue_pv(f);
    wgmma_wait<0>();
    v.release_and_advance();
  }
  // S_n, with O += P_{n+1} V_{n+1} in flight until `softmax_overlapped` waits for it.
  STROBE_DEVICE void qk_overlapped(float (&s)[kScores], u64 q_desc, Fragments& f) {
    k.wait_full();
    turns.wait_turn();
    issue_qk<kBlockN>(s, q_desc);
    v.wait_full();
    issue_pv(f);
    turns.pass_turn();
    wait_qk<1>(s);
  }

  template <int N> STROBE_DEVICE void score_and_mask(float (&s)[N], const Fragments& f, const Tile& tile,
                                                     const Blocks& mine, int row, int n, bool masked) const {
    logits_of_queries<Config>(s, f.score, tile, [&] { return positions(tile); }, row, first_key(n), mine.partial(n));
    if (missing.or_any(masked)) {
      mask_queries<true>(s, mask(tile), row / kPackGqa, (row + 8) / kPackGqa, first_key(n));
      missing.hide(s, p, tile_info(), n * kBlockN);
    }
  }
  STROBE_DEVICE static int first_key(int n) { return n * kBlockN + 2 * int(thread_idx() % 4); }  // of this thread

  // S_n -> P_n, which replaces P_{n+1}: the first kExpsBeforeWait weights before the wait for P V (0: where ptxas puts
  // them). In the first block there is nothing to wait for, and no maximum to speculate on.
  using BlockSoftmax = SpeculativeSoftmax<T, kScores, Config::kInvariant>;
  static_assert(!Config::kInvariant || Config::kRolled, "the first block goes the way of all others");
  STROBE_DEVICE void softmax_overlapped(float (&s)[kScores], Fragments& f, int n, bool first) {
    constexpr int kBefore = Config::kExpsBeforeWait ? Config::kExpsBeforeWait : kScores;
    BlockSoftmax softmax(f.softmax);
    softmax.template weights<0, kBefore>(s);
    if (Config::kExpsBeforeWait) keep_above(smem, softmax.sums(f.softmax));
    wgmma_wait<0>();
    pin(f.weights);
    if (!first) v.release_and_advance();
    softmax.template weights<kBefore, kScores>(s);
    if (!softmax.accept(f.softmax, f.weights, s)) f.o.scale(f.softmax.alpha);
    f.dropout.drop(f.weights, first_key(n));
  }

  // S_n -> P_n, nothing else in flight. Where the diagonal hides the second half of the keys, it is not computed.
  static constexpr bool kTrim = Mask::kHasHi && kBlockN % 32 == 0;
  STROBE_DEVICE void qk_softmax(u64 q_desc, Fragments& f, const Tile& tile, const Blocks& mine, int row, int n) {
    const int last_row = min(tile.row0 + 64 * consumer + 64, tile.q.length) - 1;
    if (kTrim && mask(tile).hi(last_row / kPackGqa) <= n * kBlockN + kBlockN / 2)
      qk_softmax_of<kTrim ? kBlockN / 2 : kBlockN>(q_desc, f, tile, mine, row, n, true);
    else qk_softmax_of<kBlockN>(q_desc, f, tile, mine, row, n, Mask::kHasHi || mine.masked(n));
  }
  template <int kKeys> STROBE_DEVICE void qk_softmax_of(u64 q_desc, Fragments& f, const Tile& tile, const Blocks& mine,
                                                        int row, int n, bool masked) {
    float s[kKeys / 2];
    qk<kKeys>(s, q_desc, f);
    score_and_mask(s, f, tile, mine, row, n, masked);
    f.softmax.template to_weights<T>(f.weights, s);
    f.dropout.drop(f.weights, first_key(n));
  }

  STROBE_DEVICE void skip_block(bool has_turn) {  // a key block of the tile that this consumer's rows do not see
    if (has_turn) turns.yield_turn();
    k.skip(), v.skip();
  }

  // ---- consumers: epilogue ------------------------------------------------------------------------------------------
  STROBE_DEVICE StagingO staging() const {
    return StagingO{kPrivateO ? smem + Offset::o + consumer * Bytes::o : q_tile(consumer), consumer};
  }
  STROBE_DEVICE void store(Fragments& f, const Tile& tile, int row) const {
    if constexpr (Config::kSplit)
      if (is_split<Config>(tile) && !store_split<Config>(p, tile, staging(), f.o, f.softmax)) return;
    if constexpr (!Config::kSplit || (Config::Keys::kPaged && !Config::kPartialOut)) {
      float inverse[2];
      OutputRows<Config, Params>{p, tile}.finish(f.softmax, row, inverse);
      staging().store(f.o, inverse, &p.map_o, box_of_consumer<Config>(tile, consumer),
                      tile.row0 + 64 * consumer < tile.q.length);
    }
  }

  // ---- consumers: the key blocks of a tile --------------------------------------------------------------------------
  // The first block goes alone: there is no P V to overlap with. Under a right bound alone, 64 rows on the diagonal
  // meet one or two key blocks; those go one by one, too, and the main loop knows no mask. Under a left bound the main
  // loop applies the mask where it is needed.
  static constexpr bool kDiagonalAlone = Mask::kHasHi && !Mask::kHasLo;
  STROBE_DEVICE int attend(Fragments& f, const Tile& tile, const Blocks& mine, int row, int n, StoredQ& stored) {
    const u64 q_desc = k_major(q_tile(consumer));
#pragma unroll 1
    for (bool first = true;; first = false) {
      qk_softmax(q_desc, f, tile, mine, row, n);
      if (!first || Config::kMerge) f.o.scale(f.softmax.alpha);
      stored.release();
      if ((n = mine.next(n)) < mine.end_full || !kDiagonalAlone) break;
      turns.yield_turn();
      pv(f);
    }
#pragma unroll 1
    for (; mine.has(n); n = mine.next(n)) {
      float s[kScores];
      qk_overlapped(s, q_desc, f);
      score_and_mask(s, f, tile, mine, row, n, !kDiagonalAlone && (Mask::kHasHi || Mask::kHasLo) && mine.masked(n));
      softmax_overlapped(s, f, n, false);
    }
    return n;
  }

  // kRolled: the same as one loop that begins with the softmax, so that the first block needs no code of its own.
  STROBE_DEVICE int attend_rolled(Fragments& f, const Tile& tile, const Blocks& mine, int row, int n, StoredQ& stored) {
    const u64 q_desc = k_major(q_tile(consumer));
    float s[kScores];
    qk<kBlockN>(s, q_desc, f);
#pragma unroll 1
    for (bool first = true;; first = false) {
      score_and_mask(s, f, tile, mine, row, n, mine.masked(n));
      softmax_overlapped(s, f, n, first);
      if (first) stored.release();
      n = mine.next(n);
      if (!mine.has(n)) return n;
      qk_overlapped(s, q_desc, f);
    }
  }

  // ---- consumers: the loop over tiles -------------------------------------------------------------------------------
  // The main loop is followed by a loop that skips the key blocks left of a window. Some kernels are faster with it
  // under any mask (Config::kSkipsAfter). Then it also skips the blocks of rows that see no keys.
  static constexpr bool kSkipsAfter = Mask::kHasLo || Config::kSkipsAfter;
  STROBE_DEVICE void consume() {
    Accumulators<T, kDimV>::declare();
    const int thread_row = 64 * consumer + 16 * (thread_idx() % 128 / 32) + thread_idx() % 32 / 4;  // and 8 further
    StoredQ stored{q};
    turns.start();
#pragma unroll 1
    for (;;) {
      // Prologue: the tile, and the key blocks that its rows and this consumer's rows see.
      q.wait_full();
      const Tile tile = read_tile<Config>(tile_info());
      if (tile.row0 < 0) break;
      const Blocks all = blocks_of(tile, tile.row0, kBlockM), mine = blocks_of(tile, tile.row0 + 64 * consumer, 64);
      const int row = tile.row0 + thread_row, last = all.begin();
      const bool sees_keys = mine.any();
      Fragments f(p, tile, row);
      if constexpr (Parts::kEnabled) parts.take(f.o, consumer, v, q);
      int n = last;
      if (sees_keys || !kSkipsAfter)
#pragma unroll 1
        for (const int end = sees_keys ? mine.end : all.first; n >= end; n = all.next(n)) skip_block(n < last);

      // Main loop, and the P V of its last block.
      if (sees_keys) {
        if (n < last) turns.yield_turn();
        if constexpr (Config::kRolled) n = attend_rolled(f, tile, mine, row, n, stored);
        else n = attend(f, tile, mine, row, n, stored);
      } else stored.release();
      f.state.resume(f.softmax, p);  // if no row has met a score
      if (kPrivateO && elected()) q.release();
      if (sees_keys) pv(f);

      // Epilogue.
#pragma unroll 2  // with 1 ptxas takes the rings for divergent at head dim 192: look for R2UR in the main loop
      for (n = all.from(n); kSkipsAfter && all.has(n); n = all.next(n)) skip_block(n < last);
      store(f, tile, row);
      q.next(), stored.pending = true;
      if (kWaitsForO) stored.release();  // else when the next tile has begun
    }
    stored.release();
    if (kPrivateO && thread_idx() % 128 == 0) tma_store_wait_read<0>();  // shared memory must outlive the copies
  }
};

template <class Config, class Mask, class Score, class Params> STROBE_DEVICE void forward_sm90(const Params& p) {
  using Forward = ForwardSm90<Config, Mask, Score, Params>;
  if (thread_idx() == 0) {
    for (const TensorMap* map : {&p.map_q, &p.map_k, &p.map_v}) tma_prefetch_map(map);
    if (!Config::kPartialOut || !Config::kSplit) tma_prefetch_map(&p.map_o);
  }
  init_block<Forward>();
  const u32 warpgroup = warp_uniform(thread_idx() / 128);
  share_registers<Config>(warpgroup);
  if (warpgroup == 0) {
    if (loads<Config>()) Forward(p, true).produce();
  } else Forward(p, false, warpgroup - 1).consume();
}

}  // namespace strobe

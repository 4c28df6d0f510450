// FlashAttention forward for Hopper: TMA, mbarriers, wgmma, warp specialisation.
//
// A block is one producer warpgroup, of which a single thread issues every copy, and kConsumers consumer warpgroups
// that own 64 query rows each. It stays on its multiprocessor and works through tile after tile, taking the next number
// from a counter in global memory; the rings of K and V buffers run on across tile boundaries, so the next tile's first
// keys arrive while the last one is being written. In a consumer, block n of the keys goes like this:
//     issue S_n = Q K_n^T            both in flight together; P is the register operand
//     issue O  += P_{n+1} V_{n+1}
//     wait for S_n:  the first kHold weights, exp(S_n - m), beside P V
//     wait for O:    the other weights; P_n replaces P_{n+1}
// (keys are visited from the last to the first, so n + 1 comes before n). The row maximum m is that of the first block:
// should a later score be far above it, the weights are computed again under a new one, and O *= exp(m_old - m_new).
#pragma once
#include <strobe/pipeline/ring.cuh>
#include <strobe/pipeline/schedule.cuh>
#include <strobe/ptx/memory.cuh>
#include <strobe/ptx/warp.cuh>
#include <strobe/tile/gemm_sm90.cuh>
#include <strobe/tile/softmax.cuh>

namespace strobe {

template <class Config, class Mask, class Params> struct ForwardSm90 {
  using T = typename Config::Element;
  static constexpr int kBlockN = Config::kBlockN, kDim = Config::kDim, kDimV = Config::kDimV;
  static constexpr int kConsumers = Config::kConsumers, kBlockM = 64 * kConsumers, kStages = Config::kStages,
                       kQSlots = Config::kQSlots;
  static constexpr int kScores = kBlockN / 2;  // of one thread
  static constexpr int kFold =
      Config::kFold;  // heads that share their keys as rows of one tile: row r is query r / kFold of head r % kFold
  static_assert(kBlockM == Config::kBlockM && kDimV <= kDim, "O fits over Q");

  // O is staged in shared memory on its way out: over the Q of its own tile or, where there is only one Q slot, in a
  // buffer of its own, some panels at a time, so that the next Q can be on its way already.
  static constexpr bool kPrivateO = Config::kStorePanels > 0;
  static constexpr int kStorePanels = kPrivateO ? Config::kStorePanels : panels(kDimV);
  static_assert(kPrivateO || kQSlots > 1,
                "a Q slot that also stages O is given back only when the next tile is under way");

  // ---- shared memory: Q slots, one part a consumer | K buffers | V buffers | O | barriers | mailboxes ---------------
  static constexpr u32 kBytesQ = tile_bytes(64, kDim), kBytesK = tile_bytes(kBlockN, kDim),
                       kBytesV = tile_bytes(kBlockN, kDimV);
  static constexpr u32 kOffsetK = kQSlots * kConsumers * kBytesQ, kOffsetV = kOffsetK + kStages * kBytesK,
                       kOffsetO = kOffsetV + kStages * kBytesV;
  static constexpr u32 kBytesO = tile_bytes(64, kPanel* kStorePanels),
                       kOffsetBarriers = kOffsetO + (kPrivateO ? kConsumers * kBytesO : 0);
  using RingQ = Ring<kQSlots>;
  using RingKV = Ring<kStages>;
  static constexpr u32 kOffsetMailbox =
      kOffsetBarriers + RingQ::kBytes + 2 * RingKV::kBytes;  // for each Q slot, where its tile lies
  static_assert(kOffsetMailbox + kQSlots * 32 == Config::kSmem, "the shared memory that Python asks for");

  const Params& p;
  u32 smem;
  RingQ q;
  RingKV k, v;

  STROBE_DEVICE ForwardSm90(const Params& params, bool producer)
      : p(params), smem(smem_base()), q(smem + kOffsetBarriers, producer),
        k(smem + kOffsetBarriers + RingQ::kBytes, producer),
        v(smem + kOffsetBarriers + RingQ::kBytes + RingKV::kBytes, producer) {}

  STROBE_DEVICE static void init_barriers() {
    const u32 at = smem_base() + kOffsetBarriers;
    RingQ::init(
        at, kPrivateO ? 4 * kConsumers : kConsumers);  // a warp is done with Q, or a warpgroup's O has left from there
    RingKV::init(at + RingQ::kBytes, 4 * kConsumers);  // one arrival a warp
    RingKV::init(at + RingQ::kBytes + RingKV::kBytes, 4 * kConsumers);
    mbar_init_fence();
  }

  STROBE_DEVICE Mask mask(const Tile& tile) const { return Mask{tile.len_q / kFold, tile.len_k, p.mask}; }
  STROBE_DEVICE u32 q_tile(int consumer) const { return smem + (q.stage * kConsumers + consumer) * kBytesQ; }
  // The key blocks that some of `rows` rows of the tile see; none if they lie beyond the sequence.
  STROBE_DEVICE KeyBlocks key_blocks(const Tile& tile, int first_row, int rows) const {
    if (first_row >= tile.len_q) return KeyBlocks{0, 0, 0, 0};
    const KeyBlocks blocks = blocks_of_rows(tile, first_row, rows);
    return Config::kSplit
               ? part_of(blocks, blocks_of_rows(tile, tile.row0, kBlockM), remainder(tile.work, p.splits), p.splits)
               : blocks;
  }
  STROBE_DEVICE KeyBlocks blocks_of_rows(const Tile& tile, int first_row, int rows) const {
    return visible_blocks<kBlockN>(mask(tile), first_row / kFold, (min(first_row + rows, tile.len_q) - 1) / kFold);
  }

  // The producer tells the consumers with each Q slot where its tile lies: to work that out takes several divisions.
  STROBE_DEVICE u32 mailbox() const { return smem + kOffsetMailbox + 32 * q.stage; }
  STROBE_DEVICE void post(const Tile& t) const {  // the arrival on the slot's full barrier publishes it
    st_shared(mailbox(), u32x4{u32(t.row0), u32(t.head), u32(t.slice), u32(t.len_q)});
    st_shared(mailbox() + 16, u32x4{u32(t.len_k), u32(t.first_row), u32(t.first_key), u32(t.work)});
  }
  STROBE_DEVICE Tile read_mail() const {
    const u32x4 x = ld_shared_x4(mailbox()), y = ld_shared_x4(mailbox() + 16);
    sync_warp();  // all lanes have read it before one of them gives the slot back
    return Tile{int(x.x), int(x.y), int(x.z), int(x.w), int(y.x), int(y.y), int(y.z), int(y.w)};
  }

  // ---- producer: one thread -----------------------------------------------------------------------------------------
  // Where a box of kRows rows begins. A tensor map is (columns, rows, panels, heads, batch), and one copy fetches all
  // panels. If the head dim is not a whole number of panels it is (columns, rows, 1, heads, batch), one copy a panel,
  // and what lies beyond the head dim reads as zero. Packed sequences have (columns, rows in the box, heads, rows in
  // memory, kFar): starting at `clip`, the box ends where the sequence does (see _tensor_map in plan.py).
  static constexpr int kFar = 1 << 30;
  struct Box {
    int c1, c2, c3, c4;
  };
  template <int kRows> STROBE_DEVICE static Box box(int row, int rows_there, int head, int batch) {
    if (!Config::kPacked) return Box{row, 0, head, batch};
    const int clip = max(0, kRows - rows_there);
    return Box{clip, head, kFar + row - clip, kFar};
  }
  template <int kRows, int kColumns> STROBE_DEVICE void load(u32 dst, const TensorMap* map, u32 bar, const Box& b) {
#pragma unroll
    for (int panel = 0; panel < (Config::kWholePanels ? 1 : panels(kColumns)); ++panel)
      tma_load_5d(dst + panel * (kRows * kPanelRowBytes), map, bar, panel * kPanel, b.c1, b.c2, b.c3, b.c4);
  }
  STROBE_DEVICE static Box key_box(const Tile& tile, int head, int n) {
    return box<kBlockN>(tile.first_key + n * kBlockN, tile.len_k - n * kBlockN, head, tile.slice);
  }
  STROBE_DEVICE static Box query_box(const Tile& tile, int row) {
    if (kFold > 1)
      return Box{0, row / kFold, tile.head, tile.slice};  // (columns, heads of a group, queries, groups, batch)
    return box<64>(tile.first_row + row, tile.len_q - row, tile.head, tile.slice);
  }
  STROBE_DEVICE void load_keys(const Tile& tile, int head, int n) {
    k.wait_empty();
    mbar_arrive_expect_tx(k.full_barrier(), kBytesK);
    load<kBlockN, kDim>(smem + kOffsetK + k.stage * kBytesK, &p.map_k, k.full_barrier(), key_box(tile, head, n));
    k.next();
  }
  STROBE_DEVICE void load_values(const Tile& tile, int head, int n) {
    v.wait_empty();
    mbar_arrive_expect_tx(v.full_barrier(), kBytesV);
    load<kBlockN, kDimV>(smem + kOffsetV + v.stage * kBytesV, &p.map_v, v.full_barrier(), key_box(tile, head, n));
    v.next();
  }
  STROBE_DEVICE void load_queries(const Tile& tile) {
    mbar_arrive_expect_tx(q.full_barrier(), kConsumers * kBytesQ);
#pragma unroll 1
    for (int w = 0; w < kConsumers; ++w)
      load<64, kDim>(q_tile(w), &p.map_q, q.full_barrier(), query_box(tile, tile.row0 + 64 * w));
  }

  // Tiles are numbered from the longest to the shortest; whoever is done takes the next. A block begins with its own
  // number and fetches once too often, so that p.tiles fetches happen in all: the counter wraps around to 0, ready for
  // the next launch.
  STROBE_DEVICE void produce() {
    int index = block_idx();
#pragma unroll 1
    while (index < p.tiles) {
      const int next =
          grid_dim() + atomic_inc_wrap(p.counter, p.tiles - 1);  // early: its latency passes during the copies
      const Tile tile = decode_tile<Config>(index, p);
      if (tile.row0 < tile.len_q) load_tile(tile);
      index = next;
    }
    q.wait_empty();
    post(Tile{-1});  // no more
    mbar_arrive(q.full_barrier());
  }

  STROBE_DEVICE void load_tile(const Tile& tile) {
    const KeyBlocks blocks = key_blocks(tile, tile.row0, kBlockM);
    const int head_k = quotient(tile.head, p.group);
    const bool any_keys = blocks.first < blocks.end;
    int n = blocks.end - 1;
    if (any_keys) load_keys(tile, head_k, n);
    q.wait_empty();
    post(tile);
    if (any_keys) load_queries(tile);
    else mbar_arrive(q.full_barrier());
    q.next();
#pragma unroll 1
    for (; n >= blocks.first; --n) {  // V one block behind K: the order in which the consumers need them
      if (n > blocks.first) load_keys(tile, head_k, n - 1);
      load_values(tile, head_k, n);
    }
  }

  // ---- consumers ----------------------------------------------------------------------------------------------------
  struct Fragments {
    Accumulators<T, kDimV> o;
    u32 weights[kScores / 2];
    Softmax<> softmax;
  };

  STROBE_DEVICE u64 k_desc() const { return k_major(smem + kOffsetK) + u64(k.stage * (kBytesK / 16)); }
  STROBE_DEVICE u64 v_desc() const { return mn_major(smem + kOffsetV, kBlockN) + u64(v.stage * (kBytesV / 16)); }
  STROBE_DEVICE static bool elected() { return thread_idx() % 32 == 0; }  // one arrival a warp

  // Ping-pong: the consumers take turns at issuing products, one turn for every key block of the tile but the first,
  // used or not.
  STROBE_DEVICE static void wait_turn(int consumer) {
    if (Config::kPingPong) bar_sync(1 + consumer, 256);
  }
  STROBE_DEVICE static void pass_turn(int consumer) {
    if (Config::kPingPong) bar_arrive(1 + (consumer + 1 == kConsumers ? 0 : consumer + 1), 256);
  }

  STROBE_DEVICE static void take_turn_unused(int consumer) {
    wait_turn(consumer);
    pass_turn(consumer);
  }

  // A key block of the tile of which this consumer's rows see nothing.
  STROBE_DEVICE void skip(int consumer, bool has_turn) {
    if (has_turn) take_turn_unused(consumer);
    pass_over(k);
    pass_over(v);
  }
  STROBE_DEVICE static void pass_over(RingKV& ring) {
    ring.wait_full();
    sync_warp();  // no lane may find the barrier a whole round further on because another gave the buffer back
    if (elected()) ring.release();
    ring.next();
  }

  template <int N> STROBE_DEVICE void prepare(float (&s)[N], const Tile& tile, int row, int n, bool masked) const {
    if (Config::kSoftcap) tanh_fragment(s, p.scale_before);
    if (masked) {
      const Mask m = mask(tile);
      const int column = n * kBlockN + 2 * (thread_idx() % 4), query[2] = {row / kFold, (row + 8) / kFold};
      const int lo[2] = {opaque(m.lo(query[0]) - column), opaque(m.lo(query[1]) - column)};
      const int hi[2] = {opaque(m.hi(query[0]) - column), opaque(m.hi(query[1]) - column)};
      mask_fragment<Mask::kHasLo>(s, lo, hi);
    }
  }

  // S_n of the first kKeys keys, nothing else in flight.
  template <int kKeys> STROBE_DEVICE void scores_alone(float (&s)[kKeys / 2], u64 q_desc) {
    k.wait_full();
    wgmma_fence();
    gemm_qk<T, kKeys, kDim, kBlockN>(s, q_desc, k_desc());
    wgmma_commit();
    wgmma_wait<0>();
    pin(s);
    if (elected()) k.release();
    k.next();
  }

  // O += P V, nothing else in flight.
  STROBE_DEVICE void values_alone(Fragments& f) {
    v.wait_full();
    wgmma_fence();
    gemm_pv<T, kBlockN, kDimV>(f.o, f.weights, v_desc());
    wgmma_commit();
    wgmma_wait<0>();
    if (elected()) v.release();
    v.next();
  }

  // S_n, with O += P_{n+1} V_{n+1} on its way, whose registers are the product's until `weights_beside` has waited for
  // it.
  STROBE_DEVICE void scores_beside(float (&s)[kScores], u64 q_desc, Fragments& f, int consumer) {
    k.wait_full();
    wait_turn(consumer);
    wgmma_fence();
    gemm_qk<T, kBlockN, kDim, kBlockN>(s, q_desc, k_desc());
    wgmma_commit();
    v.wait_full();
    wgmma_fence();  // a new basic block: without this one ptxas injects its own
    gemm_pv<T, kBlockN, kDimV>(f.o, f.weights, v_desc());
    wgmma_commit();
    pass_turn(consumer);
    wgmma_wait<1>();
    pin(s);
    if (elected()) k.release();
    k.next();
  }

  // S_n -> P_n, which replaces P_{n+1}: the first kHold weights before the wait for P V, or where ptxas puts them. In
  // the first block there is nothing to wait for, and no maximum to guess from.
  STROBE_DEVICE void weights_beside(float (&s)[kScores], Fragments& f, bool first) {
    constexpr int kFirst = Config::kHold ? Config::kHold : kScores;
    Guess<T, kScores> guess(f.softmax);
    guess.template weights<0, kFirst>(s);
    if (Config::kHold) hold(smem, f.softmax.l[0] + guess.sum[0] + guess.sum[1]);
    wgmma_wait<0>();
    pin(f.weights);
    if (!first) {
      if (elected()) v.release();
      v.next();
    }
    guess.template weights<kFirst, kScores>(s);
    if (guess.accepted(f.softmax, f.weights)) return;
    f.softmax.template maxima<true>(s);
    f.softmax.template weights<0, kScores>(s);
    pack_fragment<T>(f.weights, s);
    f.o.scale(f.softmax.alpha);
  }

  // S_n -> P_n, nothing else in flight. On the diagonal the upper half of a tile sees only the first half of the keys:
  // then the other half is not computed.
  static constexpr bool kTrim = Mask::kHasHi && kBlockN % 32 == 0;
  STROBE_DEVICE void weights_alone(u64 q_desc, Fragments& f, const Tile& tile, int row, int n, bool masked,
                                   int consumer) {
    const int last_row = min(tile.row0 + 64 * consumer + 64, tile.len_q) - 1;
    if (kTrim && mask(tile).hi(last_row / kFold) <= n * kBlockN + kBlockN / 2)
      weights_of<kTrim ? kBlockN / 2 : kBlockN>(q_desc, f, tile, row, n, true);
    else weights_of<kBlockN>(q_desc, f, tile, row, n, masked);
  }
  template <int kKeys>
  STROBE_DEVICE void weights_of(u64 q_desc, Fragments& f, const Tile& tile, int row, int n, bool masked) {
    float s[kKeys / 2];
    scores_alone<kKeys>(s, q_desc);
    prepare(s, tile, row, n, masked);
    f.softmax.template maxima<true>(s);
    f.softmax.template weights<0, kKeys / 2>(s);
#pragma unroll
    for (int i = 0; i < kScores / 2; ++i)
      f.weights[i] = i < kKeys / 4 ? pack2<T>(s[2 * i % (kKeys / 2)], s[(2 * i + 1) % (kKeys / 2)]) : 0u;
  }

  // A mask on the right: 64 rows on the diagonal meet one or two key blocks, and those go one by one. The loop over the
  // others is then free of it. Masks on both sides are applied in that loop, where they are needed.
  static constexpr bool kDiagonalAlone = Mask::kHasHi && !Mask::kHasLo;

  // Softcap and split keys are much code, and every copy is time for the compiler. There, one loop does all blocks: it
  // begins with the weights, so that the first block needs no code of its own. Other kernels have such code, and are
  // faster for it.
  static constexpr bool kOneLoop = Config::kSoftcap || Config::kSplit;

  // Some kernels that compile fast enough are faster with two copies: of O += P V alone, on the diagonal and for the
  // last block, and of the loop that passes over blocks, right of what the rows see and left of it.
  static constexpr bool kValuesTwice = kDim < 128, kSkipsTwice = kDim < 96 || (Config::kSoftcap && !Config::kSplit);

  // ---- output -------------------------------------------------------------------------------------------------------
  // A warpgroup stages its rows of O in shared memory, kStorePanels panels at a time; a bulk copy writes them and clips
  // what is beyond the sequence.
  STROBE_DEVICE u32 staging(int consumer) const {
    return kPrivateO ? smem + kOffsetO + consumer * kBytesO : q_tile(consumer);
  }
  STROBE_DEVICE void wait_staging(int consumer) const {
    if (kPrivateO && thread_idx() % 128 == 0) tma_store_wait_read<0>();  // what was staged here before has left
    bar_sync(1 + kConsumers + consumer, 128);  // or: every warp of this warpgroup is done with Q
  }
  STROBE_DEVICE void send(const Tile& tile, int first, int panel, int consumer, u32 tid) const {
    fence_proxy_async();
    bar_sync(1 + kConsumers + consumer, 128);
    if (tid == 0 && first < tile.len_q) {
      const Box b = query_box(tile, first);
      if (Config::kWholePanels) {
        tma_store_5d(&p.map_o, staging(consumer), 0, b.c1, panel, b.c3, b.c4);
      } else {
#pragma unroll
        for (int i = 0; i < min(kStorePanels, panels(kDimV) - panel); ++i)
          tma_store_5d(&p.map_o, staging(consumer) + i * (64 * kPanelRowBytes), (panel + i) * kPanel, b.c1, b.c2, b.c3,
                       b.c4);
      }
      tma_store_commit();
    }
  }

  STROBE_DEVICE int head_of(const Tile& tile, int row) const { return tile.head * kFold + row % kFold; }
  STROBE_DEVICE float sink_of(int head) const { return Config::kSinks ? ld_global(p.sinks + head) : 0.f; }
  STROBE_DEVICE void store_lse(const Tile& tile, int row, int head, float lse) const {
    st_global(p.lse + tile.slice * p.lse_batch + head * p.lse_head + tile.first_row + row / kFold, lse);
  }

  // Normalise, round, stage, send.
  STROBE_DEVICE void store(Fragments& f, const Tile& tile, int row, int consumer) {
    float inverse[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int head = head_of(tile, row + 8 * r);
      float lse;
      inverse[r] = f.softmax.template finish<Config::kSinks>(r, sink_of(head), lse);
      if (p.lse && thread_idx() % 4 == 0 && row + 8 * r < tile.len_q) store_lse(tile, row + 8 * r, head, lse);
    }
    store_from<0>(f, inverse, tile, consumer);
  }
  // `Accumulators` wants constants: loops that the language unrolls, panels and in them 16 columns at a time.
  template <int kPanelFrom>
  STROBE_DEVICE void store_from(const Fragments& f, const float (&inverse)[2], const Tile& tile, int consumer) {
    if constexpr (kPanelFrom < panels(kDimV)) {
      wait_staging(consumer);
      stage<kPanelFrom * 4, 0>(f, inverse, consumer);
      send(tile, tile.row0 + 64 * consumer, kPanelFrom, consumer, thread_idx() % 128);
      store_from<kPanelFrom + kStorePanels>(f, inverse, tile, consumer);
    }
  }
  template <int kFrom, int J> STROBE_DEVICE void stage(const Fragments& f, const float (&inverse)[2], int consumer) {
    if constexpr (J < kStorePanels * 4 && kFrom + J < kDimV / 16) {
      const u32 tid = thread_idx() % 128, lane = tid % 32;
      f.o.template stage<kFrom + J>(
          staging(consumer) + chunk_offset(64, 16 * (tid / 32) + (lane & 15), 2 * J + (lane >> 4)), inverse);
      stage<kFrom, J + 1>(f, inverse, consumer);
    }
  }

  // ---- keys split among several blocks ------------------------------------------------------------------------------
  // Each leaves O, m and l of its part in memory. The last to do so puts them together, in order, and stores the
  // result; who that is does not change it.
  static constexpr int kPartFloats =
      64 * kDimV + 2 * 64;  // of one consumer: O, row by row, and behind it m and l of every row
  static_assert(kConsumers * kPartFloats == Config::kPartFloats, "the workspace that Python asks for");
  STROBE_DEVICE float* part_of_tile(const Tile& tile, int part, int consumer) const {
    return p.partial + (i64(quotient(tile.work, p.splits) * p.splits + part) * kConsumers + consumer) * kPartFloats;
  }

  // Returns whether this was the last part.
  STROBE_DEVICE bool leave_part(const Fragments& f, const Tile& tile, int consumer) const {
    const int tid = thread_idx() % 128, lane = tid % 32, rows = tile.len_q - tile.row0 - 64 * consumer;
    float* mine = part_of_tile(tile, remainder(tile.work, p.splits), consumer);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int eight = tid / 32 * 16 + 8 * r, row = eight + lane / 4;
      if (!warp_uniform(eight < rows))
        continue;  // said to be uniform: else ptxas takes the rings for divergent from here on
      f.o.store_row(r, mine + row * kDimV + 2 * (lane % 4));
      const float l = quad_sum(f.softmax.l[r]);
      if (lane % 4 == 0) st_global_x2(mine + 64 * kDimV + 2 * row, f.softmax.m[r], l);
    }
    const u32 parts_before = staging(consumer);
    wait_staging(consumer);
    if (tid == 0) {
      fence_device();
      st_shared(parts_before,
                atomic_inc_wrap(p.counter + 1 + quotient(tile.work, p.splits) * kConsumers + consumer, p.splits - 1));
      fence_device();
    }
    bar_sync(1 + kConsumers + consumer, 128);
    const bool last = ld_shared(parts_before) == u32(p.splits - 1);
    bar_sync(1 + kConsumers + consumer, 128);  // all have read it
    if (!last) fence_proxy_async();            // a bulk copy may write there next
    return last;
  }

  // A thread takes kPieces times four columns of a row, its neighbours the columns beside them, and kParts parts at
  // once, since a load takes long. The maximum moves on from parts to parts as it does from block to block.
  STROBE_DEVICE void merge_parts(const Tile& tile, int consumer) const {
    constexpr int kPieces = 4, kParts = 4, kFromPartToPart = kConsumers * kPartFloats, kMost = kPanel * kStorePanels;
    const u32 tid = thread_idx() % 128;
    const int first = tile.row0 + 64 * consumer, rows = min(64, tile.len_q - first);
    const float* parts = part_of_tile(tile, 0, consumer);
#pragma unroll 1
    for (int panel = 0; panel < panels(kDimV); panel += kStorePanels) {
      const int columns = kDimV % kMost == 0 ? kMost : min(kMost, kDimV - panel * kPanel), stride = columns / kPieces,
                threads = stride / 4;
      wait_staging(consumer);
#pragma unroll 1
      for (int i = tid; i < rows * threads; i += 128) {
        const int row = i / threads, column = i % threads * 4;
        const float *values = parts + row * kDimV + panel * kPanel + column, *statistics = parts + 64 * kDimV + 2 * row;
        float m = neg_inf(), l = 0.f, o[kPieces][4] = {};
#pragma unroll 1
        for (int part = 0; part < p.splits; part += kParts) {
          float x[kParts][kPieces][4], ml[kParts][2], now = m;
#pragma unroll
          for (int j = 0; j < kParts; ++j) {
            const bool there = part + j < p.splits;
            ld_global_l2(ml[j], statistics + j * kFromPartToPart, there);
            if (!there) ml[j][0] = neg_inf();
#pragma unroll
            for (int c = 0; c < kPieces; ++c) ld_global_l2(x[j][c], values + j * kFromPartToPart + c * stride, there);
          }
          statistics += kParts * kFromPartToPart, values += kParts * kFromPartToPart;
#pragma unroll
          for (int j = 0; j < kParts; ++j) now = fmax(now, ml[j][0]);
          const float safe = now == neg_inf() ? 0.f : now, past = exp2_approx((m - safe) * p.scale_log2);
          m = now;
          l *= past;
#pragma unroll
          for (int c = 0; c < 4 * kPieces; ++c) o[c / 4][c % 4] *= past;
#pragma unroll
          for (int j = 0; j < kParts; ++j) {
            const float weight = exp2_approx((ml[j][0] - safe) * p.scale_log2);
            l = fma(ml[j][1], weight, l);
#pragma unroll
            for (int c = 0; c < 4 * kPieces; ++c) o[c / 4][c % 4] = fma(x[j][c / 4][c % 4], weight, o[c / 4][c % 4]);
          }
        }
        const int head = head_of(tile, first + row);
        float lse;
        const float inverse = normaliser<Config::kSinks>(l, m * p.scale_log2, sink_of(head), lse);
        if (p.lse && panel + column == 0) store_lse(tile, first + row, head, lse);
#pragma unroll
        for (int c = 0; c < kPieces; ++c)
          st_shared(
              staging(consumer) + chunk_offset(64, row, (column + c * stride) / 8) + column % 8 * 2,
              u32x2{pack2<T>(o[c][0] * inverse, o[c][1] * inverse), pack2<T>(o[c][2] * inverse, o[c][3] * inverse)});
      }
      send(tile, first, panel, consumer, tid);
    }
  }

  // O staged over Q: its slot is free once the copy has read it. Called well after `store`, so that nobody waits.
  STROBE_DEVICE void release_stored(RingQ& stored, bool& pending) {
    if (kPrivateO || !pending) return;
    pending = false;
    if (thread_idx() % 128 == 0) {
      tma_store_wait_read<0>();
      stored.release();
    }
    stored.next();
  }

  STROBE_DEVICE void consume(int consumer) {
    Accumulators<T, kDimV>::declare();
    const int thread_row =
        64 * consumer + 16 * (thread_idx() % 128 / 32) + thread_idx() % 32 / 4;  // and 8 further down
    if (consumer == kConsumers - 1) pass_turn(consumer);  // the first consumer gets the first turn
    RingQ stored = q;
    bool pending = false;
#pragma unroll 1
    for (;;) {
      q.wait_full();
      const Tile tile = read_mail();
      if (tile.row0 < 0) break;
      const KeyBlocks all = key_blocks(tile, tile.row0, kBlockM),
                      mine = key_blocks(tile, tile.row0 + 64 * consumer, 64);
      const int row = tile.row0 + thread_row;
      Fragments f;
      f.o.zero();
      f.softmax.reset(p.scale_log2);
      const int last = all.end - 1;
      const bool sees_keys = mine.first < mine.end;
      int n = last;
      if (!kSkipsTwice || sees_keys)
#pragma unroll 1
        for (const int end = sees_keys ? mine.end : all.first; n >= end; --n) skip(consumer, n < last);
      if (sees_keys) {
        const u64 q_desc = k_major(q_tile(consumer));
        if (n < last) take_turn_unused(consumer);
        // Once through this loop, but for blocks on the diagonal that go one by one: then O += P V, too, is written
        // once for all.
#pragma unroll 1
        for (bool first = true;; first = false) {
          if (kOneLoop) {
            float s[kScores];
            scores_alone<kBlockN>(s, q_desc);
#pragma unroll 1
            for (;; first = false) {
              prepare(s, tile, row, n, n >= mine.end_full || n < mine.first_full);
              weights_beside(s, f, first);
              if (first) release_stored(stored, pending);
              if (--n < mine.first) break;
              scores_beside(s, q_desc, f, consumer);
            }
          } else {
            weights_alone(q_desc, f, tile, row, n, Mask::kHasHi || n >= mine.end_full || n < mine.first_full, consumer);
            if (!first) f.o.scale(f.softmax.alpha);
            release_stored(stored, pending);
            if (--n >= mine.end_full && kDiagonalAlone) {
              take_turn_unused(consumer);
              if (kValuesTwice) {
                values_alone(f);
                continue;
              }
            } else {
#pragma unroll 1
              for (; n >= mine.first; --n) {
                float s[kScores];
                scores_beside(s, q_desc, f, consumer);
                const bool masked =
                    !kDiagonalAlone && ((Mask::kHasHi && n >= mine.end_full) || (Mask::kHasLo && n < mine.first_full));
                prepare(s, tile, row, n, masked);
                weights_beside(s, f, false);
              }
            }
          }
          if (kPrivateO && n < mine.first && elected()) q.release();
          values_alone(f);
          if (kOneLoop || !kDiagonalAlone || kValuesTwice || n < mine.first) break;
        }
      } else {
        release_stored(stored, pending);
        if (kPrivateO && elected()) q.release();
      }
      // What is left to pass over: nothing without a mask on that side, if rows that see no keys are through already.
#pragma unroll(kSkipsTwice ? 2 : 1)
      for (; (Mask::kHasLo || kSkipsTwice) && n >= all.first; --n) skip(consumer, n < last);
      if (!Config::kSplit) store(f, tile, row, consumer);
      else if (leave_part(f, tile, consumer)) merge_parts(tile, consumer);
      pending = true;
      q.next();
    }
    release_stored(stored, pending);
    if (kPrivateO && thread_idx() % 128 == 0) tma_store_wait_read<0>();  // shared memory must outlive the copies
  }
};

template <class Config, class Mask, class Params> STROBE_DEVICE void forward_sm90(const Params& p) {
  using Forward = ForwardSm90<Config, Mask, Params>;
  if (thread_idx() == 0) {
    tma_prefetch_map(&p.map_q);
    tma_prefetch_map(&p.map_k);
    tma_prefetch_map(&p.map_v);
    tma_prefetch_map(&p.map_o);
    Forward::init_barriers();
  }
  sync_block();
  const u32 warpgroup = warp_uniform(thread_idx() / 128);
  if (warpgroup == 0) {
    regs_dec<Config::kRegsProducer>();
    if (thread_idx() == 0) Forward(p, true).produce();
  } else {
    regs_inc<Config::kRegsConsumer>();
    Forward(p, false).consume(warpgroup - 1);
  }
}

}  // namespace strobe

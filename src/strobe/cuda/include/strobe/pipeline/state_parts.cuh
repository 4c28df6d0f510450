// kMerge with p.merge: loads the O of a state, in fp32. The producer loads it by TMA into the buffers of V, before the
// first V of the tile, in parts: as many panels of a consumer's 64 rows as a buffer holds. Only the consumer that a
// part belongs to waits for it and releases it, so no consumer waits for another. Hence parts have barriers of their
// own, each used once a tile, and the ring of V does not count them. Their parity is that of the tile's number, which
// follows from the ring of Q if that has one slot or two.
#pragma once
#include <strobe/pipeline/ring.cuh>
#include <strobe/pipeline/schedule.cuh>

namespace strobe {

template <class Config> struct StateParts {
  static constexpr int kStages = Config::kStages, kDimV = Config::kDimV;
  static constexpr u32 kBytesBuffer = tile_bytes<typename Config::Element>(Config::kBlockN, kDimV),
                       kBytesPanel = 64 * kPanelRowBytes;
  static constexpr int kPanels = panels<float>(kDimV), kFit = kBytesBuffer / kBytesPanel,
                       kAtOnce = kFit < kPanels ? kFit : kPanels;
  static constexpr bool kEnabled = Config::kMerge && !Config::kSplit && kAtOnce > 0 && Config::kQSlots <= 2;
  static constexpr bool kApart = Config::kMerge && !Config::kPartialOut;  // O goes to another tensor, and rounded
  static_assert(kEnabled || !kApart, "an O of its own is read by TMA alone");
  static constexpr int kEach = kEnabled ? (kPanels + kAtOnce - 1) / kAtOnce : 1,  // of a consumer
      kParts = kEnabled ? Config::kConsumers * kEach : 0;
  // The producer has, with three consumers, no register left to count its V's: all parts are read before the first V is
  // loaded.
  static constexpr bool kInTurn = Config::kConsumers < 3;
  static constexpr u32 kBytes = 16 * kParts;

  using RingV = Ring<kStages>;
  using RingQ = Ring<Config::kQSlots>;

  u32 full, empty;  // shared-memory addresses of the first barrier of each kind
  u32 buffers;      // of the first buffer of V
  bool merge = false;

  template <class Params> STROBE_DEVICE StateParts(const Params& p, u32 barriers, u32 buffers)
      : full(barriers), empty(barriers + 8 * kParts), buffers(buffers) {
    if constexpr (kEnabled) merge = p.merge;
  }
  STROBE_DEVICE static void init(u32 barriers) {
    for (int i = 0; i < kParts; ++i) {
      mbar_init(barriers + 8 * i, 1);
      mbar_init(barriers + 8 * (kParts + i), 4);  // one arrival a warp
    }
  }

  // Producer: loads all parts of a tile into one buffer after the other, from the ring's position on. It waits until
  // the old content of the buffer has been read: a V, another part, or a part of the tile before, if that had too few
  // V's to wait for it.
  template <class Params> STROBE_DEVICE void load(const Params& p, const Tile& tile, RingV v, const RingQ& q) const {
    const TensorMap* map = map_of(p);
    const u32 parity = parity_of(q, true);
    if (kInTurn) wait_read(parity ^ 1);
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      if (i < kStages) v.wait_empty();
      else wait_read(i - kStages, parity);
      const int panel = i % kEach * kAtOnce, count = min(kAtOnce, kPanels - panel);
      mbar_arrive_expect_tx(full + 8 * i, count * kBytesPanel);
      tma_load_panels<float, 64>(buffers + v.stage * kBytesBuffer, map, full + 8 * i,
                                 Config::Queries::template box<64>(tile.q, tile.head, tile.row0 + i / kEach * 64),
                                 panel, count);
      v.next();
    }
    if (!kInTurn) wait_read(parity);
  }
  // Producer: V number n of the tile overwrites parts n, n + kStages, …; waits until the last of them has been read.
  STROBE_DEVICE void make_room(int n, const RingQ& q) const {
    if (kInTurn && n < kStages && n < kParts) wait_read(n + (kParts - 1 - n) / kStages * kStages, parity_of(q, true));
  }

  // Consumer: adds its parts to accumulators that are zero. Without a merge nothing is read. There is no branch for
  // that: ptxas would serialise the wgmmas.
  template <int kPart = 0, class O> STROBE_DEVICE void take(O& o, int consumer, const RingV& v, const RingQ& q) const {
    if constexpr (kPart < kEach) {
      const int i = consumer * kEach + kPart, thread = thread_idx_again() % 128;  // holds no register between tiles
      mbar_wait(full + 8 * i, merge ? parity_of(q, false) : 1);  // without a merge: parity 1 passes on a fresh barrier
      take_panels<kPart * kAtOnce, 0>(o, buffers + (v.stage + i) % kStages * kBytesBuffer, thread);
      sync_warp();  // all lanes have read it
      if (elected()) mbar_arrive(empty + 8 * i);
      take<kPart + 1>(o, consumer, v, q);
    }
  }

 private:
  template <class Params> STROBE_DEVICE static const TensorMap* map_of(const Params& p) {
    if constexpr (kApart) return &p.map_state;
    else return &p.map_o;
  }
  // The producer's ring of Q has gone on to the next tile.
  STROBE_DEVICE static u32 parity_of(const RingQ& q, bool producer) {
    return Config::kQSlots == 1 ? q.parity : q.stage ^ u32(producer);
  }
  STROBE_DEVICE void wait_read(int part, u32 parity) const { mbar_wait(empty + 8 * part, parity); }
  STROBE_DEVICE void wait_read(u32 parity) const {
#pragma unroll
    for (int i = 0; i < kParts; ++i) wait_read(i, parity);
  }
  template <int kFrom, int J, class O> STROBE_DEVICE void take_panels(O& o, u32 buffer, int thread) const {
    if constexpr (J < kAtOnce && kFrom + J < kPanels) {
      o.template add_staged<kFrom + J>(buffer + J * kBytesPanel + fp32_offset(thread), in_odd_row(thread), merge);
      take_panels<kFrom, J + 1>(o, buffer, thread);
    }
  }
};

}  // namespace strobe

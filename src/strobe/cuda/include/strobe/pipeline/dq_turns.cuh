// Deterministic dQ: key blocks take turns at adding to its sums. This needs no zeros before and no rounding kernel
// afterwards: the first turn stores, and in the last turn the consumer adds the sums to its registers and rounds.
#pragma once
#include <strobe/pipeline/dq_sum.cuh>
#include <strobe/pipeline/staging.cuh>

namespace strobe {

struct Turn {
  u32 number;  // how many blocks of keys come before
  bool last;
};

// The turn of `tile` at block m of the queries. Turns follow the order in which key blocks reach m if all of them start
// together. Under a right bound each key block starts at its diagonal, so the last key block comes first. Key blocks
// are launched in that order, so none waits for one that was launched after it. Without a bound key blocks start at
// different queries (kRotate), those of one head are on the GPU together, and the order is cyclic.
template <class Config, class Mask>
STROBE_DEVICE Turn turn_of(const Mask& mask, const KeyTile& tile, int query_blocks, int key_blocks, int m) {
  constexpr int kBlockM = Config::kBlockM, kBlockN = Config::kBlockN;
  const int n = tile.key0 / kBlockN;
  if (Config::kRotate) {
    const int started = min(quotient((m + 1) * key_blocks - 1, query_blocks) + 1, key_blocks);  // at m or before
    const int number = n < started ? started - 1 - n : started + key_blocks - 1 - n;
    return Turn{u32(number), number == key_blocks - 1};
  }
  const int last_query = min((m + 1) * kBlockM, tile.q.length) - 1;
  return Turn{u32((mask.hi(last_query) + kBlockN - 1) / kBlockN - 1 - n), mask.lo(m * kBlockM) >= tile.key0};
}

STROBE_DEVICE void await_turn(const u32* counter, u32 number) {
  while (acquire_turn(counter) != number) {
  }
}

// ---- consumer: the last turn ----------------------------------------------------------------------------------------
// If there are `others`, adds their sums, which lie in the buffer. Then rounds dQ into the buffer or, with kPartialDq,
// stores it as fp32 straight from the registers to where `rows` says.
template <class Config, class Params, class Rows>
STROBE_DEVICE void finish_dq(const Params& p, const DqSum& sum, float (&dq)[32], bool others, Rows rows) {
  using Tile = Rounded<typename Config::Element, 64>;
  sum.await_empty();
  if (others) sum.add_to(dq);
  if constexpr (Config::kPartialDq) {
    rows().store(Tile{dq, p.scale_grad}, 0);
  } else {
    const float both[2] = {p.scale_grad, p.scale_grad};
    sync_warpgroup(sum.consumer);  // all have read the buffer
    Staging<typename Config::Element, false, 64, 1, false>{sum.buffer, sum.consumer}.fill(Tile{dq}, both);
  }
  sum.announce();
}

// ---- adding warp ----------------------------------------------------------------------------------------------------
// Passes the turn on once its sums are written. `sent`: the part whose sums are in flight, or -1.
template <class Params> STROBE_DEVICE void pass_turn(const Params& p, int sent) {
  if (thread_idx() % 32 == 0 && sent >= 0) {
    bulk_wait_written();
    release_turn(p.turns + sent);
  }
}
template <class Params> STROBE_DEVICE void send_sums(const Params& p, const DqSum& sum, int part, u32 number) {
  if (thread_idx() % 32 == 0) {
    float* const sums = p.dq_sum + i64(part) * kDqFloats;
    if (number == 0) bulk_store(sums, sum.buffer, kDqBytes);
    else bulk_add(sums, sum.buffer, kDqBytes);
    tma_store_commit();
    tma_store_wait_read<0>();
  }
}
// Loads the sums of the others into the buffer.
template <class Params> STROBE_DEVICE void fetch_sums(const Params& p, const DqSum& sum, int part) {
  const int lane = thread_idx_again() % 32;
  const float* from = p.dq_sum + i64(part) * kDqFloats + 4 * lane;
#pragma unroll
  for (int i = 0; i < kDqFloats / 128; ++i) cp_async_16(sum.buffer + 16 * lane + 512 * i, from + 128 * i);
  cp_async_commit();
  cp_async_wait<0>();
}
template <class Config, class Params>
STROBE_DEVICE void store_dq(const Params& p, const KeyTile& tile, const DqSum& sum, int head, int m) {
  using T = typename Config::Element;
  const int row = DqRows<Config::kBlockM>::first(m, sum.consumer), rows = tile.q.length - row;
  if (thread_idx() % 32 == 0 && rows > 0) {
    const Box box = Config::Queries::template box<64>(tile.q, head, row);
    tma_store_panels<T, false, 64>(&p.map_dq, sum.buffer, box,
                                   DqRows<Config::kBlockM>::column(sum.consumer) / kPanel<T>, 1);
    tma_store_commit();
    tma_store_wait_read<0>();
  }
}

// Handles one block of queries. The long waits overlap with the consumer's work: the sums of the block before are
// written, its turn is passed on, and this block's turn comes. In the last turn the buffer goes to the consumer with
// the sums of the others and comes back with dQ.
template <class Config, class Params> STROBE_DEVICE void add_in_turn(const Params& p, const KeyTile& tile,
                                                                     const DqSum& sum, int head, int m, Turn turn,
                                                                     int& sent) {
  if (!turn.last) sum.offer();
  // Neighbouring blocks of keys are kBlockN queries apart. With kBlockM = 64 that is two steps: this turn has usually
  // come already, and reading its counter overlaps with the writing of the sums. With kBlockM = 128 it is one step: the
  // neighbour waits for the release, which reading the counter first would delay.
  constexpr bool kLooks = Config::kBlockM < Config::kBlockN;
  if (!kLooks) pass_turn(p, sent);
  const int part = int(dq_part<Config>(p, tile, head, m, sum.consumer));
  const bool waits = thread_idx() % 32 == 0 && turn.number > 0;
  const bool came = kLooks && waits && acquire_turn(p.turns + part) == turn.number;
  if (kLooks) pass_turn(p, sent);
  sent = turn.last ? -1 : part;
  if (waits && !came) await_turn(p.turns + part, turn.number);
  sync_warp();
  if (turn.last) {
    if (turn.number > 0) fetch_sums(p, sum, part);
    sum.offer();
  }
  sum.await_full();
  if (!turn.last) send_sums(p, sum, part, turn.number);
  else if (!Config::kPartialDq) store_dq<Config>(p, tile, sum, head, m);
  sync_warp();
}

}  // namespace strobe

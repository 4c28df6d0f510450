// Deterministic dQ: blocks of keys add to its sums by turns. Then nobody needs zeros before, nor a kernel that rounds
// afterwards: the first turn stores, and in the last one the consumer adds the sums to its registers and stores dQ.
#pragma once
#include <strobe/pipeline/dq_sum.cuh>
#include <strobe/pipeline/staging.cuh>

namespace strobe {

struct Turn {
  u32 number;  // so many blocks of keys come before
  bool last;
};

// When the keys of `tile` add to block m of the queries: in the order in which blocks of keys come by if all of them
// start together. Under a right bound each starts at its diagonal, so the last comes first; blocks are launched in that
// order, and none waits for a block that was launched after it. Without a bound the blocks of keys start at different
// queries (kRotate), those of one head are on the GPU together, and the order is cyclic.
template <class Config, class Mask>
STROBE_DEVICE Turn turn_of(const Mask& mask, const KeyTile& tile, int query_blocks, int key_blocks, int m) {
  constexpr int kBlockM = Config::kBlockM, kBlockN = Config::kBlockN;
  const int n = tile.key0 / kBlockN;
  if (Config::kRotate) {
    const int started = min(quotient((m + 1) * key_blocks - 1, query_blocks) + 1, key_blocks);  // at m or before
    const int number = n < started ? started - 1 - n : started + key_blocks - 1 - n;
    return Turn{u32(number), number == key_blocks - 1};
  }
  const int last_query = min((m + 1) * kBlockM, tile.len_q) - 1;
  return Turn{u32((mask.hi(last_query) + kBlockN - 1) / kBlockN - 1 - n), n == mask.lo(m * kBlockM) / kBlockN};
}

STROBE_DEVICE void await_turn(const u32* counter, u32 number) {
  while (acquire_turn(counter) != number) {
  }
}

// Consumer, the last turn: adds what the others have summed up, if there are `others`, and stores dQ: as fp32 straight
// from the registers, or rounded, by way of the buffer.
template <class Config, class Params> STROBE_DEVICE void finish_dq(const Params& p, const KeyTile& tile,
                                                                   const DqSum& sum, float (&dq)[32], int head, int m,
                                                                   bool others) {
  using Tile = Rounded<typename Config::Element, 64>;
  const float* sums = p.dq_sum + dq_part<Config>(p, tile, head, m, sum.consumer) * kDqFloats;
  sum.await_empty();  // the other turns are over, too: see add_in_turn
#pragma unroll
  for (int half = 0; half < 32; half += 16) {  // all at once would take 32 registers
    float x[4][4];
#pragma unroll
    for (int i = 0; i < 4; ++i) ld_global_l2(x[i], sums + thread_idx_again() % 128 * 4 + (half + 4 * i) * 128, others);
#pragma unroll
    for (int i = 0; i < 16; ++i) dq[half + i] += x[i / 4][i % 4];
  }
  const int row = m * Config::kBlockM + (Config::kBlockM == 128 ? 64 * sum.consumer : 0), rows = tile.len_q - row,
            column = Config::kBlockM == 128 ? 0 : 64 * sum.consumer;
  if constexpr (Config::kPartialDq) {
    const i64 first = tile.slice * p.dq_batch + head * p.dq_head + i64(tile.first_row + row) * p.dq_row + column;
    Fp32Rows{p.dq + first, p.dq_row, rows, p.dim - column}.store(Tile{dq, p.scale_grad}, 0);
  } else {
    const float both[2] = {p.scale_grad, p.scale_grad};
    Staging<false, 64, 1, false>{sum.buffer, sum.consumer}.fill(Tile{dq}, both);
    fence_proxy_async();
    sync_warpgroup(sum.consumer);
    if (thread_idx() % 128 == 0 && rows > 0) {
      const Box box = box_of_rows<Config::kVarlen, 64>(tile.first_row + row, rows, head, tile.slice);
      tma_store_panels<false, 64>(&p.map_dq, sum.buffer, box, column / kPanel, 1);
      tma_store_commit();
      tma_store_wait_read<0>();
    }
  }
  sum.announce();
}

// Adding warp. For the last turn the buffer is called empty when all other turns are over, so the consumer waits for
// both.
template <class Params> STROBE_DEVICE void add_in_turn(const Params& p, const DqSum& sum, int part, const Turn& turn) {
  const bool leader = thread_idx() % 32 == 0;
  if (leader && turn.last) await_turn(p.turns + part, turn.number);
  sync_warp();
  sum.exchange();
  if (leader && !turn.last) {
    await_turn(p.turns + part, turn.number);
    float* sums = p.dq_sum + i64(part) * kDqFloats;
    if (turn.number == 0) bulk_store(sums, sum.buffer, kDqBytes);
    else bulk_add(sums, sum.buffer, kDqBytes);
    tma_store_commit();
    bulk_wait_written();
    release_turn(p.turns + part);
  }
  sync_warp();
}

}  // namespace strobe

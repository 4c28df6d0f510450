// Which rows a block works on, and which key blocks they see.
#pragma once
#include <strobe/ptx/memory.cuh>
#include <strobe/ptx/warp.cuh>

namespace strobe {

// Of numbers that are not negative: without a sign a division is less code.
STROBE_DEVICE int quotient(int a, int b) { return int(u32(a) / u32(b)); }
STROBE_DEVICE int remainder(int a, int b) { return int(u32(a) % u32(b)); }

// kPositions: what is in memory is a part of a longer sequence, as in context parallelism. Row r of it has position
// offset_q + r among whole_q queries, key c has position offset_k + c among whole_k keys, and masks count positions.
struct Positions {
  int offset_q, whole_q, offset_k, whole_k;
};

// Rows [row0, row0 + kBlockM) of one head of one sequence. Rows and keys count from the start of the sequence in
// memory; first_row and first_key say where that lies in varlen tensors. With packed GQA, kPackGqa heads of a group
// are rows of one tile: row r is query r / kPackGqa of head r % kPackGqa of the group.
struct Tile {
  int row0, head;
  int batch;  // the sequence
  int slice;  // the batch index in the tensors: varlen sequences share one
  int len_q, len_k, first_row, first_key;
  int work;  // its number; with split-KV that of one split of the tile
  Positions positions;
};

// Tiles are numbered so that heads whose keys and values fit into the L2 together form a section; inside a section the
// rows with the most keys come first, so that the long tiles do not run last.
template <class Config, class Params> STROBE_DEVICE Tile decode_tile(int work, const Params& p) {
  const int index = Config::kSplit ? quotient(work, p.splits) : work;
  const int heads_in_all = p.batch * p.heads;
  const int per_section = p.row_blocks * p.section, section = quotient(index, per_section),
            rest = index - section * per_section;
  const int head0 = section * p.section, width = min(p.section, heads_in_all - head0);
  const int block = quotient(rest, width), bh = head0 + rest - block * width;
  Tile t;
  t.work = work;
  const int batch = quotient(bh, p.heads);
  t.batch = batch;
  t.head = bh - batch * p.heads;
  t.row0 = (p.row_blocks - 1 - block) * Config::kBlockM;
  t.len_q = p.len_q;
  t.len_k = p.len_k;
  t.first_row = t.first_key = 0;
  t.slice = Config::kVarlen ? 0 : batch;
  if (Config::kVarlen) {
    t.first_row = ld_global(p.cu_q + batch);
    t.first_key = ld_global(p.cu_k + batch);
    t.len_q = ld_global(p.cu_q + batch + 1) - t.first_row;
    t.len_k = ld_global(p.cu_k + batch + 1) - t.first_key;
  }
  t.positions = Positions{};
  if (Config::kPositions) {
    const int* at = p.positions + 4 * batch;
    t.positions = Positions{ld_global(at), ld_global(at + 1), ld_global(at + 2), ld_global(at + 3)};
    t.len_k = max(0, min(t.len_k, t.positions.whole_k - t.positions.offset_k));  // what lies behind may be anything
  }
  return t;
}

// Blocks that stay on their multiprocessor take tile after tile from a counter. A block begins with its own number and
// takes one tile too many, so that p.tiles are taken in all: the counter wraps around to 0, ready for the next launch.
template <class Params> STROBE_DEVICE int take_tile(const Params& p) {
  return grid_dim() + atomic_inc_wrap(p.counter, p.tiles - 1);
}

STROBE_DEVICE void publish_positions(u32 slot, const Positions& at) {
  st_shared(slot, u32x4{u32(at.offset_q), u32(at.whole_q), u32(at.offset_k), u32(at.whole_k)});
}
STROBE_DEVICE Positions read_positions(u32 slot) {
  const u32x4 x = ld_shared_x4(slot);
  sync_warp();  // all lanes have read them before one of them gives the slot back
  return Positions{int(x.x), int(x.y), int(x.z), int(x.w)};
}

// The tile info slot: the producer publishes where a tile lies, since to work that out takes several divisions. Its
// arrival on a full barrier makes it visible. Positions lie behind it, for those who need them: they take registers.
template <class Config> constexpr u32 kTileInfoBytes = Config::kPositions ? 48 : 32;
template <class Config> STROBE_DEVICE void publish_tile(u32 slot, const Tile& t) {
  st_shared(slot, u32x4{u32(t.row0), u32(t.head), u32(t.batch), u32(t.len_q)});
  st_shared(slot + 16, u32x4{u32(t.len_k), u32(t.first_row), u32(t.first_key), u32(t.work)});
  if (Config::kPositions) publish_positions(slot + 32, t.positions);
}
template <class Config> STROBE_DEVICE Tile read_tile(u32 slot) {
  const u32x4 x = ld_shared_x4(slot), y = ld_shared_x4(slot + 16);
  sync_warp();  // likewise
  const int slice = Config::kVarlen ? 0 : int(x.z);
  return Tile{int(x.x), int(x.y), int(x.z), slice, int(x.w), int(y.x), int(y.y), int(y.z), int(y.w), Positions{}};
}

// The mask of a sequence of which len_q rows and len_k keys are in memory. It takes queries: row / kPackGqa.
template <class Mask, class Config, class Params>
STROBE_DEVICE Mask mask_of(const Params& p, int len_q, int len_k, const Positions& at) {
  if constexpr (Config::kPositions) return Mask{at.whole_q, at.whole_k, p.mask, at.offset_q, at.offset_k, len_k};
  else return Mask{len_q / Config::kPackGqa, len_k, p.mask};
}

// Key blocks [first, end) are visible to some of the rows; those in [first_full, end_full) to all of them, and need no
// mask.
struct KeyBlocks {
  int first, end, first_full, end_full;
};

// The ends of a mask's intervals never move left as queries grow, so the first and the last query tell everything.
template <int kBlockN, class Mask>
STROBE_DEVICE KeyBlocks visible_blocks(const Mask& mask, int first_query, int last_query) {
  KeyBlocks b;
  b.first = mask.lo(first_query) / kBlockN;
  b.end = max(b.first, (mask.hi(last_query) + kBlockN - 1) / kBlockN);
  b.first_full = Mask::kHasLo ? min(max((mask.lo(last_query) + kBlockN - 1) / kBlockN, b.first), b.end) : 0;
  b.end_full = min(max(mask.hi(first_query) / kBlockN, b.first_full), b.end);
  return b;
}

// Split-KV: one of `splits` equal splits of a tile's key blocks, as far as `b`, those of one warpgroup, reach into it.
STROBE_DEVICE KeyBlocks blocks_of_split(const KeyBlocks& b, const KeyBlocks& tile, int split, int splits) {
  const int each = quotient(tile.end - tile.first + splits - 1, splits);
  const int from = min(tile.first + split * each, tile.end), to = min(from + each, tile.end);
  KeyBlocks r;
  r.first = min(max(b.first, from), to);
  r.end = max(min(b.end, to), r.first);
  r.first_full = min(max(b.first_full, r.first), r.end);
  r.end_full = min(max(b.end_full, r.first_full), r.end);
  return r;
}

}  // namespace strobe

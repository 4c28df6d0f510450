// Which rows a block works on, and which key blocks they see.
#pragma once
#include <strobe/ptx/memory.cuh>

namespace strobe {

// Of numbers that are not negative: without a sign a division is less code.
STROBE_DEVICE int quotient(int a, int b) { return int(u32(a) / u32(b)); }
STROBE_DEVICE int remainder(int a, int b) { return int(u32(a) % u32(b)); }

// Rows [row0, row0 + kBlockM) of one head of one sequence. Rows and keys count from the start of the sequence;
// first_row and first_key say where that lies in packed tensors.
struct Tile {
  int row0, head;
  int slice;  // the batch index in the tensors: packed sequences share one
  int len_q, len_k, first_row, first_key;
  int work;  // its number; where keys are split, that of one of the tile's parts
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
  t.head = bh - batch * p.heads;
  t.row0 = (p.row_blocks - 1 - block) * Config::kBlockM;
  t.len_q = p.len_q;
  t.len_k = p.len_k;
  t.first_row = t.first_key = 0;
  t.slice = Config::kPacked ? 0 : batch;
  if (Config::kPacked) {
    t.first_row = ld_global(p.cu_q + batch);
    t.first_key = ld_global(p.cu_k + batch);
    t.len_q = ld_global(p.cu_q + batch + 1) - t.first_row;
    t.len_k = ld_global(p.cu_k + batch + 1) - t.first_key;
  }
  return t;
}

// Key blocks [first, end) are visible to some of the rows; those in [first_full, end_full) to all of them, and need no
// mask.
struct KeyBlocks {
  int first, end, first_full, end_full;
};

// The ends of a mask's intervals never move left as rows grow, so the first and the last row tell everything.
template <int kBlockN, class Mask>
STROBE_DEVICE KeyBlocks visible_blocks(const Mask& mask, int first_row, int last_row) {
  KeyBlocks b;
  b.first = mask.lo(first_row) / kBlockN;
  b.end = max(b.first, (mask.hi(last_row) + kBlockN - 1) / kBlockN);
  b.first_full = Mask::kHasLo ? min(max((mask.lo(last_row) + kBlockN - 1) / kBlockN, b.first), b.end) : 0;
  b.end_full = min(max(mask.hi(first_row) / kBlockN, b.first_full), b.end);
  return b;
}

// One of `parts` equal parts of the key blocks of a tile, as far as `b`, a warpgroup's share of them, reaches into it.
STROBE_DEVICE KeyBlocks part_of(const KeyBlocks& b, const KeyBlocks& tile, int part, int parts) {
  const int each = quotient(tile.end - tile.first + parts - 1, parts);
  const int from = min(tile.first + part * each, tile.end), to = min(from + each, tile.end);
  KeyBlocks r;
  r.first = min(max(b.first, from), to);
  r.end = max(min(b.end, to), r.first);
  r.first_full = min(max(b.first_full, r.first), r.end);
  r.end_full = min(max(b.end_full, r.first_full), r.end);
  return r;
}

}  // namespace strobe

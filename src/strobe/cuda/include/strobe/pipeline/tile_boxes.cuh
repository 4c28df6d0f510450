// Where the rows and keys of a tile lie in tensor maps: Q, O and their gradients by rows, K, V and theirs by keys.
#pragma once
#include <strobe/pipeline/schedule.cuh>
#include <strobe/tile/tma_tile.cuh>

namespace strobe {

template <class Config, int kRows> STROBE_DEVICE Box query_box(const Tile& tile, int row) {
  if (Config::kPackGqa > 1) return box_of_queries(row / Config::kPackGqa, tile.head, tile.slice);
  return box_of_rows<Config::kVarlen, kRows>(tile.first_row + row, tile.len_q - row, tile.head, tile.slice);
}
// With positions a sequence may end before its buffer does, so its boxes are clipped as those of varlen tensors are;
// `batch_rows` lie between the buffers of two sequences.
template <class Config, int kRows>
STROBE_DEVICE Box key_box(const Tile& tile, int head_k, int key, [[maybe_unused]] int batch_rows) {
  constexpr bool kBuffers = Config::kPositions && !Config::kVarlen;
  const int first = kBuffers ? tile.slice * batch_rows : tile.first_key;
  return box_of_rows < Config::kVarlen || kBuffers, kRows > (first + key, tile.len_k - key, head_k, tile.slice);
}

}  // namespace strobe

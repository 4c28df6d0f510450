// Where the rows and keys of a tile lie in tensor maps: Q, O and their gradients by rows, K, V and theirs by keys.
#pragma once
#include <strobe/pipeline/schedule.cuh>
#include <strobe/tile/tma_tile.cuh>

namespace strobe {

template <class Config, int kRows> STROBE_DEVICE Box query_box(const Tile& tile, int row) {
  if (Config::kPackGqa > 1) return box_of_queries(row / Config::kPackGqa, tile.head, tile.slice);
  return box_of_rows<Config::kVarlen, kRows>(tile.first_row + row, tile.len_q - row, tile.head, tile.slice);
}
template <class Config, int kRows> STROBE_DEVICE Box key_box(const Tile& tile, int head_k, int key) {
  return box_of_rows<Config::kVarlen, kRows>(tile.first_key + key, tile.len_k - key, head_k, tile.slice);
}

}  // namespace strobe

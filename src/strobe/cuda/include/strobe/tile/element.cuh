// The element of a tile: how many elements the units of the hardware hold follows from its size alone.
#pragma once
#include <strobe/ptx/base.cuh>

namespace strobe {

constexpr u32 kPanelRowBytes = 128;  // of a row of a panel, as in swizzle.cuh: eight chunks

template <class T> constexpr int kChunk = 16 / int(sizeof(T));              // of a chunk, which one copy moves
template <class T> constexpr int kPanel = int(kPanelRowBytes / sizeof(T));  // columns of a panel
template <class T> constexpr int kMmaK = 32 / int(sizeof(T));               // summands of one mma or wgmma

template <class T> constexpr STROBE_DEVICE int panels(int columns) { return (columns + kPanel<T> - 1) / kPanel<T>; }
template <class T> constexpr STROBE_DEVICE u32 tile_bytes(int rows, int columns) {
  return panels<T>(columns) * rows * kPanelRowBytes;
}

}  // namespace strobe

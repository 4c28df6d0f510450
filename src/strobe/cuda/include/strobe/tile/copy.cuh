// Tiles between global and shared memory with cp.async, 16 bytes a thread: eight threads fetch the 128 bytes of a panel
// row.
#pragma once
#include <strobe/ptx/memory.cuh>
#include <strobe/tile/swizzle.cuh>

namespace strobe {

// Rows [0, rows_there) of `src` exist and have `columns_there` columns; the rest of the tile becomes zero, and memory
// beyond the tensor is never read. kWholeRows, kWholeColumns: all of them exist, and nothing is compared.
template <int kRows, int kColumns, int kThreads, bool kWholeRows, bool kWholeColumns, class T>
STROBE_DEVICE void copy_tile_async(u32 dst, const T* src, i64 row_stride, int rows_there, int columns_there) {
  constexpr int kRowsPerPass = kThreads / 8;
  static_assert(kRows % kRowsPerPass == 0 && kRowsPerPass % 8 == 0,
                "a pass covers whole rows and keeps row % 8, so that it keeps the swizzle");
  // Opaque: else ptxas keeps what follows from the thread and the stride in registers from block to block.
  const u32 thread = thread_idx_again();
  const i64 stride = opaque(row_stride);
  const int first_row = thread / 8, chunk = thread % 8;
  const u32 at = dst + chunk_offset(kRows, first_row, chunk);
  const T* from = src + first_row * stride + chunk * kChunk<T>;
#pragma unroll
  for (int pass = 0; pass < kRows / kRowsPerPass; ++pass) {
    const bool row_there = kWholeRows || first_row + pass * kRowsPerPass < rows_there;
#pragma unroll
    for (int panel = 0; panel < panels<T>(kColumns); ++panel) {
      const int column = panel * kPanel<T> + chunk * kChunk<T>;
      const u32 to = at + panel * (kRows * kPanelRowBytes) + pass * (kRowsPerPass * kPanelRowBytes);
      const bool column_there =
          (kWholeColumns && (panel + 1) * kPanel<T> <= kColumns) || column < (kWholeColumns ? kColumns : columns_there);
      if ((panel + 1) * kPanel<T> > kColumns && column >= kColumns)
        continue;  // the half of the last panel that nobody reads
      if (kWholeRows && kWholeColumns) cp_async_16(to, from + panel * kPanel<T>);
      else cp_async_16(to, row_there && column_there ? from + panel * kPanel<T> : src, row_there && column_there);
    }
    from += kRowsPerPass * stride;
  }
}

// The place where a row begins, and whether it exists; if not, it becomes zero, and `from` is not read.
template <class T> struct RowInMemory {
  const T* from;
  bool there;
};
// One warp copies rows [first_row, first_row + kRows) of a tile of kTileRows rows. address(r): where the r-th of them
// lies, so that none need be neighbours.
template <class T, int kTileRows, int kRows, int kColumns, bool kWholeColumns, class Address>
STROBE_DEVICE void copy_rows_async(u32 dst, int first_row, int columns_there, Address address) {
  static_assert(kRows % 8 == 0, "four rows at a time, and every other time the same swizzle");
  const int lane = thread_idx() % 32, chunk = lane % 8;
  const u32 at = dst + chunk_offset(kTileRows, first_row + lane / 8, chunk);
#pragma unroll
  for (int row = 0; row < kRows; row += 4) {
    const auto x = address(row + lane / 8);
#pragma unroll
    for (int panel = 0; panel < panels<T>(kColumns); ++panel) {
      const int column = panel * kPanel<T> + chunk * kChunk<T>;
      if ((panel + 1) * kPanel<T> > kColumns && column >= kColumns) continue;
      const bool valid = x.there && (kWholeColumns || column < columns_there);
      cp_async_16((at ^ (row % 8 << 4)) + row * kPanelRowBytes + panel * (kTileRows * kPanelRowBytes),
                  x.from + (kWholeColumns || valid ? column : 0), valid);
    }
  }
}

}  // namespace strobe

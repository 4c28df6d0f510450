// Tiles between global and shared memory by TMA: where a tile lies in a 5-D tensor map, and the copies that move it.
//
// A box is as wide as a panel of the swizzled tile. T is the element that is moved. There are three kinds of maps
// (cuda/parts/tensor_maps.py):
//   dense       (columns, rows, panels, heads, batch). If the head dim fills whole panels one box holds all panels of a
//               tile (kOneBox); else there is one box a panel, and what lies beyond the head dim reads as zero.
//   clipped     (columns, rows in the box, heads, rows in memory, kFar). A box that starts at row `clip` of itself ends
//               where the sequence does.
//   packed GQA  (columns, heads of a group, queries, key heads, batch); of varlen queries
//               (columns, heads, queries in the box, queries in memory, kFar), which is clipped, too.
#pragma once
#include <strobe/ptx/tma.cuh>
#include <strobe/tile/swizzle.cuh>

namespace strobe {

constexpr int kFar = 1 << 30;

struct Box {  // coordinates of its first element; the column, c0, is that of the panel
  int c1, c2, c3, c4;
};

STROBE_DEVICE Box dense_box(int row, int head, int batch) { return Box{row, 0, head, batch}; }
// kRows rows from `row` on, of which the sequence has `rows_left`; row counts from the start of the tensor.
template <int kRows> STROBE_DEVICE Box clipped_box(int row, int rows_left, int head) {
  const int clip = max(0, kRows - rows_left);
  return Box{clip, head, kFar + row - clip, kFar};
}
template <int kQueries> STROBE_DEVICE Box packed_varlen_box(int query, int queries_left, int head) {
  const int clip = max(0, kQueries - queries_left);
  return Box{head, clip, kFar + query - clip, kFar};
}
STROBE_DEVICE Box packed_gqa_box(int query, int head_k, int batch) { return Box{0, query, head_k, batch}; }

template <class T, bool kOneBox, int kRows, int kColumns>
STROBE_DEVICE void tma_load_tile(u32 dst, const TensorMap* map, u32 bar, const Box& b) {
#pragma unroll
  for (int panel = 0; panel < (kOneBox ? 1 : panels<T>(kColumns)); ++panel)
    tma_load_5d(dst + panel * (kRows * kPanelRowBytes), map, bar, panel * kPanel<T>, b.c1, b.c2, b.c3, b.c4);
}
template <class T> STROBE_DEVICE void tma_load_panel(u32 dst, const TensorMap* map, u32 bar, const Box& b, int panel) {
  tma_load_5d(dst, map, bar, panel * kPanel<T>, b.c1, b.c2, b.c3, b.c4);
}

// Panels [panel, panel + count) of a tile, one box each, to `dst`.
template <class T, int kRows>
STROBE_DEVICE void tma_load_panels(u32 dst, const TensorMap* map, u32 bar, const Box& b, int panel, int count) {
#pragma unroll
  for (int i = 0; i < count; ++i)
    tma_load_5d(dst + i * (kRows * kPanelRowBytes), map, bar, (panel + i) * kPanel<T>, b.c1, b.c2, b.c3, b.c4);
}

// Panels [panel, panel + count) of a tile; in shared memory they lie at `src`. kOneBox: the map's box has as many.
template <class T, bool kOneBox, int kRows>
STROBE_DEVICE void tma_store_panels(const TensorMap* map, u32 src, const Box& b, int panel, int count) {
  if constexpr (kOneBox) {
    tma_store_5d(map, src, 0, b.c1, panel, b.c3, b.c4);
  } else {
#pragma unroll
    for (int i = 0; i < count; ++i)
      tma_store_5d(map, src + i * (kRows * kPanelRowBytes), (panel + i) * kPanel<T>, b.c1, b.c2, b.c3, b.c4);
  }
}

}  // namespace strobe

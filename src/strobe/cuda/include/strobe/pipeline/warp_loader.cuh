// Keys by cp.async, row by row: each warp copies its own share of a block of keys, and waits for its own copies. Rows
// of pages may lie anywhere.
//
// A key whose entry of the table is no page of the pool is missing: it becomes zero, and no query sees it. A warp tells
// of them in a word of shared memory beside the buffers, a bit for each key that it has copied.
#pragma once
#include <strobe/pipeline/schedule.cuh>
#include <strobe/tile/copy.cuh>

namespace strobe {

template <class Config, class Params> struct WarpLoader {
  using T = typename Config::Element;
  static constexpr int kRows = Config::kBlockN / Config::kWarps,
                       kTileRows = kRows * Config::kTeam;  // of a warp, a team
  static constexpr bool kPaged = Config::Keys::kPaged;
  static_assert(kRows == 16 || kRows == 32, "a lane knows where one row begins, and a word has a bit for each");
  static constexpr u32 kNowhere = ~0u;

  const Params& p;
  const Sequence& s;
  int head, first_block;
  Entries<kRows> asked{};  // of pages: for the block that comes next

  STROBE_DEVICE static int first_key(int n) { return n * Config::kBlockN + int(thread_idx() / 32) * kRows; }

  // The warp's rows of block n, into the tiles of its team.
  STROBE_DEVICE void load(int n, int warp_of_team, u32 k_tile, u32 v_tile, u32 words) {
    const int key = first_key(n), row = warp_of_team * kRows;
    if constexpr (kPaged) {
      if (asked.row != key) asked.read(p, s, key);
      const int page = page_of(p, asked.entries[0]);
      const u32 some = ballot(page < 0 && asked.in_use(s, 0));
      if (thread_idx() % 32 == 0) st_shared(words + 4 * warp_of_team, some);
      copy<Config::kDim>(k_tile, row, p.dim, p.k, begin_of(page, p.k_batch, p.k_head, p.k_row));
      copy<Config::kDimV>(v_tile, row, p.dim_v, p.v, begin_of(page, p.v_batch, p.v_head, p.v_row));
      if (n > first_block) asked.read(p, s, first_key(n - 1));  // their latency passes during this block
    } else {
      const T* const k = s.k.rows(p.k, p.k_batch, p.k_head, p.k_row, head, 0);
      const T* const v = s.k.rows(p.v, p.v_batch, p.v_head, p.v_row, head, 0);
      copy<Config::kDim>(k_tile, row, p.dim, k, key, p.k_row);
      copy<Config::kDimV>(v_tile, row, p.dim_v, v, key, p.v_row);
    }
  }

 private:
  // The place where this lane's row begins in a tensor, in units of 16 bytes, so that 32 bits suffice.
  STROBE_DEVICE u32 begin_of(int page, i64 page_stride, i64 head_stride, i64 row_stride) const {
    return page < 0 ? kNowhere
                    : u32((page * page_stride + head * head_stride + asked.rows[0] * row_stride) / kChunk<T>);
  }
  template <int kColumns> STROBE_DEVICE static void copy(u32 tile, int row, int columns, const T* tensor, u32 begin) {
    copy_rows_async<T, kTileRows, kRows, kColumns, Config::kExactDims>(tile, row, columns, [&](int r) {
      const u32 at = shfl(begin, r);
      const bool there = at != kNowhere;
      return RowInMemory<T>{tensor + kChunk<T> * u64(there ? at : 0), there};
    });
  }
  template <int kColumns>
  STROBE_DEVICE void copy(u32 tile, int row, int columns, const T* first, int key, i64 row_stride) const {
    const int left = s.k.length - key;
    copy_rows_async<T, kTileRows, kRows, kColumns, Config::kExactDims>(tile, row, columns, [&](int r) {
      const bool there = r < left;
      return RowInMemory<T>{first + (there ? i64(key + r) * row_stride : 0), there};
    });
  }
};

}  // namespace strobe

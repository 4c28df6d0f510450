// Rows: where the queries and the keys of a sequence lie, which positions they have, and how a tile of them is loaded.
//
// Config::Queries and Config::Keys name a kind each. A kind says which rows of a tensor belong to a sequence (`span`)
// and which TMA box holds some of them (`box`); kernels without TMA take addresses (`Span::rows`). Another kind is
// another struct here and another kind in cuda/parts/rows.py.
#pragma once
#include <strobe/pipeline/ring.cuh>
#include <strobe/ptx/memory.cuh>
#include <strobe/tile/tma_tile.cuh>

namespace strobe {

// Divides numbers that are not negative: without a sign a division is less code.
STROBE_DEVICE int quotient(int a, int b) { return int(u32(a) / u32(b)); }
STROBE_DEVICE int remainder(int a, int b) { return int(u32(a) % u32(b)); }

// Rows [first, first + length) of slice `slice` of a tensor (slice, head, row, dim), of which the first `used` are
// read.
struct Span {
  int slice, first, length, used;

  STROBE_DEVICE Span whole() const { return Span{slice, first, length, length}; }

  // The first row of a head, `row` rows further.
  template <class X>
  STROBE_DEVICE X* rows(X* tensor, i64 slice_stride, i64 head_stride, i64 row_stride, int head, int row) const {
    return tensor + slice * slice_stride + head * head_stride + i64(first + row) * row_stride;
  }
};

// (batch, head, row, dim): every sequence has all rows of its slice.
struct DenseRows {
  static constexpr bool kVarlen = false, kPaged = false, kGathered = false;
  using Stored = DenseRows;  // the kind of gradients that have a row for each of these
  STROBE_DEVICE static Span span(const int*, int batch, int length) { return Span{batch, 0, length, length}; }
  template <int kRows> STROBE_DEVICE static Box box(const Span& s, int head, int row, int /*buffer_rows*/ = 0) {
    return dense_box(s.first + row, head, s.slice);
  }
};
// Sequences one after the other in one slice, from cu[batch] to cu[batch + 1].
struct VarlenRows {
  static constexpr bool kVarlen = true, kPaged = false, kGathered = false;
  using Stored = VarlenRows;
  STROBE_DEVICE static Span span(const int* cu, int batch, int) {
    const int first = ld_global(cu + batch), length = ld_global(cu + batch + 1) - first;
    return Span{0, first, length, length};
  }
  template <int kRows> STROBE_DEVICE static Box box(const Span& s, int head, int row, int /*buffer_rows*/ = 0) {
    return clipped_box<kRows>(s.first + row, s.used - row, head);
  }
};
// (batch, head, row, dim) of which a sequence fills a part. `buffer_rows` lie between the buffers of two sequences.
struct BufferRows {
  static constexpr bool kVarlen = false, kPaged = false, kGathered = false;
  using Stored = DenseRows;
  STROBE_DEVICE static Span span(const int*, int batch, int length) { return Span{batch, 0, length, length}; }
  template <int kRows> STROBE_DEVICE static Box box(const Span& s, int head, int row, int buffer_rows) {
    return clipped_box<kRows>(s.slice * buffer_rows + row, s.used - row, head);
  }
};

// The rows lie in pages of a pool, of which a table lists those of each sequence. kPage divides the rows of a page; 1:
// rows are gathered one by one, else a TMA box has as many of them as a page allows. `buffer_rows` lie between two
// pages.
template <int kPage> struct PagedRows {
  static constexpr bool kVarlen = false, kPaged = true, kGathered = kPage == 1;
  using Stored = DenseRows;
  STROBE_DEVICE static Span span(const int*, int batch, int length) { return Span{batch, 0, length, length}; }
  // Rows of a box, so that none spans two pages: the largest number that divides kPage and kRows.
  static constexpr STROBE_DEVICE int box_rows(int rows, int page = kPage) {
    return page == 0 ? rows : box_rows(page, rows % page);
  }
};

// Queries with packed GQA: the kHeads heads of a group are rows, those of a query one after the other.
template <int kHeads> struct PackedGqaRows {
  static constexpr bool kVarlen = false;
  STROBE_DEVICE static Span span(const int*, int batch, int length) { return Span{batch, 0, length, length}; }
  template <int kRows> STROBE_DEVICE static Box box(const Span& s, int group, int row, int /*buffer_rows*/ = 0) {
    return packed_gqa_box(row / kHeads, group, s.slice);
  }
};
// Packs varlen queries: `first` counts queries, `length` rows.
template <int kHeads> struct PackedVarlenRows {
  static constexpr bool kVarlen = true;
  STROBE_DEVICE static Span span(const int* cu, int batch, int) {
    const Span queries = VarlenRows::span(cu, batch, 0);
    return Span{0, queries.first, queries.length * kHeads, queries.length * kHeads};
  }
  template <int kRows> STROBE_DEVICE static Box box(const Span& s, int group, int row, int /*buffer_rows*/ = 0) {
    return packed_varlen_box<kRows / kHeads>(s.first + row / kHeads, (s.used - row) / kHeads, group * kHeads);
  }
};

// kPositions: what is in memory is a part of a longer sequence, as in context parallelism. Row r of it has position
// offset_q + r among whole_q queries, key c has position offset_k + c among whole_k keys, and masks count positions.
struct Positions {
  int offset_q, whole_q, offset_k, whole_k;
};

// One sequence of a batch.
struct Sequence {
  int batch;
  Span q, k;
  Positions positions;
};
template <class Config, class Params> STROBE_DEVICE Span queries_of(const Params& p, int batch) {
  if constexpr (Config::Queries::kVarlen) return Config::Queries::span(p.cu_q, batch, 0);
  else return Config::Queries::span(nullptr, batch, p.len_q);
}
// `length` keys of a sequence in pages, if its part of the table has room for them. `first` is its first entry there.
template <class Params> STROBE_DEVICE Span paged_keys(const Params& p, int batch, int length) {
  int first = batch * p.table_width, room = p.len_k;
  if (p.indptr) {
    first = ld_global(p.indptr + batch);
    room = (ld_global(p.indptr + batch + 1) - first) * p.page_size;
  }
  const int keys = max(0, min(room, length));
  return Span{batch, first, keys, keys};
}
// The first key in the table has position `start`, and the last query that of the last key.
template <class Config> STROBE_DEVICE Positions positions_in_pages(const Sequence& s, int start) {
  return Positions{0, s.q.length / Config::kPackGqa, start, start + s.k.used};
}
template <class Config, class Params> STROBE_DEVICE Sequence sequence_of(const Params& p, int batch) {
  Sequence s;
  s.batch = batch;
  s.q = queries_of<Config>(p, batch);
  if constexpr (Config::Keys::kVarlen) s.k = Config::Keys::span(p.cu_k, batch, 0);
  else s.k = Config::Keys::span(nullptr, batch, p.len_k);
  s.positions = Positions{};
  if constexpr (Config::Keys::kPaged) {
    s.k = paged_keys(p, batch, ld_global(p.lengths + batch));
    s.positions = positions_in_pages<Config>(s, p.starts ? ld_global(p.starts + batch) : 0);
  } else if constexpr (Config::kPositions) {
    const int* at = p.positions + 4 * batch;
    s.positions = Positions{ld_global(at), ld_global(at + 1), ld_global(at + 2), ld_global(at + 3)};
    s.k.used = max(0, min(s.k.length, s.positions.whole_k - s.positions.offset_k));  // what lies behind may be anything
  }
  return s;
}

// Says whether this thread of the producer warpgroup issues loads: all do for pages, since tables lead to many small
// boxes; else one. The first one alone waits for queries, publishes tiles and announces bytes.
template <class Config> STROBE_DEVICE bool loads() { return Config::Keys::kPaged || thread_idx() == 0; }
template <class Config> STROBE_DEVICE bool leads() { return !Config::Keys::kPaged || thread_idx() == 0; }

// One of K and V in memory.
template <class T> struct KeyTensor {
  const T* rows;
  i64 page_stride, head_stride, row_stride;
  const TensorMap* map;
  int batch_rows;  // between two buffers, or pages
  int dim;
  u32 first_warp;  // that gathers rows for the first buffer
  bool tells;      // whether keys are missing: that of K suffices
};

template <class T, class Params> STROBE_DEVICE KeyTensor<T> keys_of(const Params& p) {
  return {p.k, p.k_batch, p.k_head, p.k_row, &p.map_k, p.k_batch_rows, p.dim, 0, true};
}
template <class T, class Params> STROBE_DEVICE KeyTensor<T> values_of(const Params& p) {
  return {p.v, p.v_batch, p.v_head, p.v_row, &p.map_v, p.v_batch_rows, p.dim_v, 2, false};
}

// Entry `index` of a sequence. An entry that no key in use has is not read: -1.
template <class Params> STROBE_DEVICE int entry_of(const Params& p, const Span& keys, int index, bool in_use) {
  return in_use ? ld_global(p.table + keys.first + index) : -1;
}
// The page of an entry, or -1 if it is none of the pool: its keys are missing, as no query sees them.
template <class Params> STROBE_DEVICE int page_of(const Params& p, int entry) {
  return u32(entry) < u32(p.pages) ? entry : -1;
}
template <class Params> STROBE_DEVICE int page_of(const Params& p, const Span& keys, int index, bool in_use) {
  return page_of(p, entry_of(p, keys, index, in_use));
}

// The address at which the producer says whether keys are missing in a buffer of K; see missing_keys.cuh.
template <class Config> STROBE_DEVICE u32 missing_word(u32 stage) {
  return smem_base() + Config::Offset::missing + 4 * stage;
}

// Entries of rows [row, row + kRows) that a warp has asked for. A lane has one row of each group: the entry, and which
// row of that page it is. What does not depend on the entries is worked out at once, and the rest when they are needed.
template <int kRows> struct Entries {
  static constexpr int kGroup = kRows % 32 == 0 ? 32 : 16, kGroups = kRows / kGroup;
  int row = -1, entries[kGroups], rows[kGroups];

  STROBE_DEVICE static int lane_row(int group) { return group * kGroup + thread_idx() % kGroup; }
  STROBE_DEVICE bool in_use(const Sequence& s, int group) const { return row + lane_row(group) < s.k.used; }
  template <class Params> STROBE_DEVICE void read(const Params& p, const Sequence& s, int first_row) {
    row = first_row;
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      const int mine = row + lane_row(g), index = quotient(mine, p.page_size);
      entries[g] = entry_of(p, s.k, index, in_use(s, g));
      rows[g] = mine - index * p.page_size;
    }
  }
};

// Loads the blocks of keys that a tile visits, each to the next buffer of a ring. Rows of missing keys, and those
// behind the last key in use, become 0 and nothing is read for them: their weight is 0, and 0 times NaN would come out.
template <class Config> struct KeyLoader {
  using T = typename Config::Element;
  using Keys = typename Config::Keys;
  static constexpr int kRows = Config::kBlockN;
  static constexpr int kArrivals = Keys::kGathered ? 32 : 1;  // that announce a block

  const Sequence& s;
  int head, first_row;     // of the first block
  Entries<kRows> asked{};  // for the block that this warp gathers next

  template <int kColumns, class Ring, class Params>
  STROBE_DEVICE void load(const Params& p, Ring& ring, u32 buffers, u32 bytes, const KeyTensor<T>& t, int block) {
    const int row = block * kRows;
    if constexpr (!Keys::kPaged) {
      const u32 full = ring.begin_load(bytes);
      tma_load_tile<T, Config::kOneBoxPerTile, kRows, kColumns>(
          buffers + ring.stage * bytes, t.map, full, Keys::template box<kRows>(s.k, head, row, t.batch_rows));
    } else if constexpr (Keys::kGathered) gather<kColumns>(p, ring, buffers + ring.stage * bytes, t, row);
    else load_pages<kColumns>(p, ring, buffers + ring.stage * bytes, bytes, t, row);
    ring.next();
  }

 private:
  // Boxes, of which neighbours go to different warps: a warp issues them one by one. A table entry is read before the
  // wait for the buffer, so that its latency is hidden. The first warp, whose first thread announces the tile, reads
  // all of its entries to tell whether keys are missing.
  template <int kColumns, class Ring, class Params>
  STROBE_DEVICE void load_pages(const Params& p, const Ring& ring, u32 buffer, u32 bytes, const KeyTensor<T>& t,
                                int row) const {
    constexpr int kBox = Keys::box_rows(kRows), kPanels = panels<T>(kColumns), kBoxes = kRows / kBox * kPanels;
    constexpr int kEach = (kBoxes + 127) / 128;
    static_assert(kRows / kBox <= 32, "a lane for each entry");
    const int first = thread_idx() % 32 * 4 + thread_idx() / 32;
    if (thread_idx() / 32 >= kBoxes) return;  // an mbarrier has one parity bit: a warp without a box could miss a phase
    const bool tells = t.tells && thread_idx() < 32;
    bool missing = false;
    if (tells) {
      const int r = row + thread_idx() * kBox;
      const bool in_use = thread_idx() < kRows / kBox && r < s.k.used;
      missing = in_use && page_of(p, s.k, quotient(r, p.page_size), in_use) < 0;
    }
    Box boxes[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int r = row + (first + 128 * i) / kPanels * kBox, index = quotient(r, p.page_size), left = s.k.used - r;
      const int page = page_of(p, s.k, index, first + 128 * i < kBoxes && left > 0);
      boxes[i] = clipped_box<kBox>(page * t.batch_rows + r - index * p.page_size, page < 0 ? 0 : left, head);
    }
    ring.wait_empty();
    if (tells) tell(ring, missing);
    if (leads<Config>()) mbar_arrive_expect_tx(ring.full_barrier(), bytes);
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int at = first + 128 * i, panel = at % kPanels;
      const u32 dst = buffer + (panel * kRows + at / kPanels * kBox) * kPanelRowBytes;
      if (at < kBoxes) tma_load_panel<T>(dst, t.map, ring.full_barrier(), boxes[i], panel);
    }
  }

  // Row by row, 16 bytes a lane at a time. Each buffer belongs to a warp: it waits until its copies have landed, sees
  // to the fence towards wgmma's proxy and announces the block, while those of the other warps are under way. It waits
  // for its own buffers alone: of another one it could miss a phase, and wait for ever. While its copies are under way,
  // it asks for the entries of its next block. A lane knows where one of kGroup rows begins.
  template <int kColumns, class Ring, class Params>
  STROBE_DEVICE void gather(const Params& p, const Ring& ring, u32 buffer, const KeyTensor<T>& t, int row) {
    constexpr int kGroups = Entries<kRows>::kGroups, kGroup = kRows / kGroups, kChunks = kColumns / kChunk<T>;
    static_assert(kRows % kGroup == 0 && kGroup * kChunks % 32 == 0, "whole passes over the rows of a group");
    if ((ring.stage + t.first_warp) % 4 != thread_idx() / 32) return;
    if (asked.row != row) asked.read(p, s, row);
    u32 begins[kGroups];  // in units of 16 bytes, so that 32 bits suffice
    bool missing = false, whole = 32 % kChunks == 0 && t.dim == kColumns;
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      const int page = page_of(p, asked.entries[g]);
      const i64 at = page * t.page_stride + head * t.head_stride + asked.rows[g] * t.row_stride;
      begins[g] = page < 0 ? kNowhere : u32(at / kChunk<T>);
      missing |= page < 0 && asked.in_use(s, g);
      whole = whole && page >= 0;
    }
    ring.wait_empty();
    if (t.tells) tell(ring, missing);
    if (any(!whole)) copy_part<kChunks>(buffer, t, begins);
    else copy_whole<kChunks>(buffer, t, begins);
    cp_async_commit();
    if (const int next = row - Ring::kBuffers * kRows; next >= first_row) asked.read(p, s, next);
    cp_async_wait<0>();
    fence_proxy_async();
    mbar_arrive(ring.full_barrier());
  }
  static constexpr u32 kNowhere = ~0u;

  // A lane has one chunk of every kAtOnce-th row. The rest of its addresses is known when this is compiled: a copy that
  // is slow to begin makes the tile late.
  template <int kChunks, int kGroups>
  STROBE_DEVICE static void copy_whole(u32 buffer, const KeyTensor<T>& t, const u32 (&begins)[kGroups]) {
    constexpr int kGroup = kRows / kGroups, kAtOnce = kChunks < 32 ? 32 / kChunks : 1;
    const int lane = thread_idx() % 32, own = lane / kChunks, chunk = lane % kChunks;
    const u32 to = buffer + chunk_offset(kRows, own, chunk);
    const i64 from = opaque(reinterpret_cast<i64>(t.rows + kChunk<T> * chunk));  // one product a copy
#pragma unroll
    for (int g = 0; g < kGroups; ++g)
#pragma unroll 8
      for (int r = 0; r < kGroup; r += kAtOnce)
        cp_async_16((to ^ (r % 8 << 4)) + (g * kGroup + r) * kPanelRowBytes,
                    reinterpret_cast<const T*>(from + 16 * i64(shfl(begins[g], r + own))));
  }
  // Rows that are nowhere, and columns that the tensor does not have, become zero.
  template <int kChunks, int kGroups>
  STROBE_DEVICE static void copy_part(u32 buffer, const KeyTensor<T>& t, const u32 (&begins)[kGroups]) {
    constexpr int kGroup = kRows / kGroups;
#pragma unroll
    for (int g = 0; g < kGroups; ++g)
#pragma unroll 1
      for (int i = thread_idx() % 32; i < kGroup * kChunks; i += 32) {
        const int r = i / kChunks, chunk = i % kChunks;
        const u32 from = shfl(begins[g], r);
        const bool valid = from != kNowhere && kChunk<T> * chunk < t.dim;
        cp_async_16(buffer + chunk_offset(kRows, g * kGroup + r, chunk),
                    t.rows + kChunk<T> * u64(valid ? from + chunk : 0), valid);
      }
  }

  // Called by a warp whose first lane announces the tile afterwards.
  template <class Ring> STROBE_DEVICE static void tell(const Ring& ring, bool missing) {
    const bool some = any(missing);
    if (elected()) st_shared(missing_word<Config>(ring.stage), u32(some));
  }
};

// The mask of a sequence of which `rows` rows and `keys` keys are in memory. It takes queries: row / kPackGqa.
template <class Mask, class Config, class Params>
STROBE_DEVICE Mask mask_of(const Params& p, int rows, int keys, const Positions& at) {
  if constexpr (Config::kPositions) return Mask{at.whole_q, at.whole_k, p.mask, at.offset_q, at.offset_k, keys};
  else return Mask{rows / Config::kPackGqa, keys, p.mask};
}

}  // namespace strobe

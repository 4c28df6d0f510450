// Entries of a 16-bit tensor of pairs, such as a bias, on their way between global memory and the transposed fragments
// of a warp: 16 keys of kQueries queries each.
//
// In memory keys are neighbours, in a fragment queries are: entry by entry a warp would access four rows for 32 numbers
// of 2 bytes. So the warp copies whole chunks of 8 keys, one block ahead, and ldmatrix and stmatrix transpose them.
#pragma once
#include <strobe/pipeline/scores.cuh>

namespace strobe {

// `At` with the entries of 8 neighbours of a fragment in registers, as `PairTile::read` gives them.
template <class T, class At> struct Staged : At {
  static constexpr bool kStaged = true;
  u32 entries[4];
  STROBE_DEVICE explicit Staged(const At& at) : At(at) {}
  STROBE_DEVICE float staged(int i) const { return to_float<T>(u16(entries[i / 2 % 4] >> (i % 2 * 16))); }
};

template <int kQueries> struct PairTile {
  static constexpr u32 kBytes = kQueries * 32;
  u32 memory;  // of this warp

  // Chunk 0 or 1 of a query; swizzled, so that 8 queries of a matrix are in different banks.
  STROBE_DEVICE u32 address(int query, int chunk) const { return memory + query * 32 + (chunk ^ (query / 4 % 2)) * 16; }
  // Returns the row that a lane gives to ldmatrix for entries 8 * n to 8 * n + 7 of a fragment.
  STROBE_DEVICE u32 row_of_matrix(int n) const {
    const int lane = thread_idx() % 32;
    return address(16 * n + lane / 16 * 8 + lane % 8, lane / 8 % 2);
  }

  // Calls `whole` or `part`, if the sequence ends in the chunk or it is not aligned, for each chunk of this lane, with
  // its address there and here and how many of its keys exist. `at` is the place of any thread of the warp.
  template <class At, class Whole, class Part>
  STROBE_DEVICE void each_chunk(const void* tensor, const i64* strides, At at, Whole whole, Part part) const {
    const int lane = thread_idx() % 32, chunk = lane % 2;
    at.row += 8 * chunk - lane / 4, at.column += lane / 2 - 2 * (lane % 4);
#pragma unroll 1
    for (int query = lane / 2; query < kQueries; query += 16, at.column += 16) {
      const i64 index = row_of_pairs(strides, at, 0) + at.k(0) * strides[3];
      u16* const entry = static_cast<u16*>(const_cast<void*>(tensor)) + index;
      const int keys = at.q(0) < at.len_q ? min(8, at.len_k - at.k(0)) : 0;
      if (keys == 8 && strides[3] == 1 && reinterpret_cast<u64>(entry) % 16 == 0) whole(entry, address(query, chunk));
      else part(entry, address(query, chunk), keys, strides[3]);
    }
  }
  // Begins to load the tile; what does not exist is 0.
  template <class At> STROBE_DEVICE void load(const void* tensor, const i64* strides, const At& at) const {
    each_chunk(
        tensor, strides, at, [](const u16* entry, u32 to) { cp_async_16(to, entry); },
        [](const u16* entry, u32 to, int keys, i64 stride) {
          u32 x[4] = {};
#pragma unroll
          for (int i = 0; i < 8; ++i) x[i / 2] |= u32(ld_constant(entry + i * stride, i < keys)) << (i % 2 * 16);
          st_shared(to, u32x4{x[0], x[1], x[2], x[3]});
        });
    cp_async_commit();
  }
  STROBE_DEVICE void wait() const {
    cp_async_wait<0>();
    sync_warp();
  }
  STROBE_DEVICE void read(u32 (&x)[4], int n) const { ldmatrix_x4_trans(row_of_matrix(n), x[0], x[1], x[2], x[3]); }
  STROBE_DEVICE void write(const u32 (&x)[4], int n) const {
    stmatrix_x4_trans(row_of_matrix(n), x[0], x[1], x[2], x[3]);
  }
  // Stores what `write` has left in all of the tile.
  template <class At> STROBE_DEVICE void store(void* tensor, const i64* strides, const At& at) const {
    sync_warp();
    each_chunk(
        tensor, strides, at, [](u16* entry, u32 from) { st_global(static_cast<void*>(entry), ld_shared_x4(from)); },
        [](u16* entry, u32 from, int keys, i64 stride) {
          const u32x4 x = ld_shared_x4(from);
          const u32 words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
          for (int i = 0; i < 8; ++i)
            if (i < keys) st_global(entry + i * stride, u16(words[i / 2] >> (i % 2 * 16)));
        });
    sync_warp();
  }
};

}  // namespace strobe

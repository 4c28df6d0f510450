// Missing keys: those whose entry of the table is in use, but no page of the pool. No query sees them.
//
// The producer, which reads the table, loads zeros in their place and says in a word beside each buffer of K whether
// keys of that block are missing (rows.cuh). Consumers read the word of every block, and the table only if it is set.
#pragma once
#include <strobe/pipeline/schedule.cuh>
#include <strobe/tile/softmax.cuh>

namespace strobe {

// A consumer's knowledge of the block of keys whose scores it computes.
template <class Config, bool kPaged = Config::Keys::kPaged> struct MissingKeys {
  STROBE_DEVICE void look(u32 /*stage*/) {}
  STROBE_DEVICE static bool or_any(bool masked) { return masked; }
  template <int N, class Params>
  STROBE_DEVICE void hide(float (&)[N], const Params&, u32 /*tile_info*/, int /*first_key*/) const {}
};

template <class Config> struct MissingKeys<Config, true> {
  u32 word = 0;

  // Called before the buffer of K is released. What is read is needed much later: its latency passes during the
  // products.
  STROBE_DEVICE void look(u32 stage) {
    word = ld_shared(missing_word<Config>(stage));
    sync_warp();  // every lane knows it before one of them gives the buffer back
  }
  // Says whether some scores must be hidden: by the mask, or because keys are missing.
  STROBE_DEVICE bool or_any(bool masked) const { return masked || any(word); }

  // Scores of missing keys become -inf. `first_key` is the block's. Lanes look up a key each, 32 keys at a time, and
  // tell each other: of key 8 (4 i + j) + c from a thread's first column on, c = 0 or 1, bit 8 j + 2 i + c says whether
  // it is missing.
  template <int N, class Params>
  STROBE_DEVICE void hide(float (&s)[N], const Params& p, u32 tile_info, int first_key) const {
    if (!any(word)) return;
    const Tile tile = read_tile<Config>(tile_info);  // again: to keep it takes registers
    const int lane = thread_idx() % 32;
#pragma unroll
    for (int begin = 0; begin < N; begin += 64) {  // 128 keys, whose bits fill a word
      u32 bits = 0;
#pragma unroll 1
      for (int i = 0; i < 4 && begin + 16 * i < N; ++i) {
        const int key = first_key + 2 * begin + 32 * i + lane;
        const bool in_use = key < tile.k.length;
        const u32 missing = ballot(in_use && page_of(p, tile.k, quotient(key, p.page_size), in_use) < 0);
        bits |= (missing >> 2 * (lane % 4) & 0x03030303u) << 2 * i;
      }
#pragma unroll
      for (int k = begin; k < min(N, begin + 64); ++k) {
        const int eight = (k - begin) / 4;
        if (bits >> (8 * (eight % 4) + 2 * (eight / 4) + k % 2) & 1) s[k] = neg_inf();
      }
    }
  }
};

}  // namespace strobe

// Block-sparse: two bits for each block that a tile may visit, from block_map.cuh.
#pragma once
#include <strobe/ptx/math.cuh>
#include <strobe/ptx/memory.cuh>

namespace strobe {

template <bool kFirst, class A, class B> struct EitherOf {
  using Type = A;
};
template <class A, class B> struct EitherOf<false, A, B> {
  using Type = B;
};
template <bool kFirst, class A, class B> using Either = typename EitherOf<kFirst, A, B>::Type;

// The bits of one tile. First, for each block: whether the condition lets some pair through. Then, for each block:
// whether some pair is hidden, so that the condition must be evaluated for each pair.
struct BlockBits {
  const int* words;
  int count;  // words of each kind

  STROBE_DEVICE u32 word(int n) const { return u32(ld_constant(words + n / 32, true)); }
  STROBE_DEVICE bool partial(int n) const { return word(n + 32 * count) >> n % 32 & 1; }
  // The nearest visible block at or before n; first - 1 if there is none.
  STROBE_DEVICE int down(int n, int first) const {
#pragma unroll 1
    for (; n >= first; n = n / 32 * 32 - 1) {
      const u32 here = word(n) & ~0u >> (31 - n % 32);
      if (here) return max(n / 32 * 32 + highest_bit(here), first - 1);
    }
    return first - 1;
  }
  // The nearest visible block at or after n; `end` if there is none.
  STROBE_DEVICE int up(int n, int end) const {
#pragma unroll 1
    for (; n < end; n = n / 32 * 32 + 32) {
      const u32 here = word(n) & ~0u << n % 32;
      if (here) return min(n / 32 * 32 + lowest_bit(here), end);
    }
    return end;
  }
  STROBE_DEVICE int count_of(int first, int end) const {
    int found = 0;
#pragma unroll 1
    for (int n = first; n < end; n = n / 32 * 32 + 32) {
      const u32 from = ~0u << n % 32, to = end / 32 > n / 32 ? ~0u : (1u << end % 32) - 1;
      found += bits_set(word(n) & from & to);
    }
    return found;
  }
};

// The bits of a tile. A map that does not depend on the sequence or the head has strides of 0.
template <class Params> STROBE_DEVICE BlockBits block_bits(const Params& p, int batch, int head, int tile) {
  return BlockBits{p.block_map + batch * p.map_batch + head * p.map_head + tile * 2 * p.map_words, p.map_words};
}

}  // namespace strobe

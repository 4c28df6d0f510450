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

// Of one tile: a bit for each block that a condition lets through, then one for each where some pairs are hidden, so
// that the condition must be asked for each of them.
struct BlockBits {
  const int* words;
  int count;  // of each of the two

  STROBE_DEVICE u32 word(int n) const { return u32(ld_constant(words + n / 32, true)); }
  STROBE_DEVICE bool partial(int n) const { return word(n + 32 * count) >> n % 32 & 1; }
  // The nearest block that is let through, from n down; first - 1: there is none.
  STROBE_DEVICE int down(int n, int first) const {
#pragma unroll 1
    for (; n >= first; n = n / 32 * 32 - 1) {
      const u32 here = word(n) & ~0u >> (31 - n % 32);
      if (here) return max(n / 32 * 32 + highest_bit(here), first - 1);
    }
    return first - 1;
  }
  // The same from n up; `end`: there is none.
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

// Of a tile; a map that does not depend on the sequence or the head has strides of 0.
template <class Params> STROBE_DEVICE BlockBits block_bits(const Params& p, int batch, int head, int tile) {
  return BlockBits{p.block_map + batch * p.map_batch + head * p.map_head + tile * 2 * p.map_words, p.map_words};
}

}  // namespace strobe

// Dropout of P beside matrix products in flight.
#pragma once
#include <strobe/ptx/wgmma.cuh>
#include <strobe/tile/dropout.cuh>

namespace strobe {

// Of a fragment of rounded weights, N pairs. Which are dropped depends on no score: kEarly decides it when the keys are
// chosen, while products are in flight, and takes N / 2 registers to remember it. Otherwise it is decided when they are
// dropped.
template <bool kEnabled, bool kEarly, int N> struct DropoutMasks {
  Dropout<kEnabled> dropout;
  u32 masks[N / 2];  // of two pairs each: the first has the even bytes, the second the odd ones
  int column;

  template <class Params> STROBE_DEVICE DropoutMasks(const Params& p, u32 head_key, int query)
      : dropout(p, head_key, query) {}
  STROBE_DEVICE void choose(int first_key) {
    column = first_key + 2 * int(thread_idx() % 4);
    if constexpr (kEnabled && kEarly) {
      u32 all = 0;
#pragma unroll
      for (int i = 0; i < N / 2; ++i) {
        masks[i] = (dropout.kept(2 * i, column) & 0x00ff00ffu) | (dropout.kept(2 * i + 1, column) & 0xff00ff00u);
        all ^= masks[i];
      }
      pin(masks);
      keep_above(smem_base(), all);
    }
  }
  STROBE_DEVICE void drop(u32 (&weights)[N]) const {
    if (!kEarly) dropout.drop(weights, column);
#pragma unroll
    for (int i = 0; kEnabled && kEarly && i < N; ++i) weights[i] &= bytes_of(masks[i / 2], 0, i % 2 ? 0x3311 : 0x2200);
  }
};

}  // namespace strobe

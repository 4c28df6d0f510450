// The warp-level matrix product. Products of 16-bit numbers are exact in fp32; they are summed in fp32 in the order of
// k, from zero, and then added to D. The hardware sums in an order (and with a rounding) of its own.
#pragma once
#include <strobe/emu/base.cuh>

namespace strobe {

namespace emu {
struct MmaLane {
  float* d[4];
  u32 a[4], b[2];
};
void mma(MmaLane lane, Element element, Site site);
}  // namespace emu

template <class T> STROBE_DEVICE void mma_m16n8k16(float& d0, float& d1, float& d2, float& d3, u32 a0, u32 a1, u32 a2,
                                                   u32 a3, u32 b0, u32 b1, Site site = Site::here()) {
  emu::mma({{&d0, &d1, &d2, &d3}, {a0, a1, a2, a3}, {b0, b1}}, emu::kElement<T>, site);
}
template <class T> STROBE_DEVICE void mma_m16n8k16_zero(float& d0, float& d1, float& d2, float& d3, u32 a0, u32 a1,
                                                        u32 a2, u32 a3, u32 b0, u32 b1, Site site = Site::here()) {
  d0 = d1 = d2 = d3 = 0.f;
  mma_m16n8k16<T>(d0, d1, d2, d3, a0, a1, a2, a3, b0, b1, site);
}

}  // namespace strobe

// The warp-level matrix product. Products of 16-bit numbers are exact in fp32; they are summed in fp32 in the order of
// k, from zero, and then added to D. The hardware sums in an order (and with a rounding) of its own.
#pragma once
#include <strobe/emu/base.cuh>
#include <strobe/emu/math.cuh>

namespace strobe {

template <class T> STROBE_DEVICE void mma_m16n8k16(float& d0, float& d1, float& d2, float& d3, u32 a0, u32 a1, u32 a2,
                                                   u32 a3, u32 b0, u32 b1, Site site = Site::here()) {
  struct Lane {
    float* d[4];
    u32 a[4], b[2];
  } lane{{&d0, &d1, &d2, &d3}, {a0, a1, a2, a3}, {b0, b1}};
  emu::block().converge(emu::Scope::warp, "mma_m16n8k16", true, site, &lane, [](void** lanes) {
    emu::Block& block = emu::block();
    ++block.counters.mma;
    block.counters.flops += 2 * 16 * 8 * 16;
    u16 a16[16][16], b16[16][8];
    for (int i = 0; i < 32; ++i) {
      const Lane& from = *static_cast<Lane*>(lanes[i]);
      const int g = i / 4, q = 2 * (i % 4);
      for (int j = 0; j < 4; ++j) memcpy(&a16[g + 8 * (j & 1)][q + 8 * (j >> 1)], &from.a[j], 4);
      for (int j = 0; j < 2; ++j)
        b16[q + 8 * j][g] = static_cast<u16>(from.b[j]), b16[q + 8 * j + 1][g] = static_cast<u16>(from.b[j] >> 16);
    }
    float a[16][16], b[16][8];
    for (int i = 0; i < 16; ++i) {
      for (int k = 0; k < 16; ++k) a[i][k] = to_float<T>(a16[i][k]);
      for (int n = 0; n < 8; ++n) b[i][n] = to_float<T>(b16[i][n]);
    }
    float sum[16][8];
    for (int row = 0; row < 16; ++row) {
      float total[8] = {};
      for (int k = 0; k < 16; ++k)
        for (int n = 0; n < 8; ++n) total[n] += a[row][k] * b[k][n];
      memcpy(sum[row], total, sizeof total);
    }
    for (int i = 0; i < 32; ++i) {
      const Lane& to = *static_cast<Lane*>(lanes[i]);
      const int g = i / 4, q = 2 * (i % 4);
      *to.d[0] += sum[g][q], *to.d[1] += sum[g][q + 1], *to.d[2] += sum[g + 8][q], *to.d[3] += sum[g + 8][q + 1];
    }
  });
}

template <class T> STROBE_DEVICE void mma_m16n8k16_zero(float& d0, float& d1, float& d2, float& d3, u32 a0, u32 a1,
                                                        u32 a2, u32 a3, u32 b0, u32 b1, Site site = Site::here()) {
  d0 = d1 = d2 = d3 = 0.f;
  mma_m16n8k16<T>(d0, d1, d2, d3, a0, a1, a2, a3, b0, b1, site);
}

}  // namespace strobe

// The matrix product of a warp.
#include <strobe/emu/engine/block.cuh>
#include <strobe/emu/math.cuh>
#include <strobe/emu/mma.cuh>

namespace strobe {
namespace emu {

template <class T> inline void mma_of(MmaLane lane, Site site) {
  block().converge(Scope::warp, "mma_m16n8k16", true, site, &lane, [](void** lanes) {
    ++block().counters.mma;
    block().counters.flops += 2 * 16 * 8 * 16;
    u16 a16[16][16], b16[16][8];
    for (int i = 0; i < 32; ++i) {
      const MmaLane& from = *static_cast<MmaLane*>(lanes[i]);
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
      const MmaLane& to = *static_cast<MmaLane*>(lanes[i]);
      const int g = i / 4, q = 2 * (i % 4);
      *to.d[0] += sum[g][q], *to.d[1] += sum[g][q + 1], *to.d[2] += sum[g + 8][q], *to.d[3] += sum[g + 8][q + 1];
    }
  });
}
void mma(MmaLane lane, Element element, Site site) {
  element == Element::bf16 ? mma_of<bf16>(lane, site) : mma_of<fp16>(lane, site);
}

}  // namespace emu
}  // namespace strobe

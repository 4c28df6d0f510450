// Rounding, and what is counted.
#include <strobe/emu/engine/block.cuh>
#include <strobe/emu/math.cuh>

namespace strobe {
namespace emu {

float exp2(float x) {
  ++block().counters.exp2;
  return flush(__builtin_exp2f(x));
}

// Round to nearest even, as `cvt.rn`: NaN becomes 0x7fff, overflow infinity.
u16 round_bf16(float x) {
  const u32 bits = as_bits(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
  return static_cast<u16>((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
}
u16 round_fp16(float x) {
  const u32 bits = as_bits(x), sign = (bits >> 16) & 0x8000u, magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return 0x7fff;
  if (magnitude >= 0x477ff000u) return static_cast<u16>(sign | 0x7c00u);  // 65520 and more
  if (magnitude < 0x38800000u) {                                          // below 2^-14: multiples of 2^-24
    const float shifted = as_float(magnitude) + 0.5f;  // 0.5's last place is 2^-24: the sum rounds for us
    return static_cast<u16>(sign | (as_bits(shifted) - 0x3f000000u));
  }
  return static_cast<u16>(sign | ((magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1)) >> 13));
}

}  // namespace emu
}  // namespace strobe

// Chunks: 8 neighbouring numbers of a row in global memory, as floats in registers. Those of 16 bits are 16 bytes,
// fp32 ones twice that; both are 16-byte aligned.
#pragma once
#include <strobe/ptx/math.cuh>
#include <strobe/ptx/memory.cuh>

namespace strobe {

template <class T> STROBE_DEVICE void unpack(float (&to)[8], u32x4 x) {
  const u32 words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
  for (int i = 0; i < 8; ++i) to[i] = to_float<T>(u16(words[i / 2] >> 16 * (i % 2)));
}
template <class T> STROBE_DEVICE u32x4 pack(const float (&x)[8]) {
  return {pack2<T>(x[0], x[1]), pack2<T>(x[2], x[3]), pack2<T>(x[4], x[5]), pack2<T>(x[6], x[7])};
}

template <class T> STROBE_DEVICE void load_chunk(float (&to)[8], const T* from) { unpack<T>(to, ld_global_x4(from)); }
STROBE_DEVICE void load_chunk(float (&to)[8], const float* from) {
#pragma unroll
  for (int i = 0; i < 8; i += 4) {
    const u32x4 x = ld_global_x4(from + i);
    to[i] = as_float(x.x), to[i + 1] = as_float(x.y), to[i + 2] = as_float(x.z), to[i + 3] = as_float(x.w);
  }
}
template <class T> STROBE_DEVICE void store_chunk(T* to, const float (&x)[8]) {
  st_global(static_cast<void*>(to), pack<T>(x));
}
STROBE_DEVICE void store_chunk(float* to, const float (&x)[8]) {
#pragma unroll
  for (int i = 0; i < 8; i += 4)
    st_global(static_cast<void*>(to + i),
              u32x4{as_bits(x[i]), as_bits(x[i + 1]), as_bits(x[i + 2]), as_bits(x[i + 3])});
}
template <class T> STROBE_DEVICE float load_number(const T* from) { return to_float<T>(ld_global(&from->bits)); }
STROBE_DEVICE float load_number(const float* from) { return ld_global(from); }

}  // namespace strobe

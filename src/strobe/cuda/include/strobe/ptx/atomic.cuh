// Atomic sums in global memory. They return nothing, so that a thread does not wait for them.
#pragma once
#include <strobe/ptx/base.cuh>

namespace strobe {

STROBE_DEVICE void atomic_add(float* p, float x) {
  asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(p), "f"(x) : "memory");
}
// Four neighbours, each sum atomic; 16-byte aligned. Hopper and later.
STROBE_DEVICE void atomic_add_x4(float* p, float x, float y, float z, float w) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(p), "f"(x), "f"(y), "f"(z), "f"(w)
               : "memory");
}

}  // namespace strobe

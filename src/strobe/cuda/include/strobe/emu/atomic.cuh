// Atomic sums in global memory.
#pragma once
#include <strobe/emu/base.cuh>
#include <strobe/emu/memory.cuh>

namespace strobe {

namespace emu {
inline void add_to_global(float* p, float x) {  // blocks run on several threads of the host
  u32* bits = reinterpret_cast<u32*>(p);
  u32 old = __atomic_load_n(bits, __ATOMIC_RELAXED);
  while (
      !__atomic_compare_exchange_n(bits, &old, as_bits(as_float(old) + x), false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
}
}  // namespace emu

STROBE_DEVICE void atomic_add(float* p, float x, Site site = Site::here()) {
  emu::check_global(p, 4, 4, true, "atomic_add", site);
  emu::add_to_global(p, x);
}
STROBE_DEVICE void atomic_add_x4(float* p, float x, float y, float z, float w, Site site = Site::here()) {
  emu::check_global(p, 16, 16, true, "atomic_add_x4", site);
  const float all[4] = {x, y, z, w};
  for (int i = 0; i < 4; ++i) emu::add_to_global(p + i, all[i]);
}

}  // namespace strobe

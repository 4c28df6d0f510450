// Hopper: bulk copies of contiguous bytes, 16-byte aligned and a multiple of 16 long. Loads complete on an mbarrier;
// stores and sums are bulk groups of the thread that issues them, as TMA stores are (tma.cuh).
#pragma once
#include <strobe/ptx/base.cuh>

namespace strobe {

STROBE_DEVICE void bulk_load(u32 dst, const void* src, u32 bytes, u32 bar) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(dst),
               "l"(src), "r"(bytes), "r"(bar)
               : "memory");
}
// Sends bytes on their way to the L2: 16-byte aligned, a multiple of 16 bytes.
STROBE_DEVICE void bulk_prefetch(const void* src, u32 bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(src), "r"(bytes) : "memory");
}
// dst[i] += src[i], each sum atomic, in any order.
STROBE_DEVICE void bulk_add(float* dst, u32 src, u32 bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(dst), "r"(src),
               "r"(bytes)
               : "memory");
}
STROBE_DEVICE void bulk_store(float* dst, u32 src, u32 bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(dst), "r"(src), "r"(bytes)
               : "memory");
}
// All of this thread's groups have written.
STROBE_DEVICE void bulk_wait_written() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

}  // namespace strobe

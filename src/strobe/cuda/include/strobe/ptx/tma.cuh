// Hopper: mbarriers and the tensor memory accelerator (bulk tensor copies).
#pragma once
#include <strobe/ptx/base.cuh>

namespace strobe {

struct alignas(64) TensorMap {
  u64 opaque[16];
};  // the driver's 128-byte CUtensorMap

// ---- mbarrier: 8 bytes of shared memory; a phase completes when `count` arrivals and all expected bytes are in ------
STROBE_DEVICE void mbar_init(u32 bar, u32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory");
}
STROBE_DEVICE void mbar_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
STROBE_DEVICE void mbar_arrive(u32 bar) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}
STROBE_DEVICE void mbar_arrive_expect_tx(u32 bar, u32 bytes) {  // one arrival, and `bytes` still to come
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
// Returns once the phase of this parity has completed. A fresh barrier is in phase 0, so waiting for parity 1 passes at
// once.
STROBE_DEVICE void mbar_wait(u32 bar, u32 parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}\n" ::"r"(bar),
      "r"(parity)
      : "memory");
}

// ---- bulk tensor copies: one thread moves a whole tile; coordinates count elements, innermost first; parts outside
// the tensor
//      read as zero (and still count as bytes), and are not written
STROBE_DEVICE void tma_prefetch_map(const TensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
STROBE_DEVICE void tma_load_5d(u32 dst, const TensorMap* map, u32 bar, int c0, int c1, int c2, int c3, int c4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6, %7}], "
      "[%2];" ::"r"(dst),
      "l"(map), "r"(bar), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
      : "memory");
}
STROBE_DEVICE void tma_store_5d(const TensorMap* map, u32 src, int c0, int c1, int c2, int c3, int c4) {
  asm volatile("cp.async.bulk.tensor.5d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5, %6}], [%1];" ::"l"(map),
               "r"(src), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
               : "memory");
}
STROBE_DEVICE void tma_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
template <int Pending> STROBE_DEVICE void tma_store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(Pending) : "memory");
}
// Makes this thread's ordinary shared-memory writes visible to the copy engine and the tensor cores (then a barrier).
STROBE_DEVICE void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// ---- programmatic dependent launch; before Hopper a launch begins when the one in front of it has ended -------------
#if __CUDA_ARCH__ >= 900
STROBE_DEVICE void launch_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
STROBE_DEVICE void wait_for_previous_grid() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
#else
STROBE_DEVICE void launch_dependents() {}
STROBE_DEVICE void wait_for_previous_grid() {}
#endif

}  // namespace strobe

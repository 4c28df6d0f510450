// Hopper: mbarriers and bulk tensor copies. A load lands at once in synchronous mode, else at a random later time, in
// any order.
#pragma once
#include <strobe/emu/base.cuh>

namespace strobe {

struct alignas(64) TensorMap {
  u64 opaque[16];
};

namespace emu {

struct Corner {  // of a box
  int at[5];
};
void mbar_init(u32 bar, u32 count, Site site);
void mbar_init_fence();
void mbar_arrive(u32 bar, u32 bytes, const char* op, Site site);
void mbar_wait(u32 bar, u32 parity, Site site);
void tma_load(u32 dst, const TensorMap* map, u32 bar, Corner corner, Site site);
void tma_store(const TensorMap* map, u32 src, Corner corner, Site site);
void commit_stores();
void wait_stores(u32 pending);
void fence_proxy_async();

}  // namespace emu

STROBE_DEVICE void mbar_init(u32 bar, u32 count, Site site = Site::here()) { emu::mbar_init(bar, count, site); }
STROBE_DEVICE void mbar_init_fence() { emu::mbar_init_fence(); }
STROBE_DEVICE void mbar_arrive(u32 bar, Site site = Site::here()) { emu::mbar_arrive(bar, 0, "mbar_arrive", site); }
STROBE_DEVICE void mbar_arrive_expect_tx(u32 bar, u32 bytes, Site site = Site::here()) {
  emu::mbar_arrive(bar, bytes, "mbar_arrive_expect_tx", site);
}
STROBE_DEVICE void mbar_wait(u32 bar, u32 parity, Site site = Site::here()) { emu::mbar_wait(bar, parity, site); }

STROBE_DEVICE void tma_prefetch_map(const TensorMap*) {}
STROBE_DEVICE void tma_load_5d(u32 dst, const TensorMap* map, u32 bar, int c0, int c1, int c2, int c3, int c4,
                               Site site = Site::here()) {
  emu::tma_load(dst, map, bar, {{c0, c1, c2, c3, c4}}, site);
}
STROBE_DEVICE void tma_store_5d(const TensorMap* map, u32 src, int c0, int c1, int c2, int c3, int c4,
                                Site site = Site::here()) {
  emu::tma_store(map, src, {{c0, c1, c2, c3, c4}}, site);
}
STROBE_DEVICE void tma_store_commit() { emu::commit_stores(); }
template <int Pending> STROBE_DEVICE void tma_store_wait_read() { emu::wait_stores(Pending); }
STROBE_DEVICE void fence_proxy_async() { emu::fence_proxy_async(); }

// ---- programmatic dependent launch: grids run one after another here ------------------------------------------------
STROBE_DEVICE void launch_dependents() {}
STROBE_DEVICE void wait_for_previous_grid() {}

}  // namespace strobe

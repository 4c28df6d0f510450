// Hopper: bulk copies of contiguous bytes. A load lands as a TMA load does; a store or a sum is read as late as a TMA
// store is, and written when it is waited for, or when the block ends.
#pragma once
#include <strobe/emu/memory.cuh>
#include <strobe/emu/tma.cuh>

namespace strobe {

namespace emu {
void bulk_load(u32 dst, const void* src, u32 bytes, u32 bar, Site site);
void bulk_out(float* dst, u32 src, u32 bytes, bool add, const char* op, Site site);
void bulk_wait_written();
}  // namespace emu

STROBE_DEVICE void bulk_prefetch(const void* src, u32 bytes, Site site = Site::here()) {
  emu::check_global(src, bytes, 16, false, "bulk_prefetch", site);
}
STROBE_DEVICE void bulk_load(u32 dst, const void* src, u32 bytes, u32 bar, Site site = Site::here()) {
  emu::bulk_load(dst, src, bytes, bar, site);
}
STROBE_DEVICE void bulk_add(float* dst, u32 src, u32 bytes, Site site = Site::here()) {
  emu::bulk_out(dst, src, bytes, true, "bulk_add", site);
}
STROBE_DEVICE void bulk_store(float* dst, u32 src, u32 bytes, Site site = Site::here()) {
  emu::bulk_out(dst, src, bytes, false, "bulk_store", site);
}
STROBE_DEVICE void bulk_wait_written() { emu::bulk_wait_written(); }

}  // namespace strobe

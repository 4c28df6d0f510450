// Types, qualifiers and indices: plain C++ in place of ptx/base.cuh.
#pragma once
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;
#include <strobe/emu/report.cuh>
#include <strobe/emu/fiber.cuh>
#include <strobe/emu/block.cuh>
#include <strobe/emu/barriers.cuh>
#include <strobe/emu/access.cuh>

#define STROBE_DEVICE inline
#define STROBE_KERNEL(threads, blocks_per_sm)              \
  static constexpr unsigned strobe_launch_bound = threads; \
  static void
#define STROBE_GRID_CONSTANT const

namespace strobe {

struct bf16 {};
struct fp16 {};

STROBE_DEVICE u32 thread_idx() { return emu::self().index; }
STROBE_DEVICE u32 block_idx() { return emu::block().index; }
STROBE_DEVICE u32 grid_dim() { return emu::block().grid; }

STROBE_DEVICE float as_float(u32 bits) {
  float x;
  memcpy(&x, &bits, 4);
  return x;
}
STROBE_DEVICE u32 as_bits(float x) {
  u32 bits;
  memcpy(&bits, &x, 4);
  return bits;
}
constexpr STROBE_DEVICE int min(int a, int b) { return a < b ? a : b; }
constexpr STROBE_DEVICE int max(int a, int b) { return a > b ? a : b; }

STROBE_DEVICE i64 opaque(i64 x) { return x; }
STROBE_DEVICE int opaque(int x) { return x; }
STROBE_DEVICE u32 thread_idx_again() { return thread_idx(); }

STROBE_DEVICE u32 warp_uniform(u32 x, Site site = Site::here()) {
  struct Lane {
    u32 value;
  } lane{x};
  emu::block().converge(emu::Scope::warp, "warp_uniform", false, site, &lane, [](void** lanes) {
    for (int i = 1; i < 32; ++i) static_cast<Lane*>(lanes[i])->value = static_cast<Lane*>(lanes[0])->value;
  });
  return lane.value;
}

template <int N> STROBE_DEVICE void pin(float (&)[N]) {}
template <int N> STROBE_DEVICE void pin(u32 (&)[N]) {}

}  // namespace strobe

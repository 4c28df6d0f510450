// Types, qualifiers and indices: plain C++ in place of ptx/base.cuh.
//
// Kernels are compiled with the headers of this folder. They hold wrappers, and declare what those call. Its
// definitions are in engine/, the same for every kernel: compiled once, and linked to each.
#pragma once
#include <cstring>
#include <initializer_list>  // for loops over {a, b}
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define STROBE_DEVICE inline
#define STROBE_KERNEL(threads, blocks_per_sm)              \
  static constexpr unsigned strobe_launch_bound = threads; \
  static void
#define STROBE_GRID_CONSTANT const

namespace strobe {

struct bf16 {
  u16 bits;
};
struct fp16 {
  u16 bits;
};

namespace emu {

// A place in the kernel's source where something happened. Every wrapper takes one as its last argument and leaves it
// to its default, which names the line of the call.
struct Site {
  const char* file = "";
  unsigned line = 0;
  static constexpr Site here(const char* file = __builtin_FILE(), unsigned line = __builtin_LINE()) {
    return Site{file, line};
  }
};

constexpr u32 kSharedBase = 1024;     // as on a GPU, the addresses of shared memory do not begin at 0
constexpr u32 kPoison = 0x7fff7fffu;  // NaN in every format: what is not there yet

enum class Element { bf16, fp16 };
template <class T> constexpr Element kElement = Element::bf16;
template <> constexpr Element kElement<fp16> = Element::fp16;

// The kernel of a program, and what a program is asked to do with it.
struct Kernel {
  u64 params_bytes;
  u32 launch_bound;
  void (*run)(const void* params);
};
struct Launch;
int run(const Launch& launch, const Kernel& kernel);

u32 thread_index();
u32 block_index();
u32 grid_size();
u32 warp_uniform(u32 x, Site site);

}  // namespace emu
using emu::Site;

STROBE_DEVICE u32 thread_idx() { return emu::thread_index(); }
STROBE_DEVICE u32 block_idx() { return emu::block_index(); }
STROBE_DEVICE u32 grid_dim() { return emu::grid_size(); }

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

STROBE_DEVICE u32 warp_uniform(u32 x, Site site = Site::here()) { return emu::warp_uniform(x, site); }

template <int N> STROBE_DEVICE void pin(float (&)[N]) {}
template <int N> STROBE_DEVICE void pin(u32 (&)[N]) {}

}  // namespace strobe

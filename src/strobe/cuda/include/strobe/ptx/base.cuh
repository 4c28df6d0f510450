// Types, qualifiers and indices. Kernels never touch CUDA's built-in names directly, so that `emu/` can stand in for
// `ptx/`.
#pragma once
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define STROBE_DEVICE __device__ __forceinline__
#define STROBE_KERNEL(threads, blocks_per_sm) extern "C" __global__ void __launch_bounds__(threads, blocks_per_sm)
#define STROBE_GRID_CONSTANT const __grid_constant__

namespace strobe {

// 16-bit element types: what a tensor in memory holds. In registers they travel packed in pairs, as u32.
struct bf16 {
  u16 bits;
};
struct fp16 {
  u16 bits;
};

STROBE_DEVICE u32 thread_idx() { return threadIdx.x; }
STROBE_DEVICE u32 block_idx() { return blockIdx.x; }
STROBE_DEVICE u32 grid_dim() { return gridDim.x; }

STROBE_DEVICE float as_float(u32 bits) { return __uint_as_float(bits); }
STROBE_DEVICE u32 as_bits(float x) { return __float_as_uint(x); }
constexpr STROBE_DEVICE int min(int a, int b) { return a < b ? a : b; }
constexpr STROBE_DEVICE int max(int a, int b) { return a > b ? a : b; }

// Returns the value, but the compiler forgets how it came about: what is computed from it is computed where it is used,
// instead of being kept in registers across a loop.
STROBE_DEVICE i64 opaque(i64 x) {
  asm volatile("" : "+l"(x));
  return x;
}
STROBE_DEVICE int opaque(int x) {
  asm("" : "+r"(x));
  return x;
}
STROBE_DEVICE u32 thread_idx_again() {
  u32 x = threadIdx.x;
  asm volatile("" : "+r"(x));
  return x;
}

// Returns lane 0's value, which the compiler then knows to be the same in every thread of the warp: branches on it are
// uniform.
STROBE_DEVICE u32 warp_uniform(u32 x) { return __shfl_sync(0xffffffffu, x, 0); }

// Registers of a wgmma in flight belong to the tensor cores: pinned after a wait, they are not used before it. What is
// pinned before a wait stays before it in PTX; ptxas may still move it (keep_above).
template <int N> STROBE_DEVICE void pin(float (&r)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(r[i])::"memory");
}
template <int N> STROBE_DEVICE void pin(u32 (&r)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+r"(r[i])::"memory");
}

}  // namespace strobe

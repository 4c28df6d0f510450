// Hopper's warpgroup matrix product, asynchronous: 128 threads together compute D[64xN] (+)= A[64x16] * B[16xN].
// The instructions themselves carry N/2 accumulator operands each; `strobe/cuda/parts/wgmma.py` prints `Wgmma<T, N>`
// for the shapes a kernel uses into its source:
//   ss_zero, ss   A and B from shared memory, both K-major               (S  = Q K^T)
//   ss_tt_zero    A and B from shared memory, both MN-major              (dQ = dS K)
//   rs_zero, rs   A from registers, B K-major
//   rs_t_zero, rs_t  A from registers, B MN-major                        (O += P V)
// `_zero` ignores the old D. Chains, such as ss_zero<kSteps, A, B> and rs_t<kSteps, B>, add up several products:
// A::step(i) and B::step(i) say how far from the first operand in shared memory the i-th lies.
#pragma once
#include <strobe/ptx/base.cuh>

namespace strobe {

template <class T, int N> struct Wgmma;

// D of O += P V, N/2 registers of this thread as a wgmma leaves them, printed likewise. A kernel declares it first.
//   zero(), scale(by)          by[0] for the thread's first row, by[1] for its second
//   rs_t<kSteps, B>(a, b)      the chain
//   stage<J>(address, by)      columns 16 J and on, scaled and rounded, by stmatrix
//   stage_fp32<J>(address, odd, by)     the 32 columns of panel J, scaled, where tile/swizzle.cuh says; odd: in_odd_row
//   add_staged<J>(address, odd, there)  adds what was so staged; without `there` nothing is read
//   load_row(r, from, columns) row r from fp32, likewise; further columns stay as they are
//   store_row(r, to, columns)  row r as fp32, up to `columns` (a multiple of 8); of every eight, this thread has two
template <class T, int N> struct Accumulators;

STROBE_DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
STROBE_DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int Pending> STROBE_DEVICE void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory");
}

// Operand descriptor for the 128-byte swizzle. stride: distance of 8-row groups; lead: distance of 64-column panels
// (MN-major only).
STROBE_DEVICE u64 wgmma_desc(u32 addr, u32 lead_bytes, u32 stride_bytes) {
  return u64((addr & 0x3FFFF) >> 4) | u64(lead_bytes >> 4) << 16 | u64(stride_bytes >> 4) << 32 | u64(1) << 62;
}

template <int Regs> STROBE_DEVICE void regs_dec() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Regs)); }
template <int Regs> STROBE_DEVICE void regs_inc() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Regs)); }

// ptxas sinks computations below a following wgmma wait. A side effect that depends on their results keeps them above
// it: a store that never happens. Row sums are never negative, which ptxas cannot know of a loop-carried value.
STROBE_DEVICE void keep_above(u32 addr, float never_negative) {
  asm volatile("{ .reg .pred never; setp.lt.f32 never, %1, 0f00000000; @never st.shared.f32 [%0], %1; }" ::"r"(addr),
               "f"(never_negative)
               : "memory");
}

}  // namespace strobe

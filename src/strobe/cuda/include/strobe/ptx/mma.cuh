// The warp-level matrix product of Ampere and later: D[16x8] += A[16x16] * B[16x8], 16-bit operands, fp32 sums.
#pragma once
#include <strobe/ptx/base.cuh>

namespace strobe {

// Let g = lane/4, q = lane%4:  d0,d1 = (row g, columns 2q, 2q+1), d2,d3 = row g+8;  a0 = (row g, k 2q..), a1 = row g+8,
// a2, a3 the same for k + 8;  b0 = (k 2q.., column g), b1 = k + 8. `mma_m16n8k16_zero` ignores the old D.
template <class T> STROBE_DEVICE void mma_m16n8k16(float& d0, float& d1, float& d2, float& d3, u32 a0, u32 a1, u32 a2,
                                                   u32 a3, u32 b0, u32 b1);
template <> STROBE_DEVICE void mma_m16n8k16<bf16>(float& d0, float& d1, float& d2, float& d3, u32 a0, u32 a1, u32 a2,
                                                  u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(d0), "+f"(d1), "+f"(d2), "+f"(d3)
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
template <> STROBE_DEVICE void mma_m16n8k16<fp16>(float& d0, float& d1, float& d2, float& d3, u32 a0, u32 a1, u32 a2,
                                                  u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(d0), "+f"(d1), "+f"(d2), "+f"(d3)
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
template <class T> STROBE_DEVICE void mma_m16n8k16_zero(float& d0, float& d1, float& d2, float& d3, u32 a0, u32 a1,
                                                        u32 a2, u32 a3, u32 b0, u32 b1);
template <> STROBE_DEVICE void mma_m16n8k16_zero<bf16>(float& d0, float& d1, float& d2, float& d3, u32 a0, u32 a1,
                                                       u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %10, "
      "%10, %10};"
      : "=f"(d0), "=f"(d1), "=f"(d2), "=f"(d3)
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "f"(0.f));
}
template <> STROBE_DEVICE void mma_m16n8k16_zero<fp16>(float& d0, float& d1, float& d2, float& d3, u32 a0, u32 a1,
                                                       u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %10, %10, "
      "%10};"
      : "=f"(d0), "=f"(d1), "=f"(d2), "=f"(d3)
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "f"(0.f));
}

}  // namespace strobe

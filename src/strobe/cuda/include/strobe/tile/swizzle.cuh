// A tile lies in shared memory as panels, one after the other, whose rows are 128 bytes (64 columns of 16 bits). The
// eight 16-byte chunks of such a row are permuted by its number. Eight rows of one chunk then lie in eight different
// places, so that ldmatrix, which reads exactly that, has no bank conflicts. It is also the layout that the tensor
// memory accelerator and wgmma call "128B swizzle".
#pragma once
#include <strobe/tile/element.cuh>

namespace strobe {

// Byte offset of a chunk in a tile of `rows` rows.
STROBE_DEVICE u32 chunk_offset(int rows, int row, int chunk) {
  return (chunk / 8) * (rows * kPanelRowBytes) + row * kPanelRowBytes + (((chunk % 8) ^ (row & 7)) << 4);
}

// A panel of fp32 numbers as a wgmma leaves them: of each of its four groups of 8 columns a thread has two, in a row
// and in that eight rows, 1024 bytes, further. Half a warp, which is served at once, has four rows. Rows 2n and 2n + 1
// have a group in the same banks. Hence threads of even rows move groups 0, 1, 2, 3, in this order, and those of odd
// rows groups 2, 3, 0, 1: the i-th lies at byte `fp32_offset(thread) ^ 32 * i` of the panel.
constexpr STROBE_DEVICE bool in_odd_row(int thread) { return thread / 4 % 2; }
STROBE_DEVICE u32 fp32_offset(int thread) {
  const int first = in_odd_row(thread) ? 2 : 0;
  return chunk_offset(64, thread / 32 * 16 + thread % 32 / 4, 2 * first + thread % 4 / 2) + thread % 2 * 8;
}

// The address one lane gives to ldmatrix.x4 for chunks 2*step, 2*step + 1 of 16 rows, from the address for step
// 0: moving along the columns flips bits of the swizzled chunk and, every four steps, enters the next panel.
STROBE_DEVICE u32 step_columns(u32 address, int rows, int step) {
  return (address ^ ((step & 3) << 5)) + (step >> 2) * (rows * kPanelRowBytes);
}

}  // namespace strobe

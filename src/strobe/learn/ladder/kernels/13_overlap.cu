// 13  Overlap: the library's kernel
//
// What changed: S of the next keys and P V of the last ones are in flight together, and the softmax of a warpgroup begins as soon as S is
//   there, beside its own P V. Blocks stay on their multiprocessor and take tile after tile from a counter, longest first; tiles
//   that need no mask have a loop without one; O leaves through the copy engine. Consumers take turns only
//   for the head dims for which, beside this overlap, that still pays.
// Why it should help: the exponentials of a block stand beside its own products, not only beside those of its neighbour.
// Predicted: x 1.2 the speed of 12, half of it from the overlap and half from the rest.
// Measured: x 1.25, 785 TFLOP/s (NVIDIA H200; docs/ladder.md says how)
// What limits it now: the exponential units beside the matrix units, and in long runs the power that both may draw.
//
// This rung is not a copy. The kernel is the file below, and what follows it (tile, mask, arguments) is printed by strobe/cuda/plan.py,
// as for any call of strobe.attention on a Hopper GPU.
#include <strobe/kernels/forward_sm90.cuh>

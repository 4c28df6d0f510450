// 13  Overlap: the library's kernel
//
// What changed: S of the next keys and P V of the last ones are in flight together. The softmax of a warpgroup starts
//   as soon as its S is complete, and overlaps with its own P V. Blocks are persistent: each takes tile after tile from
//   a counter, longest first. Tiles that need no mask have a loop without one. O leaves through the copy engine.
//   Consumers ping-pong only for the head dims for which that still pays on top of this overlap.
// Why it should help: the exponentials of a warpgroup overlap with its own products, not only with its neighbour's.
// Predicted: x 1.2 the speed of 12, half of it from the overlap and half from the rest.
// Measured: x 1.27, 777 TFLOP/s (NVIDIA H200; docs/ladder.md says how)
// What limits it now: the exponential units and the matrix units together, and in long runs the power that both draw.
//
// This rung is not a copy. The kernel is the file below. What follows it (tile, mask, arguments) is printed by Python,
// as for any call of strobe.attention on a Hopper GPU.
#include <strobe/kernels/forward_sm90.cuh>

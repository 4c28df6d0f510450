// 13  Overlap: the library's kernel
//
// What changed: S of the next keys and P V of the last ones are in flight together, and the softmax of a warpgroup begins as soon as S is
//   there, beside its own P V. Blocks stay on their multiprocessor and take tile after tile from a counter, longest first; tiles
//   that need no mask have a loop without one; O leaves through the copy engine. Whether consumers take turns depends on the head dim: beside
//   this overlap, ping-pong pays only for small ones.
// Why it should help: the exponentials of a block stand beside its own products, not only beside those of its neighbour.
// Predicted: x 1.2 the speed of 12, half of it from the overlap and half from the rest.
// What limits it now: power and the exponential units; docs/design says what was tried.
//
// This rung is not a copy. The kernel is the file below, and what follows it (tile, mask, arguments) is printed by strobe/cuda/plan.py,
// as for any call of strobe.attention on a Hopper GPU.
#include <strobe/kernels/forward_sm90.cuh>

// b4  Hopper: the library's kernel
//
// What changed: what 10 to 13 have taught, for the gradient: TMA copies, wgmma, a producer and two consumer
//   warpgroups, 128 keys a block. S^T and dP^T are in flight together, and P^T is computed while dP^T still runs.
//   S and dP are transposed, as in b3: wgmma takes its left operand from registers, so P^T and dS^T go to dV and dK
//   without a detour through shared memory. Only dS takes it, for dQ, and that product is one block of queries late,
//   so that no warpgroup waits for the other. dQ leaves by bulk reductions: one instruction adds 16 KB from shared
//   memory to global memory, in the order in which registers held it, and the last kernel undoes that order.
// Why it should help: the copy engine loads and adds while all warps go on, and the exponentials of one warpgroup
//   overlap with the products of the other. 128 keys a block halve the sums of dQ once more.
// Predicted: x 5 the speed of b3. The forward kernel 13 is 3.8 times as fast as 09; the rest is what b3 loses to its
//   atomic sums.
// Measured: x 4.70, 617 TFLOP/s (NVIDIA H200; docs/ladder.md says how)
// What limits it now: a block's start and end overlap with nothing, which shows where sequences are short; and the
//   zeros and the sums of dQ pass through memory. docs/design/hopper-backward.md has the numbers.
//
// This rung is not a copy. The kernel is the file below. What follows it (tile, mask, arguments) is printed by
// Python, as for any gradient of strobe.attention on a Hopper GPU. delta.cuh runs before it, convert_dq.cuh after it.
#include <strobe/kernels/backward_sm90.cuh>

// Warp specialisation, which all kernels for Hopper share: warpgroup 0 of a block is the producer, which loads tiles;
// the others are consumers, which compute.
//
// Kernels prefetch their tensor maps and call produce() and consume() themselves. A helper that did either for them
// would change the order of instructions and the registers of some.
#pragma once
#include <strobe/ptx/tma.cuh>
#include <strobe/ptx/warp.cuh>
#include <strobe/ptx/wgmma.cuh>

namespace strobe {

// Initialises the barriers of `Kernel`; afterwards every thread of the block may use them.
template <class Kernel> STROBE_DEVICE void init_block() {
  if (thread_idx() == 0) Kernel::init_barriers();
  sync_block();
}

// The producer gives registers to the consumers, which need them for their accumulators.
template <class Config> STROBE_DEVICE void share_registers(u32 warpgroup) {
  if (warpgroup == 0) regs_dec<Config::kRegsProducer>();
  else regs_inc<Config::kRegsConsumer>();
}

}  // namespace strobe

// The emulator's own code, which no kernel changes: compiled once, and linked to each. Files without `#pragma once`
// hold definitions and are included here alone.
#include <strobe/emu/engine/ends.cuh>
#include <strobe/emu/engine/access.cuh>
#include <strobe/emu/engine/barriers.cuh>
#include <strobe/emu/engine/math.cuh>
#include <strobe/emu/engine/memory.cuh>
#include <strobe/emu/engine/warp.cuh>
#include <strobe/emu/engine/mma.cuh>
#include <strobe/emu/engine/tma.cuh>
#include <strobe/emu/engine/bulk.cuh>
#include <strobe/emu/engine/wgmma.cuh>
#include <strobe/emu/engine/launch.cuh>

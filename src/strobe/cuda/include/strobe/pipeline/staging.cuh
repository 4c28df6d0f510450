// The epilogue: a warpgroup stages its 64 rows of a result in shared memory, kPanels panels at a time, rounded to T or
// as fp32, and one thread issues the TMA store, which clips what lies beyond the sequence.
#pragma once
#include <strobe/pipeline/barriers.cuh>
#include <strobe/ptx/math.cuh>
#include <strobe/ptx/memory.cuh>
#include <strobe/tile/tma_tile.cuh>

namespace strobe {

// An accumulator in ordinary registers, as a wgmma leaves it, to be staged like `Accumulators`, rounded to T. Rows that
// are stored from the registers are fp32.
template <class T, int N> struct Rounded {
  const float (&d)[N / 2];
  float scale = 1.f;  // of rows that are not rounded
  template <int J> STROBE_DEVICE void stage(u32 address, const float (&by)[2]) const {
    const float* x = d + 8 * J;
    stmatrix_x4(address, pack2<T>(x[0] * by[0], x[1] * by[0]), pack2<T>(x[2] * by[1], x[3] * by[1]),
                pack2<T>(x[4] * by[0], x[5] * by[0]), pack2<T>(x[6] * by[1], x[7] * by[1]));
  }
  STROBE_DEVICE void store_row(int r, float* to, int columns) const {
#pragma unroll
    for (int i = 0; i < N / 8; ++i)
      if (8 * i < columns) st_global_x2(to + 8 * i, d[4 * i + 2 * r] * scale, d[4 * i + 2 * r + 1] * scale);
  }
};

// The epilogue of results that are merged with others: stores fp32 straight from the registers.
struct Fp32Rows {
  float* first;
  i64 stride;
  int rows, columns;  // how many exist
  // The 64 rows of a warpgroup, from row `from` on.
  template <class D> STROBE_DEVICE void store(const D& d, int from) const {
    const int thread = thread_idx_again(),
              row = from + 16 * (thread % 128 / 32) + thread % 32 / 4;  // not hoisted out of the main loop
#pragma unroll
    for (int r = 0; r < 2; ++r)
      if (row + 8 * r < rows) d.store_row(r, first + i64(row + 8 * r) * stride + 2 * (thread % 4), columns);
  }
};

// kPrivate: the buffer serves nothing else, so an earlier store may still be reading it. Otherwise warps of this
// warpgroup may still be reading it.
template <class T, bool kOneBox, int kColumns, int kPanels, bool kPrivate> struct Staging {
  u32 buffer;
  int consumer;
  int first_panel = 0;  // of the tensor: where these columns begin
  static constexpr int kRows = 64, kPanelsAtOnce = kPanels, kPanelsInAll = panels<T>(kColumns);
  static constexpr bool kFp32 = sizeof(T) == 4;

  template <bool kStagedBefore = kPrivate> STROBE_DEVICE void acquire() const {
    if (kStagedBefore && thread_idx() % 128 == 0) tma_store_wait_read<0>();  // what was staged here before has left
    sync_warpgroup(consumer);  // and every warp of the warpgroup is done with the buffer
  }
  // Panels from `panel` on have been staged; without `any_rows` nothing is stored.
  STROBE_DEVICE void send(const TensorMap* map, const Box& box, int panel, bool any_rows) const {
    fence_proxy_async();
    sync_warpgroup(consumer);
    if (thread_idx() % 128 == 0 && any_rows) {
      tma_store_panels<T, kOneBox && !kFp32, 64>(map, buffer, box, first_panel + panel,
                                                 min(kPanels, kPanelsInAll - panel));
      tma_store_commit();
    }
  }
  // All columns of an accumulator, the thread's two rows multiplied by scale[0] and scale[1]; rounded, or as fp32.
  template <int kFrom = 0, class D> STROBE_DEVICE void store(const D& d, const float (&scale)[2], const TensorMap* map,
                                                             const Box& box, bool any_rows) const {
    if constexpr (kFrom < kPanelsInAll) {
      acquire<kPrivate || (kFrom > 0)>();
      if constexpr (kFp32) stage_fp32<kFrom, 0>(d, scale);
      else stage<kFrom * 4, 0>(d, scale);
      send(map, box, kFrom, any_rows);
      store<kFrom + kPanels>(d, scale, map, box, any_rows);
    }
  }
  // Stages all panels but sends none: another warp sends them.
  template <class D> STROBE_DEVICE void fill(const D& d, const float (&scale)[2]) const {
    static_assert(kPanels == kPanelsInAll, "they fit");
    stage<0, 0, true>(d, scale);
  }

 private:
  // `Accumulators` takes constants, so this recursion replaces a loop, 16 columns at a time.
  // kInLoop: the caller is in a loop, so addresses are recomputed instead of held in registers.
  template <int kFrom, int J, bool kInLoop = false, class D>
  STROBE_DEVICE void stage(const D& d, const float (&scale)[2]) const {
    if constexpr (J < kPanels * 4 && kFrom + J < kColumns / 16) {
      const u32 tid = (kInLoop ? thread_idx_again() : thread_idx()) % 128, lane = tid % 32;
      d.template stage<kFrom + J>(buffer + chunk_offset(64, 16 * (tid / 32) + (lane & 15), 2 * J + (lane >> 4)), scale);
      stage<kFrom, J + 1, kInLoop>(d, scale);
    }
  }
  // A panel at a time.
  template <int kFrom, int J, class D> STROBE_DEVICE void stage_fp32(const D& d, const float (&scale)[2]) const {
    if constexpr (J < kPanels && kFrom + J < kPanelsInAll) {
      const int thread = thread_idx() % 128;
      d.template stage_fp32<kFrom + J>(buffer + J * 64 * kPanelRowBytes + fp32_offset(thread), in_odd_row(thread),
                                       scale);
      stage_fp32<kFrom, J + 1>(d, scale);
    }
  }
};

// A slot of a ring over which a result was staged. It is free once the TMA store has read it, and is released well
// after the store was issued, so that nobody waits.
template <bool kEnabled, class Ring> struct StagedSlot {
  Ring ring;  // where the store was issued
  bool pending = false;

  STROBE_DEVICE void release() {
    if (!kEnabled || !pending) return;
    pending = false;
    if (thread_idx() % 128 == 0) {
      tma_store_wait_read<0>();
      ring.release();
    }
    ring.next();
  }
};

}  // namespace strobe

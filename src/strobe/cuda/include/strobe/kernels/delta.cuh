// What the backward wants to know of each row before it starts: delta = rowsum(dO * O) - dLSE and the LSE in units of
// log 2, both in whole blocks of kRows rows; zeros where dQ will be summed up, or, if its sums are taken by turns, in
// the counters of turns and, where rows may see no key, in dQ itself; the gradient of the sinks, row by row; the keys
// of the dropout's rows.
//
// A block of 256 threads takes kRows rows of one head, kLanes threads a row, 16 bytes each.
#pragma once
#include <strobe/pipeline/query_blocks.cuh>
#include <strobe/ptx/math.cuh>
#include <strobe/ptx/tma.cuh>
#include <strobe/tile/dropout.cuh>
#include <strobe/tile/softmax.cuh>

namespace strobe {

constexpr STROBE_DEVICE int lanes_of(int chunks) { return chunks <= 1 ? 1 : 2 * lanes_of((chunks + 1) / 2); }

template <class Config, class Params> struct Delta {
  using T = typename Config::Element;
  static constexpr int kRows = Config::kStatBlock, kLanes = max(lanes_of(Config::kDimV / 8), 256 / kRows),
                       kRowsAtOnce = 256 / kLanes;
  const Params& p;
  int m, head, batch, slice, len_q, first_row;

  STROBE_DEVICE Delta(const Params& p, int index) : p(p) {
    const int bh = quotient(index, p.stat_blocks);
    m = index - bh * p.stat_blocks;
    batch = quotient(bh, p.heads);
    head = bh - batch * p.heads;
    slice = Config::kVarlen ? 0 : batch;
    first_row = Config::kVarlen ? ld_global(p.cu_q + batch) : 0;
    len_q = Config::kVarlen ? ld_global(p.cu_q + batch + 1) - first_row : p.len_q;
  }

  STROBE_DEVICE static float dot(u32 a, u32 b) {
    return fma(to_float<T>(u16(a >> 16)), to_float<T>(u16(b >> 16)), to_float<T>(u16(a)) * to_float<T>(u16(b)));
  }
  STROBE_DEVICE float row_sum(int row, int lane) const {
    if (row >= len_q || lane * 8 >= p.dim_v) return 0.f;
    const u32x4 x = ld_global_x4(p.o + slice * p.o_batch + head * p.o_head + i64(first_row + row) * p.o_row + 8 * lane),
                y = ld_global_x4(p.d_o + slice * p.do_batch + head * p.do_head + i64(first_row + row) * p.do_row +
                                 8 * lane);
    return dot(x.x, y.x) + dot(x.y, y.y) + dot(x.z, y.z) + dot(x.w, y.w);
  }
  STROBE_DEVICE void store(int row, float delta) const {
    const i64 lse_at = slice * p.lse_batch + head * p.lse_head + first_row + row,
              stat = first_stat<Config>(p, head, batch, first_row) + row;
    const bool there = row < len_q;
    const float lse = there ? ld_global(p.lse + lse_at) : neg_inf();
    if (there && p.dlse) delta -= ld_global(p.dlse + lse_at);
    const bool empty = lse == neg_inf();  // rows behind the end, and rows that see no key: P = 0
    st_global(p.lse2 + stat, empty ? -neg_inf() : lse * kLog2e);
    st_global(p.delta + stat, empty ? 0.f : delta);
    if (Config::kSinks && there) {  // the sink is a key whose value is 0: dP = 0, dS = -P delta
      const float sink = ld_global(p.sinks + head), weight = sink == lse ? 1.f : exp2_approx((sink - lse) * kLog2e);
      st_global(p.dsink + lse_at, sink == neg_inf() ? 0.f : -weight * delta);
    }
    if (Config::kDropout) {
      const DropoutRow keys = dropout_row(dropout_head_key(p.seed, batch, head), row);
      st_global(p.dropout_rows + stat, row % 2 ? keys.b : keys.a);
    }
  }
  STROBE_DEVICE void clear_dq(int row, int lane) const {
    constexpr int kElements = Config::kPartialOut ? 4 : 8;  // in 16 bytes
    char* const to = reinterpret_cast<char*>(p.dq) +
                     (slice * p.dq_batch + head * p.dq_head + i64(first_row + row) * p.dq_row) * (16 / kElements);
    if (row < len_q)
      for (int i = lane; i < p.dim / kElements; i += kLanes) st_global(to + 16 * i, u32x4{0, 0, 0, 0});
  }
  STROBE_DEVICE void run() const {
    const int lane = thread_idx() % kLanes;
    const i64 block = first_stat<Config>(p, head, batch, first_row) / kRows + m;
    if constexpr (Config::kDqFloats > 0) {
      float* sum = p.dq_sum + block * Config::kDqFloats;
#pragma unroll 4
      for (int i = thread_idx() * 4; i < Config::kDqFloats; i += 4 * 256) st_global(sum + i, u32x4{0, 0, 0, 0});
    }
    if (Config::kTurns && thread_idx() < 2) st_global(p.turns + 2 * block + thread_idx(), 0u);
#pragma unroll
    for (int i = 0; i < kRows; i += kRowsAtOnce) {
      const int row = m * kRows + i + thread_idx() / kLanes;
      if (Config::kClearDq) clear_dq(row, lane);
      float sum = row_sum(row, lane);
#pragma unroll
      for (int j = 1; j < kLanes; j *= 2) sum += shfl_xor(sum, j);
      if (lane == 0) store(row, sum);
    }
  }
};

template <class Config, class Params> STROBE_DEVICE void backward_delta(const Params& p) {
  launch_dependents();
  const Delta<Config, Params> work(p, block_idx());
  if (work.m * Config::kStatBlock < work.len_q) work.run();
}

}  // namespace strobe

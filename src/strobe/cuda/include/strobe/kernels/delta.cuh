// Computes what the backward needs of each row before it starts: delta = rowsum(dO * O) - dLSE and the LSE in units of
// log 2, both in whole blocks of kRows rows; zeros where dQ will be summed up, or, if its sums are taken by turns, in
// the counters of turns and, where rows may see no key, in dQ itself; the gradient of the sinks, row by row; the keys
// of the dropout's rows.
//
// A block of 256 threads takes kRows rows of one head, kLanes threads a row, 8 columns each, or twice that above 256
// columns.
#pragma once
#include <strobe/pipeline/schedule.cuh>
#include <strobe/ptx/math.cuh>
#include <strobe/ptx/tma.cuh>
#include <strobe/tile/dropout.cuh>
#include <strobe/tile/element.cuh>
#include <strobe/tile/softmax.cuh>

namespace strobe {

constexpr STROBE_DEVICE int lanes_of(int chunks) { return chunks <= 1 ? 1 : 2 * lanes_of((chunks + 1) / 2); }

template <class Config, class Params> struct Delta {
  using T = typename Config::Element;
  static constexpr int kRows = Config::kStatBlock, kChunks = Config::kDimV / 8,
                       kLanes = max(lanes_of(min(kChunks, 32)), 256 / kRows), kRowsAtOnce = 256 / kLanes;
  const Params& p;
  StatBlock at;

  STROBE_DEVICE Delta(const Params& p, int index) : p(p), at(stat_block<Config>(index, p)) {}
  STROBE_DEVICE bool any_rows() const { return at.m * kRows < at.q.length; }

  STROBE_DEVICE static float dot(u32 a, u32 b) {
    return fma(to_float<T>(u16(a >> 16)), to_float<T>(u16(b >> 16)), to_float<T>(u16(a)) * to_float<T>(u16(b)));
  }
  STROBE_DEVICE static float dot(u32x4 x, u32x4 y) {  // of fp32 numbers
    return fma(as_float(x.x), as_float(y.x), as_float(x.y) * as_float(y.y)) +
           fma(as_float(x.z), as_float(y.z), as_float(x.w) * as_float(y.w));
  }
  STROBE_DEVICE float chunk_sum(int row, int chunk) const {
    if (row >= at.q.length || chunk * 8 >= p.dim_v) return 0.f;
    if constexpr (sizeof(*p.o) == 4) {
      const float* const o = at.q.rows(p.o, p.o_batch, p.o_head, p.o_row, at.head, row) + 8 * chunk;
      const float* const d_o = at.q.rows(p.d_o, p.do_batch, p.do_head, p.do_row, at.head, row) + 8 * chunk;
      return dot(ld_global_x4(o), ld_global_x4(d_o)) + dot(ld_global_x4(o + 4), ld_global_x4(d_o + 4));
    } else {
      const u32x4 x = ld_global_x4(at.q.rows(p.o, p.o_batch, p.o_head, p.o_row, at.head, row) + 8 * chunk),
                  y = ld_global_x4(at.q.rows(p.d_o, p.do_batch, p.do_head, p.do_row, at.head, row) + 8 * chunk);
      return dot(x.x, y.x) + dot(x.y, y.y) + dot(x.z, y.z) + dot(x.w, y.w);
    }
  }
  STROBE_DEVICE void store(int row, float delta) const {
    const i64 lse_at = at.q.slice * p.lse_batch + at.head * p.lse_head + at.q.first + row,
              stat = first_stat<Config>(p, at.head, at.batch, at.q.first) + row;
    const bool there = row < at.q.length;
    const float lse = there ? ld_global(p.lse + lse_at) : neg_inf();
    if (there && p.dlse) delta -= ld_global(p.dlse + lse_at);
    const bool empty = lse == neg_inf();  // rows behind the end, and rows that see no key: P = 0
    st_global(p.lse2 + stat, empty ? -neg_inf() : lse * kLog2e);
    st_global(p.delta + stat, empty ? 0.f : delta);
    if (Config::kSinks && there) {  // the sink is a key whose value is 0: dP = 0, dS = -P delta
      const float sink = ld_global(p.sinks + at.head), weight = sink == lse ? 1.f : exp2_approx((sink - lse) * kLog2e);
      st_global(p.dsink + lse_at, sink == neg_inf() ? 0.f : -weight * delta);
    }
    if (Config::kDropout) {
      const DropoutRow keys = dropout_row(dropout_head_key(p.seed, at.batch, at.head), row);
      st_global(p.dropout_rows + stat, row % 2 ? keys.b : keys.a);
    }
  }
  STROBE_DEVICE void clear_dq(int row, int lane) const {
    constexpr int kElements = Config::kPartialOut ? 4 : kChunk<T>;  // in 16 bytes
    constexpr int kBytes = 16 / kElements;
    char* const to = at.q.rows(reinterpret_cast<char*>(p.dq), p.dq_batch * kBytes, p.dq_head * kBytes,
                               p.dq_row * kBytes, at.head, row);
    if (row < at.q.length)
      for (int i = lane; i < p.dim / kElements; i += kLanes) st_global(to + 16 * i, u32x4{0, 0, 0, 0});
  }
  STROBE_DEVICE void run() const {
    const int lane = thread_idx() % kLanes;
    const i64 block = first_stat<Config>(p, at.head, at.batch, at.q.first) / kRows + at.m;
    if constexpr (Config::kDqFloats > 0) {
      float* sum = p.dq_sum + block * Config::kDqFloats;
#pragma unroll 4
      for (int i = thread_idx() * 4; i < Config::kDqFloats; i += 4 * 256) st_global(sum + i, u32x4{0, 0, 0, 0});
    }
    if (Config::kTurns && thread_idx() < 2) st_global(p.turns + 2 * block + thread_idx(), 0u);
#pragma unroll
    for (int i = 0; i < kRows; i += kRowsAtOnce) {
      const int row = at.m * kRows + i + thread_idx() / kLanes;
      if (Config::kClearDq) clear_dq(row, lane);
      float sum = chunk_sum(row, lane);
      if (kChunks > kLanes) sum += chunk_sum(row, lane + kLanes);
#pragma unroll
      for (int j = 1; j < kLanes; j *= 2) sum += shfl_xor(sum, j);
      if (lane == 0) store(row, sum);
    }
  }
};

template <class Config, class Params> STROBE_DEVICE void backward_delta(const Params& p) {
  launch_dependents();
  const Delta<Config, Params> work(p, block_idx());
  if (work.any_rows()) work.run();
}

}  // namespace strobe

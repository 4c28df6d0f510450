// Writes new keys and values into pools of pages, at slots read on the device, and rotates the keys (RoPE).
//
// A thread moves 16 bytes, 8 numbers of one head of a row. All key heads come first, then all value heads. The two
// numbers of a rotated pair lie in one chunk (interleaved) or in two, each rotated by its own thread.
#pragma once
#include <strobe/tile/chunk.cuh>

namespace strobe {

template <class Config, class Params> struct Append {
  using T = typename Config::Element;
  static constexpr int kCosines = Config::kInterleaved ? 4 : 8;  // in a chunk
  const Params& p;
  int outer, inner;  // the new row

  STROBE_DEVICE i64 offset(const i64* strides) const { return outer * strides[0] + inner * strides[1]; }

  // ---- rotary position embedding
  // -------------------------------------------------------------------------------------
  template <class From> STROBE_DEVICE static void load(float (&to)[8], const From* from) { load_chunk(to, from); }
  template <class From> STROBE_DEVICE static void load(float (&to)[4], const From* from) {
#pragma unroll
    for (int i = 0; i < 4; ++i) to[i] = load_number(from + i);
  }
  // x cos - y sin for the first of a pair, x cos + y sin for the second, rounded as PyTorch does it: after each step.
  STROBE_DEVICE static float turned(float x, float y, float cos, float sin, bool first) {
    return add_rn(mul_rn(x, cos), mul_rn(y, as_float(as_bits(sin) ^ (first ? 0x80000000u : 0u))));
  }
  STROBE_DEVICE u32x4 turn(u32x4 x, const T* head, int column) const {
    i64 position = ld_constant(p.positions + offset(p.positions_strides), true);
    position = position < 0 ? 0 : position < p.rotary_rows ? position : p.rotary_rows - 1;
    const bool first = column < p.rotary_half;
    const int angle = Config::kInterleaved ? column / 2 : first ? column : column - p.rotary_half;
    float own[8], other[8], cos[kCosines], sin[kCosines], y[8];
    unpack<T>(own, x);
    load(cos, p.cos + position * p.cos_row + angle);
    load(sin, p.sin + position * p.sin_row + angle);
    if (!Config::kInterleaved) load_chunk(other, head + (first ? column + p.rotary_half : angle));
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (Config::kInterleaved)
        y[i] = turned(own[i], own[i ^ 1], cos[i / 2 % kCosines], sin[i / 2 % kCosines], i % 2 == 0);
      else y[i] = turned(own[i], other[i], cos[i % kCosines], sin[i % kCosines], first);
    }
    return pack<T>(y);
  }

  // `chunk` counts chunks across all heads; a head has `width` of them.
  STROBE_DEVICE void write_key(int chunk, int width, T* row) const {
    const int head = chunk / width, column = 8 * (chunk - head * width);
    const T* from = p.k_new + offset(p.k_new_strides) + head * p.k_new_strides[2];
    u32x4 x = ld_global_x4(from + column);
    if constexpr (Config::kRotary)
      if (column < 2 * p.rotary_half) x = turn(x, from, column);
    st_global(static_cast<void*>(row + head * p.k_head + column), x);
  }
  STROBE_DEVICE void write_value(int chunk, int width, T* row) const {
    const int head = chunk / width, column = 8 * (chunk - head * width);
    const T* from = p.v_new + offset(p.v_new_strides) + head * p.v_new_strides[2];
    st_global(static_cast<void*>(row + head * p.v_head + column), ld_global_x4(from + column));
  }
};

template <class Config, class Params> STROBE_DEVICE void append(const Params& p) {
  const u32 index = block_idx() * Config::kThreads + thread_idx(), chunks = p.key_chunks + p.value_chunks;
  const int row = int(index / chunks), chunk = int(index - row * chunks);
  if (row >= p.new_rows) return;
  const int outer = row / p.inner_rows;
  const Append<Config, Params> work{p, outer, row - outer * p.inner_rows};
  const i64 slot = ld_constant(p.slots + work.offset(p.slots_strides), true);
  if (slot < 0 || slot >= i64(p.pages) * p.page_size) return;
  const int page = int(u32(slot) / u32(p.page_size)), at = int(slot) - page * p.page_size;
  if (chunk < p.key_chunks) work.write_key(chunk, p.dim / 8, p.k + page * p.k_batch + at * p.k_row);
  else work.write_value(chunk - p.key_chunks, p.dim_v / 8, p.v + page * p.v_batch + at * p.v_row);
}

}  // namespace strobe

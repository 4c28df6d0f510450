// Scores: what becomes of q.k on its way to the softmax, given where it is, and of its gradient on the way back.
//
// `Score` is printed by score.py and has two functions: score(x, at, i), the logit of entry i of a fragment, and
// score.slope(x, y, at, i), its derivative where y is the logit. Every kernel calls these two, in a fragment whose rows
// are queries or, transposed, keys; `Where` tells entry i's sequence, head, query and key. Masks and dropout follow.
#pragma once
#include <strobe/pipeline/blocks.cuh>
#include <strobe/ptx/atomic.cuh>
#include <strobe/ptx/bulk.cuh>
#include <strobe/tile/dropout.cuh>
#include <strobe/tile/functions.cuh>
#include <strobe/tile/softmax.cuh>

namespace strobe {

// Entry i of a fragment is the score of query q(i) with key k(i). Both count positions, as masks do, in a sequence of
// len_q queries and len_k keys. `row` and `column` are the thread's first in memory.
template <bool kTransposed, int kPackGqa = 1> struct Where {
  static constexpr bool kOneHead = kPackGqa == 1;  // all entries are of one head
  static constexpr bool kStaged = false;           // whether those of a bias are at hand: see pair_tile.cuh
  int batch, first_head, row, column, offset_q, offset_k, len_q, len_k;

  STROBE_DEVICE int along_rows(int i) const { return row + 8 * fragment_row(i); }
  STROBE_DEVICE int along_columns(int i) const { return column + fragment_column(i); }
  STROBE_DEVICE int head(int i) const { return first_head * kPackGqa + along_rows(i) % kPackGqa; }
  STROBE_DEVICE int q(int i) const { return offset_q + (kTransposed ? along_columns(i) : along_rows(i) / kPackGqa); }
  STROBE_DEVICE int k(int i) const { return offset_k + (kTransposed ? along_rows(i) : along_columns(i)); }
  STROBE_DEVICE bool inside(int i) const { return q(i) < len_q && k(i) < len_k; }
  // rest + kQ * q(i) + kK * k(i), converted to a float once for each row: what columns add is known when it is
  // compiled.
  template <int kQ, int kK> STROBE_DEVICE float sum(int rest, int i) const {
    const int in_row = i & 2;  // the first entry
    return float(rest + kQ * q(in_row) + kK * k(in_row)) + float((kTransposed ? kQ : kK) * fragment_column(i));
  }
};
struct Nowhere {
  static constexpr bool kOneHead = true, kStaged = false;
};  // for a score that does not look

template <class Score, class Config, bool kTransposed = false>
STROBE_DEVICE auto where(const Sequence& s, const Positions& at, int head, int row, int column) {
  if constexpr (!Score::kPositional) return Nowhere{};
  else if constexpr (Config::kPositions)
    return Where<kTransposed, Config::kPackGqa>{s.batch,     head,        row,        column,
                                                at.offset_q, at.offset_k, at.whole_q, at.whole_k};
  else
    return Where<kTransposed, Config::kPackGqa>{s.batch,   head, row, column, 0, 0, s.q.length / Config::kPackGqa,
                                                s.k.length};
}

// kByEntry: how a logit is computed does not depend on others.
template <bool kByEntry = false, class Score, class At, int N>
STROBE_DEVICE void logits(float (&s)[N], const Score& score, const At& at) {
  if constexpr (Score::kHasTanh && !kByEntry) {  // warp-uniform: all of them are near 0, or none is taken to be
    float reach = 0.f;
#pragma unroll
    for (int i = 0; i < N; ++i) reach = fmax(reach, score.reach(s[i], at, i));
    if (!any(!score.is_near(reach))) {
#pragma unroll
      for (int i = 0; i < N; ++i) s[i] = score.near(s[i], at, i);
      return;
    }
  }
  if constexpr (!Score::kIdentity) {
#pragma unroll
    for (int i = 0; i < N; ++i) s[i] = score(s[i], at, i);
  }
}
// Computes the scores, and the slopes, by which dS has to be multiplied.
template <class Score, class At, int N>
STROBE_DEVICE void logits(float (&s)[N], float (&slope)[N], const Score& score, const At& at) {
  if constexpr (!Score::kIdentity) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float x = s[i];
      s[i] = score(x, at, i);
      slope[i] = score.slope(x, s[i], at, i);
    }
  }
}
// dS of q.k, given that of the logit. Where a pair is hidden that is 0, and it stays so.
template <class Score> STROBE_DEVICE float times_slope(float ds, float slope) {
  return Score::kSteep && ds == 0.f ? 0.f : ds * slope;
}

// A score in a block where its condition hides nothing.
template <class Score> struct Inside {
  static constexpr bool kIdentity = false, kHasTanh = false;
  Score score;
  template <class At> STROBE_DEVICE float operator()(float x, const At& at, int i) const {
    return score.inside(x, at, i);
  }
  template <class At> STROBE_DEVICE float slope(float x, float y, const At& at, int i) const {
    return score.inside_slope(x, y, at, i);
  }
  template <class F> STROBE_DEVICE void each_tensor_to_prefetch(F f) const { score.each_tensor_to_prefetch(f); }
  template <class Sums, class At>
  STROBE_DEVICE void add_gradients(Sums& sums, float x, float ds, const At& at, int i) const {
    score.add_gradients(sums, x, ds, at, i);
  }
  template <class Sums, class At> STROBE_DEVICE void finish_gradients(const Sums& sums, const At& at) const {
    score.finish_gradients(sums, at);
  }
};

template <class Config, class Score> STROBE_DEVICE auto inside(const Score& score) {
  if constexpr (Config::kSparse) return Inside<Score>{score};
  else return score;
}

// ---- tensors that a score reads, entry by entry ---------------------------------------------------------------------

template <class T> STROBE_DEVICE auto load_entry(const void* tensor, i64 index, bool valid) {
  if constexpr (__is_class(T))  // bf16, fp16
    return to_float<T>(ld_constant(&(static_cast<const T*>(tensor) + index)->bits, valid));
  else if constexpr (sizeof(T) == 8 && T(0.5) != T(0))
    return float(ld_constant(static_cast<const T*>(tensor) + index, valid));
  else return ld_constant(static_cast<const T*>(tensor) + index, valid);
}
// Strides are by sequence, head, query and key. Beyond the sequence an entry is 0.
template <class At> STROBE_DEVICE i64 row_of_pairs(const i64* strides, const At& at, int i) {
  return at.batch * strides[0] + at.head(i) * strides[1] + at.q(i) * strides[2];
}
template <class T, bool kUnit, class At>  // kUnit: keys are neighbours
STROBE_DEVICE auto entry_of_pair(const void* tensor, const i64* strides, const At& at, int i) {
  return load_entry<T>(tensor, row_of_pairs(strides, at, i) + at.k(i) * (kUnit ? 1 : strides[3]), at.inside(i));
}

// Entries of the block of keys, or of queries, that comes next, on their way to the L2: a thread that waits for memory
// keeps its warp waiting. `at` is the thread's place in this block, `row` and `column` are the first place of a run.
template <bool kTransposed, int kPackGqa> STROBE_DEVICE void prefetch_run(const void* tensor, const i64* strides,
                                                                          int size, Where<kTransposed, kPackGqa> at,
                                                                          int row, int column, int keys) {
  at.row = row, at.column = column;
  if (row < 0 || column < 0 || !at.inside(0)) return;
  const char* const from = static_cast<const char*>(tensor) + (row_of_pairs(strides, at, 0) + at.k(0)) * size;
  const int bytes = min(keys, at.len_k - at.k(0)) * size / 16 * 16;
  if (reinterpret_cast<u64>(from) % 16 == 0 && bytes > 0) bulk_prefetch(from, bytes);
}
template <int kBlockN, class Score, int kPackGqa>  // a run for each of the 16 queries of a warp
STROBE_DEVICE void prefetch_keys(const Score& score, const Where<false, kPackGqa>& at) {
  const int lane = thread_idx() % 32, row = at.row - lane / 4 + lane, column = at.column - 2 * (lane % 4) - kBlockN;
  score.each_tensor_to_prefetch([&](const void* tensor, const i64* strides, int size) {
    if (lane < 16) prefetch_run(tensor, strides, size, at, row, column, kBlockN);
  });
}
template <int kBlockM, class Score, int kPackGqa>  // of 64 keys of a warpgroup, for each query
STROBE_DEVICE void prefetch_queries(const Score& score, const Where<true, kPackGqa>& at) {
  const int tid = thread_idx() % 128, row = at.row - tid / 32 * 16 - tid % 32 / 4,
            column = at.column - 2 * (tid % 4) + kBlockM + tid;
  score.each_tensor_to_prefetch([&](const void* tensor, const i64* strides, int size) {
    if (tid < kBlockM) prefetch_run(tensor, strides, size, at, row, column, 64);
  });
}
template <int kBlock, class Score> STROBE_DEVICE void prefetch_keys(const Score&, Nowhere) {}
template <int kBlock, class Score> STROBE_DEVICE void prefetch_queries(const Score&, Nowhere) {}

// A finite bias below kLeastBias hides a key, as -inf does, unless it stands at all keys of a row: those count alike,
// as rounding makes them in s + bias. The row's LSE must still hold log(n) beside it, for P = exp(s - LSE).
constexpr float kLeastBias = -65536.f;
STROBE_DEVICE float biased(float s, float bias) {
  return bias < kLeastBias && bias > neg_inf() ? kLeastBias : s + bias;
}
// Entries that a function hides stay hidden, even beside a bias of NaN.
STROBE_DEVICE float biased_if_seen(float s, float bias) { return s == neg_inf() ? s : biased(s, bias); }

// The gradient of a bias is dS. Where pairs share an entry it is summed up in fp32.
struct NoBiasGradient {
  static constexpr bool kWanted = false, kByTile = false;
};
struct SummedBiasGradient {
  static constexpr bool kWanted = true, kByTile = false;
  STROBE_DEVICE static void put(void* tensor, i64 index, float x) {
    atomic_add(static_cast<float*>(tensor) + index, x);
  }
};
template <class T> struct BiasGradientOf {
  static constexpr bool kWanted = true, kByTile = sizeof(T) != 4;  // pair_tile.cuh
  STROBE_DEVICE static void put(void* tensor, i64 index, float x) {
    if constexpr (sizeof(T) == 4) st_global(static_cast<float*>(tensor) + index, x);
    else st_global(&(static_cast<T*>(tensor) + index)->bits, u16(pack2<T>(x, 0.f)));
  }
};
template <class Config, class Params, class At>
STROBE_DEVICE void put_bias_gradient(const Params& p, const At& at, int i, float ds) {
  if constexpr (Config::BiasGradient::kWanted) {
    const i64 index = row_of_pairs(p.dbias_strides, at, i) + at.k(i) * p.dbias_strides[3];
    if (at.inside(i)) Config::BiasGradient::put(p.dbias, index, ds);
  }
}

// The gradients of captured tensors are summed up in fp32, too, at the places that the score reads. Hidden pairs add
// nothing.
STROBE_DEVICE void add_unless_zero(float* to, float x) {
  if (x != 0.f) atomic_add(to, x);
}
// Adds what all lanes of a warp have for one place.
STROBE_DEVICE void add_of_warp(float* to, float x) {
#pragma unroll
  for (int i = 1; i < 32; i *= 2) x += shfl_xor(x, i);
  if (thread_idx() % 32 == 0) add_unless_zero(to, x);
}
// A sum for places that differ between pairs: what goes to the same one without a change is summed up first. Far pairs
// share the last entry of a table, and millions of sums at one address would wait for one another.
struct RunningSum {
  int place = -1;
  float sum = 0.f;

  STROBE_DEVICE void add(float* tensor, int at, float x) {
    if (x != 0.f && at != place) {
      add_unless_zero(tensor + place, sum);
      place = at, sum = 0.f;
    }
    sum += x;
  }
  STROBE_DEVICE void finish(float* tensor) const {
    const int first = int(shfl(u32(place), 0));
    if (any(place != first)) add_unless_zero(tensor + place, sum);
    else add_of_warp(tensor + first, sum);
  }
};
// The sums of a thread for a block of pairs; one spare element, since C++ has no arrays of length 0. Each of its two
// rows has a running sum.
template <class Score> struct CapturedGradients {
  float of_head[Score::kOfHead + 1] = {};
  RunningSum running[Score::kRunning + 1][2];

  template <class S, class At> STROBE_DEVICE void add(const S& score, float x, float ds, const At& at, int i) {
    if constexpr (Score::kLearns) score.add_gradients(*this, x, ds, at, i);
  }
  template <class S, class At> STROBE_DEVICE void finish(const S& score, const At& at) const {
    if constexpr (Score::kLearns) score.finish_gradients(*this, at);
  }
};

// ---- rows are queries -----------------------------------------------------------------------------------------------

// `positions` is called where a score looks at them: to keep them takes registers.
template <class Config, class Score, class Tile, class At, int N>
STROBE_DEVICE void logits_of_queries(float (&s)[N], const Score& score, const Tile& tile, At positions, int row,
                                     int column, bool partial) {
  if constexpr (Score::kPositional) {
    const auto at = where<Score, Config>(tile, positions(), tile.head, row, column);
    prefetch_keys<Config::kBlockN>(score, at);
    if (!Config::kSparse || partial) logits<Config::kInvariant>(s, score, at);
    else logits<Config::kInvariant>(s, inside<Config>(score), at);
  } else logits<Config::kInvariant>(s, score, Nowhere{});
}

// Scores that a mask hides from the queries of the thread's two rows become -inf; `column` is its first key. kOnce: the
// bounds are computed once; else the compiler may do so again for every score, which takes fewer registers.
template <bool kOnce, class Mask, int N>
STROBE_DEVICE void mask_queries(float (&s)[N], const Mask& m, int query, int other, int column) {
  const auto once = [](int x) { return kOnce ? opaque(x) : x; };
  const int lo[2] = {once(m.lo(query) - column), once(m.lo(other) - column)};
  const int hi[2] = {once(m.hi(query) - column), once(m.hi(other) - column)};
  mask_fragment<Mask::kHasLo>(s, lo, hi);
}

// ---- transposed: rows are keys, columns are queries -----------------------------------------------------------------

constexpr u32 kKeyFragmentBytes = 64 * 8;  // of a warpgroup

// A thread's knowledge of its two keys. The queries that see each key are in shared memory: registers are scarce, and
// only blocks on the edge of a mask ask.
template <class Mask, int kBlockM> struct KeyFragment {
  static constexpr bool kHasEnd = Mask::kHasLo || !Mask::kHasHi;  // a key that is not there is hidden by either bound
  int key;     // the thread's first, counted in the sequence; the other is 8 further
  int column;  // its first query of a block
  u32 ranges;

  // `first_key`: of the warpgroup's 64, whose kKeyFragmentBytes lie at `memory`.
  STROBE_DEVICE KeyFragment(const Mask& mask, int first_key, int len_q, int len_k, u32 memory)
      : column(2 * (thread_idx() % 4)) {
    const int row = thread_idx() % 128 / 32 * 16 + thread_idx() % 32 / 4;
    key = first_key + row;
    ranges = memory + 8 * row;
    if (column == 0) {
#pragma unroll 1
      for (int i = 0; i < 2; ++i) {
        const QueryRange r = queries_that_see(mask, key + 8 * i, len_q, len_k);
        st_shared(ranges + 64 * i, u32x2{u32(r.first), u32(r.end)});
      }
    }
    sync_warp();  // a warp reads its own rows
  }

  // No mask (dK consumer).
  STROBE_DEVICE explicit KeyFragment(int first_key)
      : key(first_key + thread_idx() % 128 / 32 * 16 + thread_idx() % 32 / 4), column(2 * (thread_idx() % 4)),
        ranges(0) {}

  // The mask of a fragment with the queries of block m: a key is seen by columns [lo, hi), from the thread's first on.
  struct Bounds {
    int lo[2], hi[2];
    STROBE_DEVICE bool hides(int i) const {
      const int row = fragment_row(i), column = fragment_column(i);
      return (Mask::kHasHi && column < lo[row]) || (kHasEnd && column >= hi[row]);
    }
    template <int N> STROBE_DEVICE void hide(float (&s)[N]) const {
#pragma unroll
      for (int i = 0; i < N; ++i)
        if (hides(i)) s[i] = neg_inf();
    }
  };
  STROBE_DEVICE Bounds bounds(int m) const {
    const int first = m * kBlockM + column;
    Bounds b;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      b.lo[i] = int(ld_shared(ranges + 64 * i)) - first;
      b.hi[i] = int(ld_shared(ranges + 64 * i + 4)) - first;
    }
    return b;
  }

  // Says which of the fragment's entries i to i + 3 dropout keeps: two neighbouring queries, whose row keys lie at
  // `row_keys`, times two keys. (The next four have the same cell: to keep it would take registers that are not there.)
  STROBE_DEVICE void kept(bool (&keep)[4], u32 row_keys, int i, u32 threshold) const {
    float a, b;
    ld_shared_x2(row_keys, a, b);
    const DropoutCell cell = dropout_cell(DropoutRow{as_bits(a), as_bits(b)}, key);
    const u32 halves = key % 2 ? 0x7632 : 0x5410;  // those of the key, of two words
#pragma unroll
    for (int octet = 0; octet < 2; ++octet) {
      const int place = 2 * octet + i / 4 % 2;
      const u32 even = cell.bits(dropout_factor(false, place)), odd = cell.bits(dropout_factor(true, place));
      not_less_f16x2(keep[2 * octet], keep[2 * octet + 1], bytes_of(even, odd, halves), threshold);
    }
  }
};

}  // namespace strobe

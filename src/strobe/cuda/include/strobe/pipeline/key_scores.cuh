// S^T and dP^T of 64 keys and a block of queries become P^T and dS^T, between the products of the backward for Hopper.
//
// A score that adds little to s (Score::kCheapSum) is computed while dP^T is in flight, as masks and exponentials are.
// Others wait for both products: their slopes, or the addresses that they compute, take registers that dP^T has.
#pragma once
#include <strobe/pipeline/pair_tile.cuh>
#include <strobe/pipeline/scores.cuh>
#include <strobe/tile/gemm_sm90.cuh>

namespace strobe {

// Block m of a head's queries. The buffers of statistics that came with Q and with dO, from the thread's first query
// on.
struct QueryRows {
  int head, m;
  bool masked;
  u32 with_q, with_do;
};

// The scores of a consumer. `load_next` begins to load the bias of the next block, once that of this one has been read.
template <class Config, class Mask, class Score, class Params> struct KeyScores {
  using T = typename Config::Element;
  using Offset = typename Config::Offset;
  using Keys = KeyFragment<Mask, Config::kBlockM>;
  using Pairs = PairTile<Config::kBlockM>;             // of a warp
  static constexpr int kScores = Config::kBlockM / 2;  // of a thread
  static constexpr bool kStagesGradient = Score::kStaged && Config::BiasGradient::kByTile;

  const Params& p;
  const KeyTile& tile;
  const Keys& keys;
  Pairs pairs;  // the bias, and then its gradient

  STROBE_DEVICE auto place(int head, int m) const {
    return where<Score, Config, true>(tile, tile.positions, head, keys.key, m * Config::kBlockM + keys.column);
  }
  STROBE_DEVICE void load_bias(int head, int m) const {
    const Score score = Score::template of<Config>(p, tile.batch, 0);
    pairs.load(score.staged_tensor(), score.staged_strides(), place(head, m));
  }

  template <class S, class LoadNext>
  STROBE_DEVICE void logits(const S& score, float (&s)[kScores], const QueryRows& rows, LoadNext load_next) const {
    const auto at = place(rows.head, rows.m);
    if constexpr (Score::kStaged) {
      Staged<typename Score::Staged, decltype(place(0, 0))> here(at);
      pairs.wait();
#pragma unroll
      for (int i = 0; i < kScores; ++i) {
        if (i % 8 == 0) pairs.read(here.entries, i / 8);
        s[i] = score(s[i], here, i);
      }
      sync_warp();
      if (!kStagesGradient) load_next();
    } else {
      prefetch_queries<Config::kBlockM>(score, at);
#pragma unroll
      for (int i = 0; i < kScores; ++i) s[i] = score(s[i], at, i);
    }
  }
  // S^T -> P^T. Statistics are loaded next to their use: all of them at once would take kBlockM / 4 registers.
  template <class S, class LoadNext> STROBE_DEVICE void exponentials(const S& score, float (&s)[kScores],
                                                                     const QueryRows& rows, LoadNext load_next) const {
    if constexpr (!Score::kIdentity) logits(score, s, rows, load_next);
    if (rows.masked) keys.bounds(rows.m).hide(s);
#pragma unroll
    for (int i = 0; i < kScores; i += 4) {
      float l[2];
      ld_shared_x2(Offset::lse + rows.with_q + 8 * i, l[0], l[1]);
#pragma unroll
      for (int j = 0; j < 4; ++j) s[i + j] = exp2_approx(fma(s[i + j], p.scale_log2, -l[j & 1]));
    }
  }
  // P^T and dS^T, rounded. `s` is P^T or, if the score is no cheap sum, S^T: then P^T is computed here.
  template <class S, class LoadNext> STROBE_DEVICE void gradients(const S& score, u32 (&weights)[kScores / 2],
                                                                  u32 (&slopes)[kScores / 2], float (&s)[kScores],
                                                                  float (&dp)[kScores], const QueryRows& rows,
                                                                  LoadNext load_next) const {
    const auto at = place(rows.head, rows.m);
    [[maybe_unused]] u32 of_bias[4];
    typename Keys::Bounds bounds;
    CapturedGradients<Score> captured;
    if (!Score::kCheapSum) {
      if (rows.masked) bounds = keys.bounds(rows.m);
      prefetch_queries<Config::kBlockM>(score, at);
    }
#pragma unroll
    for (int i = 0; i < kScores; i += 4) {
      float d[2], l[2], slope[4] = {1.f, 1.f, 1.f, 1.f}, kept[4], of_product[4] = {};
      ld_shared_x2(Offset::delta + rows.with_do + 8 * i, d[0], d[1]);
      if (!Score::kCheapSum) ld_shared_x2(Offset::lse + rows.with_q + 8 * i, l[0], l[1]);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (!Score::kCheapSum) {
          const float x = s[i + j], y = score(x, at, i + j);
          slope[j] = score.slope(x, y, at, i + j), of_product[j] = x;
          s[i + j] = rows.masked && bounds.hides(i + j) ? 0.f : exp2_approx(fma(y, p.scale_log2, -l[j & 1]));
        }
        kept[j] = s[i + j];
      }
      if (Config::kDropout) {
        bool keep[4];
        keys.kept(keep, Offset::dropout + rows.with_q + 8 * i, i, p.dropout_threshold);
#pragma unroll
        for (int j = 0; j < 4; ++j)
          if (!keep[j]) kept[j] = dp[i + j] = 0.f;
      }
      weights[i / 2] = pack2<T>(kept[0], kept[1]);
      weights[i / 2 + 1] = pack2<T>(kept[2], kept[3]);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        dp[i + j] = s[i + j] * centred<Config::kDropout>(dp[i + j], p.dropout_scale, d[j & 1]);
        if (!kStagesGradient) put_bias_gradient<Config>(p, at, i + j, dp[i + j]);
        captured.add(score, of_product[j], dp[i + j], at, i + j);
      }
      if constexpr (kStagesGradient) {
        of_bias[i / 2 % 4] = pack2<typename Score::Staged>(dp[i], dp[i + 1]);
        of_bias[i / 2 % 4 + 1] = pack2<typename Score::Staged>(dp[i + 2], dp[i + 3]);
        if (i % 8 == 4) pairs.write(of_bias, i / 8);
      }
#pragma unroll
      for (int j = 0; j < 4; ++j)
        if (!Score::kCheapSum) dp[i + j] = times_slope<Score>(dp[i + j], slope[j]);
      slopes[i / 2] = pack2<T>(dp[i], dp[i + 1]);
      slopes[i / 2 + 1] = pack2<T>(dp[i + 2], dp[i + 3]);
    }
    captured.finish(score, at);
    if constexpr (kStagesGradient) {
      pairs.store(p.dbias, p.dbias_strides, at);
      load_next();
    }
  }
  // Both, where dP^T is in flight.
  template <class S, class LoadNext>
  STROBE_DEVICE void weights_and_slopes(const S& score, u32 (&weights)[kScores / 2], u32 (&slopes)[kScores / 2],
                                        float (&s)[kScores], float (&dp)[kScores], const QueryRows& rows,
                                        LoadNext load_next) const {
    if constexpr (Score::kCheapSum) exponentials(score, s, rows, load_next);
    wgmma_wait<0>();
    pin(dp);
    gradients(score, weights, slopes, s, dp, rows, load_next);
  }
};

}  // namespace strobe

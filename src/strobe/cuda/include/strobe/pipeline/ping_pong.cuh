// Ping-pong scheduling: the consumers take turns at issuing products, so that one computes its softmax while the
// products of another run. A consumer waits on its own barrier; the consumer before it arrives there.
#pragma once
#include <strobe/pipeline/barriers.cuh>

namespace strobe {

// All consumers take the same number of turns: one that has nothing to issue yields its turn.
template <bool kEnabled, int kConsumers> struct PingPong {
  static_assert(kConsumers <= kMaxConsumers, "each consumer has a barrier");
  int consumer;

  STROBE_DEVICE void start() const {  // consumer 0 gets the first turn
    if (consumer == kConsumers - 1) pass_turn();
  }
  STROBE_DEVICE void wait_turn() const {
    if (kEnabled) bar_sync(kBarrierTurn + consumer, 256);
  }
  STROBE_DEVICE void pass_turn() const {
    if (kEnabled) bar_arrive(kBarrierTurn + (consumer + 1 == kConsumers ? 0 : consumer + 1), 256);
  }
  STROBE_DEVICE void yield_turn() const {
    wait_turn();
    pass_turn();
  }
};

}  // namespace strobe

// Whether the ranks' program points of one step form a consistent cut: no message sent before one
// rank's point and received after another's, and no collective begun by only some of its members.
// Otherwise the states of the ranks belong to different moments, and a job resumed from them would
// hang or train something else.
//
// Every op adds a term to a counter of its rank, such that the terms of all participants add up to
// 0 (mod 2^64): a send +h(group, from, to), its receive -h; a collective h(group, i) - h(group,
// i+1) on member i of a ring. The sum of all ranks' counters at step s is 0 if the cut is
// consistent, and almost surely not 0 otherwise. The votes of the commit carry it, so no rank needs
// to know the ops of another. (Consistent cuts: Chandy, Lamport: Distributed Snapshots, 1985.)
//
// Threads: any; one relaxed atomic addition per op. Errors: none.
#pragma once

#include <atomic>
#include <cstdint>
#include <string_view>

#include "intercept/base/hash.h"

namespace reft {

// Unknown: a receive from any source does not name its sender. Such a cut is not checked.
constexpr uint64_t kUnknownCut = UINT64_MAX;

class CutCounter {
 public:
  // From the name that all members of a group use.
  static uint64_t groupKey(std::string_view name) {
    uint64_t hash = 0xCBF29CE484222325ull;  // FNV-1a
    for (const char c : name) {
      hash = (hash ^ static_cast<uint8_t>(c)) * 0x100000001B3ull;
    }
    return hash;
  }
  static uint64_t collectiveTerm(uint64_t group, int rank, int size) {
    return size < 2 ? 0 : term(group, rank, -1) - term(group, (rank + 1) % size, -1);
  }
  static uint64_t messageTerm(uint64_t group, int from, int to) { return term(group, from, to); }

  void add(uint64_t term) { sum_.fetch_add(term, std::memory_order_relaxed); }
  void addUnknown() { unknown_.store(true, std::memory_order_relaxed); }

  // For a new set of ranks: forgets all ops so far.
  void restart() {
    sum_.store(0, std::memory_order_relaxed);
    unknown_.store(false, std::memory_order_relaxed);
  }
  uint64_t value() const {
    return unknown_.load(std::memory_order_relaxed) ? kUnknownCut
                                                    : sum_.load(std::memory_order_relaxed);
  }

  // The value of two sets of ranks together.
  static uint64_t combine(uint64_t a, uint64_t b) {
    return a == kUnknownCut || b == kUnknownCut ? kUnknownCut : a + b;
  }
  static bool consistent(uint64_t sum_of_all) {
    return sum_of_all == 0 || sum_of_all == kUnknownCut;
  }

 private:
  static uint64_t term(uint64_t group, int a, int b) {
    return mixed(mixed(group + static_cast<uint64_t>(a) * kGoldenRatio) + static_cast<uint64_t>(b));
  }

  std::atomic<uint64_t> sum_{0};
  std::atomic<bool> unknown_{false};
};

// The counter of this process.
CutCounter& processCut();

}  // namespace reft

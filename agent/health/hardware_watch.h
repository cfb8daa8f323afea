// What this node's hardware counts: decides when reft-health takes a sample, and keeps the first
// one, that of the attempt and the newest one.
//
// A sample is taken when the ranks of an attempt join, when a rank reports an exception or a fault,
// when an investigation begins, and once a minute, or more rarely: never for more than a thousandth
// of the time. The regular ones keep the metrics fresh, fetch Xid errors before the driver forgets
// them, and leave a recent sample if the next one does not come back.
//
// A program that does not answer is killed, and that is evidence. If the driver does not let it
// die, it stays, and the agent goes on.
//
// Threads: the agent's loop only; no call blocks. Errors: none.
#pragma once

#include <cstdint>
#include <vector>

#include "agent/health/hardware_notes.h"
#include "agent/health/health_program.h"
#include "hang_detect/evidence/hardware_note.h"
#include "hang_detect/evidence/hardware_sample.h"
#include "intercept/base/clock.h"

namespace reft::agent {

class HardwareWatch {
 public:
  static constexpr int64_t kEveryNs = 60 * kSecond;
  static constexpr int64_t kMostShare = 1000;  // one in so many seconds
  // reft-health gives up on NVML after 4 s.
  static constexpr int64_t kAnswerNs = 10 * kSecond;
  static constexpr int64_t kFreshNs = kSecond;
  static constexpr int64_t kIdleNs = 30 * kSecond;  // without live ranks, until the program ends

  // `wanted`: REFT_HARDWARE_COUNTERS. Without, nothing is started.
  HardwareWatch(SampleSource& source, bool wanted) : source_(source), wanted_(wanted) {}

  // A rank of this incarnation has joined.
  void joined(uint64_t incarnation, int64_t now_ns);
  // An investigation begins: a sample, unless the newest one is fresh. `again`: although it is;
  // what the investigation is about may have come after that.
  void investigates(bool again, int64_t now_ns);
  // Call every tick of the agent. `live`: a rank of the node lives.
  void tick(bool live, int64_t now_ns);
  // Takes what has come.
  void step(int64_t now_ns);

  // A sample is under way.
  bool sampling() const { return asked_ns_ != 0; }
  bool hasGpus() const { return !history_.newest.gpus.empty(); }
  const std::vector<HardwareNote>& notes() const { return notes_; }  // of node 0
  // The newest sample, with all Xids since the job began; nullptr before the first.
  const HardwareSample* newest() const { return samples_ > 0 ? &history_.newest : nullptr; }

 private:
  void ask(int64_t now_ns);
  void take(HardwareSample sample, int64_t now_ns);
  void failed(int64_t now_ns);
  void conclude();

  SampleSource& source_;
  const bool wanted_;
  HardwareHistory history_;
  std::vector<HardwareNote> notes_;
  uint64_t samples_ = 0;
  uint64_t incarnation_ = 0;
  bool new_attempt_ = false;    // the next sample is the one of the attempt
  bool attempt_later_ = false;  // but not the one under way: that was asked for before
  bool ask_again_ = false;      // when the one under way has come
  bool silent_ = false;         // the last program did not answer
  int64_t asked_ns_ = 0;        // time of the request under way; 0: none
  int ticks_ = 0;               // since then: the agent itself may have stood still
  int64_t sampled_ns_ = 0;      // time of the newest sample, or of the attempt to get one
  int64_t due_ns_ = 0;          // time of the next regular one; 0: none
  int64_t retry_ns_ = 0;        // not before, after a failure
  int64_t idle_since_ns_ = 0;   // 0: some rank lives
};

}  // namespace reft::agent

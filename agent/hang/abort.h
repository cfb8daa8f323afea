// Ends the ranks of an incarnation for REFT_HANG_ACTION=abort: orders them to end, then kills those
// that have not ended in time. AbortPolicy decides whether and when.
//
// Threads: the agent's loop only. Errors: none.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "agent/hang/actions.h"
#include "agent/peers/connection.h"
#include "agent/peers/rank_table.h"

namespace reft::agent {

class Aborter {
 public:
  Aborter(std::string job, RankTable& ranks, Connections& connections)
      : job_(std::move(job)), ranks_(ranks), connections_(connections) {}

  void abort(const action::Abort& abort, int64_t now_ns);
  // Call when a rank has joined. If the other ranks of its incarnation were ordered to end, the new
  // rank is, too.
  void joined(Connection& connection, uint64_t incarnation);
  // Call at each tick: kills the ranks that have not ended in time.
  void tick(int64_t now_ns);

 private:
  void kill();

  std::string job_;
  RankTable& ranks_;
  Connections& connections_;
  int64_t kill_due_ns_ = 0;              // time of the kill; 0: no abort in progress
  std::optional<uint64_t> incarnation_;  // incarnation of the ranks that were ordered to end
};

}  // namespace reft::agent

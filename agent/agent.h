// The agent of one job on one node: its loop, which accepts connections, reads frames, and notices
// the end of ranks. One epoll; nothing blocks. Dispatch knows what messages do.
//
// Threads: run() is the only thread; stop() may be called from a signal handler or another thread.
// Errors:  the constructor throws SystemError. A bad message ends at worst with an error frame and
// the close of that connection. run() returns when the job is over, when no rank came back, or
// after stop().
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <optional>

#include "agent/dispatch.h"
#include "agent/hang/investigation_runner.h"
#include "agent/health/hardware_watch.h"
#include "agent/health/health_program.h"
#include "agent/log_file.h"
#include "agent/options.h"
#include "agent/peers/connection.h"
#include "agent/peers/rank_table.h"
#include "agent/run_place.h"
#include "agent/serve/metrics_http.h"
#include "intercept/base/clock.h"
#include "intercept/base/unique_fd.h"

namespace reft::agent {

class Agent {
 public:
  enum class End { kClean, kAbandoned, kStopped };

  // `place` is taken. It and `options`, which it changes, outlive the agent.
  Agent(const AgentOptions& options, RunPlace& place, const Clock& clock = SteadyClock::instance());
  ~Agent();
  Agent(const Agent&) = delete;
  Agent& operator=(const Agent&) = delete;

  End run();
  void stop();

 private:
  void watch(int fd, uint64_t token, bool write, bool add, bool read = true);
  void watchClaim();
  void watchHealth();
  void handle(uint64_t token, uint32_t events);
  void acceptPeers();
  void admit(UniqueFd socket);
  void makeRoom();
  void serve(Connection& peer, uint32_t events);
  void handleFrames(Connection& peer);
  bool mayAct(const Connection& peer) const;
  void dropSlow(int64_t now_ns);
  void keepPlace();
  void joined(RankState& rank, uint64_t old_connection);
  void ended(RankState& rank);
  void sweep();
  void tick();
  std::optional<End> end();

  const AgentOptions& options_;
  RunPlace& place_;
  LogFile log_file_;
  const Clock& clock_;
  UniqueFd epoll_, timer_, wake_;
  UniqueFd spare_;  // given up to accept and close a connection when there are no descriptors left
  uint64_t next_token_;
  Connections connections_;              // by token
  std::map<uint64_t, int> pidfd_ranks_;  // token → rank
  RankTable ranks_;
  HealthProgram health_program_;
  HardwareWatch hardware_;
  InvestigationRunner investigation_;
  Dispatch dispatch_;
  MetricsHttp metrics_http_;
  int64_t all_bye_since_ns_ = 0;  // 0: some rank has not said bye
  int64_t empty_since_ns_;        // 0: some rank lives
  bool came_ = false;             // some rank has joined
  bool accepting_ = true;         // false: out of descriptors, until the next tick
  bool claim_watched_ = false;    // epoll_ has the claim
  uint64_t health_watched_ = 0;   // number of the health program that epoll_ has
  int tool_frames_left_ = 0;      // until the next tick
  bool more_ = false;             // frames were left for the next pass of the loop
  std::atomic<bool> stopping_{false};
};

}  // namespace reft::agent

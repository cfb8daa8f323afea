// The agent's loop: connections, votes, deaths, hangs. One epoll, nothing blocks.
//
// Threads: run() is the only thread; stop() may be called from a signal handler or another thread.
// Errors:  the constructor throws SystemError. Whatever a peer sends ends at worst in an error
// frame and the close of that
//          peer; run() returns when the job is over, nobody came back, or after stop().
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "agent/hang/abort_policy.h"
#include "agent/hang/hang_watch.h"
#include "agent/hang/native_readers.h"
#include "agent/hang/turn.h"
#include "agent/peers/connection.h"
#include "agent/peers/options.h"
#include "agent/peers/rank_table.h"
#include "agent/serve/status.h"
#include "hang_detect/evidence/evidence.h"
#include "hang_detect/verdict/agreement_watch.h"
#include "intercept/base/clock.h"
#include "snapshot/commit/commit_ledger.h"

namespace reft::agent {

class Agent {
 public:
  static constexpr size_t kMaxCollections = 64;  // of stacks, at a time

  enum class End { kClean, kAbandoned, kStopped };

  // `listener` listens already.
  Agent(Options options, UniqueFd listener, const Clock& clock = SteadyClock::instance());
  ~Agent();
  Agent(const Agent&) = delete;
  Agent& operator=(const Agent&) = delete;

  End run();
  void stop();

 private:
  struct Http {
    UniqueFd socket;
    std::string in, out;
    int64_t deadline_ns = 0;
  };

  void watch(int fd, uint64_t token, bool write, bool add, bool read = true);
  void acceptPeers();
  void acceptHttp();
  void serveHttp(uint64_t token, Http& http);
  void serve(Connection& peer, uint32_t events);
  void handle(Connection& peer, wire::Frame frame);
  void hello(Connection& peer, const wire::Frame& frame);
  void fromRank(Connection& peer, RankState& rank, wire::Frame& frame);
  void fromAnybody(Connection& peer, wire::Frame& frame);
  void refuse(Connection& peer, const std::string& what, const std::string& hint);
  void act(const std::vector<CommitLedger::Action>& actions);
  Connection* connectionOf(const RankState& rank);
  void lost(RankState& rank);
  void sweep();
  void tick();
  enum class Why { kAsked, kConfirm, kCrash, kEarly };
  StackCollection* collectStacks(uint64_t requester, const std::vector<int>& wanted,
                                 Why why = Why::kAsked);
  void askOutside(StackCollection& collection);
  void finishCollections();
  // Other nodes; agent_nodes.cc.
  Connection* carrier();
  void askNodes(StackCollection& collection);
  void tellNodes(NodeRequest kind);
  void evidenceRequested(Connection& peer, const EvidenceRequest& request);
  void gathered(const Connection& peer, Gathered gathered);
  void answerNode(const StackCollection& collection, const HangEvidence& evidence);
  void addNodes(HangEvidence& evidence, const StackCollection& collection);
  void watchNodes(int64_t now);
  bool looking() const;
  void concluded(StackCollection& collection, const Report& report, int64_t now);
  void readNative(Connection& peer, int number);
  void sendNative();
  void reportHang(const Report& report, const StackCollection& collection);
  void noteUsed(int64_t now);
  void compareOps(int64_t now);
  Connection* speaker(const StackCollection& collection);
  void abortRanks(uint64_t incarnation, const std::string& why);
  void killStayers();
  bool debugged();
  void checkAbort(int64_t now);
  void openMetricsPort();

  Options options_;
  const Clock& clock_;
  UniqueFd epoll_, listener_, timer_, wake_, http_listener_, spare_;
  std::map<uint64_t, std::unique_ptr<Connection>> peers_;
  std::map<uint64_t, Http> http_;
  std::map<uint64_t, int> pidfd_ranks_;  // token → rank
  uint64_t next_token_;
  RankTable ranks_;
  CommitLedger ledger_;
  HangWatch hang_watch_;
  AgreementWatch agreement_watch_;
  uint64_t compared_incarnation_ = 0;  // whose ops it has read
  AbortPolicy abort_policy_;
  Turn turn_;
  uint64_t turn_episode_ = 0;
  int64_t hold_due_ns_ = 0;
  std::map<int, Noted> noted_;      // by rank; of the present episode
  std::map<int, int64_t> gone_ns_;  // by rank: when its end was noticed
  // REFT_HANG_ACTION=abort
  int64_t kill_due_ns_ = 0;  // whoever has not ended by then is killed; 0: nobody was told
  std::optional<uint64_t> aborted_incarnation_;  // of the ranks that were told to end
  uint64_t speaker_ = 0;                         // connection that the last report went to
  int64_t death_due_ns_ = 0;                     // a death is to be reported then; 0: none
  uint64_t crash_incarnation_ =
      0;                // whose death has been looked at, and found to be of a disagreement
  std::string untold_;  // why ranks ended, for the terminal of those who are started instead
  uint64_t untold_incarnation_ = 0;  // of the ranks that ended
  std::vector<StackCollection> collections_;
  uint64_t next_collection_ = 1;
  NativeReaders native_readers_;
  AgentCounters counters_;
  int64_t all_bye_since_ns_ = 0;
  int64_t empty_since_ns_;
  bool came_ = false;  // some rank said hello
  std::atomic<bool> stopping_{false};
};

}  // namespace reft::agent

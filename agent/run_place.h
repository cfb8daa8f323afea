// Where ranks and tools find the agent: the directory of its node, the lock and the socket in it,
// and a claim that holds on the whole host.
//
// A run directory can vanish or be replaced under a living agent ($XDG_RUNTIME_DIR at logout, a
// cleaner of /tmp). The agent then recreates it, with the progress that it holds. Until it has,
// the claim keeps another agent of the same job from starting: it is an abstract socket, which no
// file system takes away. Who finds it taken knocks on it, and the agent looks at its place at
// once.
//
// Threads: one at a time. Errors: take() throws SystemError and Unavailable; keep() logs.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "agent/options.h"
#include "agent/unix_address.h"
#include "intercept/base/unique_fd.h"

namespace reft::agent {

class RunPlace {
 public:
  // What take() has found.
  enum class Taken { kOurs, kServed, kSilent };

  // `options.run_dir` changes when the place moves to `options.fallback_run_dir` or back.
  // `ask` decides about a claim that no process answers at.
  explicit RunPlace(AgentOptions& options, Owner (*ask)(const UnixAddress&) = ownerByKernel);

  // Takes the place, unless another agent has it: kServed if that one answers, kSilent if not, with
  // a sentence about it in `other`.
  Taken take(std::string& other);

  int listener() const { return listener_.get(); }
  int claim() const { return claim_.get(); }  // -1: none yet; keep() tries again
  // Number of this agent among those that have taken the place, which grows by one with each.
  uint64_t fence() const { return fence_; }
  // The directory of the node, open.
  int directory() const { return directory_.get(); }

  enum class Kept { kSame, kMoved, kLost };
  // Call each tick, and after a knock: recreates the place if what is there is not this agent's.
  // kMoved: listener() is another one. kLost: ranks cannot find the agent; the next call tries
  // again.
  Kept keep();
  // Accepts and closes what knocks.
  void answerKnocks();
  // A rank has come with the secret secrets/`name` of the run directory. The file goes with the
  // job, unless a rank of another job has used it later: two jobs may derive one name.
  void usesSecret(const std::string& name);
  // Removes what is still this agent's, the lock last. Hang reports stay for people to read, and
  // the log beside them.
  void removeTraces();

 private:
  bool isThere() const;
  bool settle(std::string run_dir, std::string& other);
  bool lock(const std::string& path, std::string& other);
  void listen(const std::string& path);
  bool takeClaim(bool patient, std::string& other);
  bool bindClaim();
  void clear(int at, const std::string& run_dir, uint64_t socket_inode) const;
  std::string path() const { return options_.directory(); }

  AgentOptions& options_;
  const std::string wanted_run_dir_;
  Owner (*const ask_)(const UnixAddress&);
  UniqueFd claim_, directory_, lock_, listener_;
  std::map<std::string, int64_t> secrets_;  // by name: when used last, ns since the epoch
  uint64_t socket_inode_ = 0;
  uint64_t fence_ = 0;
  bool lost_ = false;
};

}  // namespace reft::agent

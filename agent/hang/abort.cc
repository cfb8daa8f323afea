#include "agent/hang/abort.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <csignal>

#include "hang_detect/evidence/process_state.h"
#include "hang_detect/rank/verdict_notice.h"
#include "intercept/base/log.h"
#include "intercept/link/wire.h"

namespace reft::agent {

namespace {

// A rank that has not ended by then is stopped, or its threads do not get to run.
constexpr int64_t kEndNs = 5'000'000'000;

}  // namespace

void Aborter::abort(const action::Abort& abort, int64_t now_ns) {
  const auto text =
      "the ranks end now, so that the launcher restarts them (REFT_HANG_ACTION=abort): " +
      abort.why;
  logWarn("agent", text);
  incarnation_ = abort.incarnation;
  kill_due_ns_ = now_ns + kEndNs;
  for (auto& [number, rank] : ranks_.all()) {
    auto* connection = rank.live() && rank.hello.incarnation == abort.incarnation
                           ? connections_.find(rank.connection)
                           : nullptr;
    if (connection == nullptr) {
      continue;
    }
    if (connection->id() == abort.speaker) {
      connection->send(wire::Type::kVerdict,
                       verdictNoticeJson("reft: job " + job_ + ": " + text + "\n"));
    }
    connection->send(wire::Type::kAbort, "{}");
  }
}

void Aborter::joined(Connection& connection, uint64_t incarnation) {
  if (kill_due_ns_ != 0 && incarnation == incarnation_) {
    connection.send(wire::Type::kAbort, "{}");
  }
}

void Aborter::tick(int64_t now_ns) {
  if (kill_due_ns_ != 0 && now_ns >= kill_due_ns_) {
    kill_due_ns_ = 0;
    kill();
  }
}

void Aborter::kill() {
  for (auto& [number, rank] : ranks_.all()) {
    if (!rank.live() || rank.hello.incarnation != incarnation_) {
      continue;
    }
    const bool traced = tracerOf(RankTable::readablePid(rank)) > 0;
    if (!rank.pidfd || !rank.pid_is_own || traced) {
      logWarn("agent", "rank ", number, " pid ", rank.pid,
              " has not ended after the abort and is left alone: ",
              traced ? "it is traced" : "its process id is not certain");
      continue;
    }
    logWarn("agent", "rank ", number, " pid ", rank.pid,
            " has not ended after the abort and is killed");
    ::syscall(SYS_pidfd_send_signal, rank.pidfd.get(), SIGKILL, nullptr, 0);
  }
}

}  // namespace reft::agent

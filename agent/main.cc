// reft-agent: keeps the vaults of one job on one node. See agent/agent.h.
#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <string>

#include "agent/agent.h"
#include "agent/daemon.h"
#include "agent/options.h"
#include "agent/run_place.h"
#include "agent/serve/status.h"
#include "agent/test_clock.h"
#include "hang_detect/stacks/remote_stack.h"
#include "intercept/base/env.h"
#include "intercept/base/error.h"
#include "intercept/base/log.h"
#include "intercept/link/agent_start.h"
#include "snapshot/vault/mapping.h"

namespace {

reft::agent::Agent* running = nullptr;

void onSignal(int) {
  if (running != nullptr) {
    running->stop();
  }
}

// A vault file that somebody cuts off while it is read costs that vault, not the agent.
void onLostPage(int, siginfo_t* info, void*) {
  if (info->si_code != BUS_ADRERR || !reft::replaceLostPage(info->si_addr)) {
    ::signal(SIGBUS, SIG_DFL);  // the instruction runs again, and ends the process
  }
}

void installSignals() {
  struct sigaction action {};
  action.sa_handler = SIG_IGN;
  for (const int ignored : {SIGPIPE, SIGHUP, SIGINT}) {
    ::sigaction(ignored, &action, nullptr);
  }
  action.sa_handler = onSignal;
  ::sigaction(SIGTERM, &action, nullptr);
  struct sigaction lost {};
  lost.sa_sigaction = onLostPage;
  lost.sa_flags = SA_SIGINFO;
  ::sigaction(SIGBUS, &lost, nullptr);
}

int serve(reft::agent::AgentOptions options, const reft::Clock& clock, reft::UniqueFd& parent) {
  using reft::agent::ready;
  using reft::agent::RunPlace;
  RunPlace place(options);
  std::string other;
  const auto taken = place.take(other);
  if (taken == RunPlace::Taken::kServed) {
    ready(std::move(parent), 0, "already listening " + options.directory() + "/agent.sock");
    return 0;
  }
  if (taken == RunPlace::Taken::kSilent) {
    reft::logError("agent", other, " and does not answer");
    ready(std::move(parent), 1, std::string(reft::kAgentFailed) + other + " and does not answer");
    return 1;
  }
  reft::agent::Agent agent(options, place, clock);
  running = &agent;
  installSignals();
  reft::logInfo("agent", "listening, pid ", ::getpid(), " job ", options.job, " node ",
                options.node);
  ready(std::move(parent), 0, "listening " + options.directory() + "/agent.sock");
  const auto end = agent.run();
  running = nullptr;
  const bool clean = end == reft::agent::Agent::End::kClean;
  reft::logInfo("agent", clean                                      ? "all ranks ended cleanly"
                         : end == reft::agent::Agent::End::kStopped ? "stopped by a signal"
                                                                    : "no rank returned");
  place.removeTraces();
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  reft::agent::CommandLine command;
  try {
    command = reft::agent::CommandLine::parse({argv + 1, argv + argc});
  } catch (const reft::InvalidArgument& error) {
    std::fprintf(stderr, "reft-agent: %s\n%s", error.what(), reft::agent::kUsage);
    return 2;
  }
  if (command.help) {
    std::fputs(reft::agent::kUsage, stdout);
    return 0;
  }
  if (command.version) {
    std::printf("reft-agent %s\n", reft::agent::kAgentVersion);
    return 0;
  }
  if (command.stack_pid != 0) {
    const auto stacks = reft::readRemoteStacks(command.stack_pid);
    std::printf("%s\n", reft::remoteStacksJson(command.stack_pid, stacks).c_str());
    return stacks.error.empty() ? 0 : 1;
  }
  reft::UniqueFd parent;
  try {
    const auto options = reft::agent::AgentOptions::from(reft::Env::parse(), command);
    reft::agent::makeDirectories(options.run_dir, options.job, options.node);
    if (!command.foreground) {
      parent = reft::agent::daemonise(options.directory() + "/agent.log");
    }
    if (std::getenv("REFT_LOG") == nullptr) {
      reft::configureLog("info");
    }
    // It holds the connections of all ranks of the node, and maps their vaults.
    for (const auto what : {RLIMIT_NOFILE, RLIMIT_AS}) {
      rlimit limit{};
      if (::getrlimit(what, &limit) == 0) {
        limit.rlim_cur = limit.rlim_max;
        ::setrlimit(what, &limit);
      }
    }
    if (!command.test_clock.empty()) {
      const reft::agent::TestClock clock(command.test_clock);
      return serve(options, clock, parent);
    }
    return serve(options, reft::SteadyClock::instance(), parent);
  } catch (const std::exception& error) {
    if (parent || command.foreground) {
      reft::logError("agent", error.what());
    }
    reft::agent::ready(std::move(parent), 1,
                       std::string(reft::kAgentFailed) + error.what());  // who started it says it
    return 1;
  }
}

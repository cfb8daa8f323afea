// reft-agent: keeps the vaults of one job on one node. See agent/agent.h.
#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <thread>

#include "agent/agent.h"
#include "agent/daemon.h"
#include "agent/options.h"
#include "agent/serve/status.h"
#include "agent/test_clock.h"
#include "hang_detect/stacks/remote_stack.h"
#include "intercept/base/env.h"
#include "intercept/base/error.h"
#include "intercept/base/log.h"
#include "intercept/link/agent_start.h"

namespace {

reft::agent::Agent* running = nullptr;

void onSignal(int) {
  if (running != nullptr) {
    running->stop();
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
}

// Removes the lock last, so that the next agent starts with nothing of this one. Hang reports stay
// for people to read, and the log beside them; a job without reports leaves nothing.
void removeTraces(const reft::agent::AgentOptions& options) {
  const auto directory = options.directory();
  ::unlink((directory + "/agent.sock").c_str());
  if (::access((directory + "/verdicts").c_str(), F_OK) != 0) {
    ::unlink((directory + "/agent.log").c_str());
  }
  ::unlink((directory + "/agent.lock").c_str());
  ::rmdir(directory.c_str());
  ::rmdir((options.run_dir + "/" + options.job).c_str());
}

// True if an agent answers within a second (one that has just taken the lock needs a moment to
// listen).
bool waitForOther(const std::string& directory) {
  for (int i = 0; i < 100; ++i) {
    if (reft::agent::answers(directory)) {
      return true;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  return false;
}

int serve(const reft::agent::AgentOptions& options, const reft::Clock& clock,
          reft::UniqueFd& parent) {
  using reft::agent::ready;
  const auto directory = options.directory();
  reft::UniqueFd lock;
  for (int i = 0; !lock && i < 5; ++i) {
    reft::agent::makeDirectories(options.run_dir, options.job,
                                 options.node);  // an ending agent may have removed them
    lock = reft::agent::lockDirectory(directory);
    if (!lock && waitForOther(directory)) {
      ready(std::move(parent), 0, "already listening " + directory + "/agent.sock");
      return 0;
    }
  }
  if (!lock) {
    reft::logError("agent", "another process holds ", directory, "/agent.lock and does not answer");
    ready(std::move(parent), 1,
          std::string(reft::kAgentFailed) + "another one holds " + directory +
              " and does not answer");
    return 1;
  }
  reft::agent::Agent agent(options, reft::agent::listenOn(directory), clock);
  running = &agent;
  installSignals();
  reft::logInfo("agent", "listening, pid ", ::getpid(), " job ", options.job, " node ",
                options.node);
  ready(std::move(parent), 0, "listening " + directory + "/agent.sock");
  const auto end = agent.run();
  running = nullptr;
  const bool clean = end == reft::agent::Agent::End::kClean;
  reft::logInfo("agent", clean                                      ? "all ranks ended cleanly"
                         : end == reft::agent::Agent::End::kStopped ? "stopped by a signal"
                                                                    : "no rank returned");
  removeTraces(options);
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
    rlimit files{};
    if (::getrlimit(RLIMIT_NOFILE, &files) == 0) {
      files.rlim_cur = files.rlim_max;
      ::setrlimit(RLIMIT_NOFILE, &files);
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

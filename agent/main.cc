// reft-agent: keeps the vaults of one job on one node. See agent/agent.h.
#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <thread>

#include "agent/agent.h"
#include "agent/daemon.h"
#include "agent/serve/status.h"
#include "hang_detect/stacks/native_stack.h"
#include "hang_detect/stacks/remote_stack.h"
#include "hang_detect/unwind/native_stacks.h"
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

// The lock goes last, so that the next agent starts with nothing of this one. Hang reports stay for
// people to read, and the log beside them; of a job without any, nothing stays, however it ended.
void removeTraces(const reft::agent::Options& options) {
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

int serve(const reft::agent::Options& options, reft::UniqueFd& parent) {
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
  reft::agent::Agent agent(options, reft::agent::listenOn(directory));
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
                                                                    : "nobody came back");
  removeTraces(options);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  reft::agent::Options options;
  try {
    options = reft::agent::parseOptions({argv + 1, argv + argc});
  } catch (const reft::InvalidArgument& error) {
    std::fprintf(stderr, "reft-agent: %s\n%s", error.what(), reft::agent::kUsage);
    return 2;
  }
  if (options.help) {
    std::fputs(reft::agent::kUsage, stdout);
    return 0;
  }
  if (options.version) {
    std::printf("reft-agent %s\n", reft::agent::kAgentVersion);
    return 0;
  }
  if (options.stack_pid != 0 && options.native) {
    const auto stacks = reft::readNativeStacks(options.stack_pid);
    std::printf("%s\n",
                reft::mergedStacksJson(options.stack_pid, stacks.python, stacks.merged).c_str());
    return stacks.python.error.empty() && stacks.merged.error.empty() ? 0 : 1;
  }
  if (options.stack_pid != 0) {
    const auto stacks = reft::readRemoteStacks(options.stack_pid);
    std::printf("%s\n", reft::remoteStacksJson(options.stack_pid, stacks).c_str());
    return stacks.error.empty() ? 0 : 1;
  }
  reft::UniqueFd parent;
  try {
    reft::agent::makeDirectories(options.run_dir, options.job, options.node);
    if (!options.foreground) {
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
    return serve(options, parent);
  } catch (const std::exception& error) {
    if (parent || options.foreground) {
      reft::logError("agent", error.what());
    }
    reft::agent::ready(std::move(parent), 1,
                       std::string(reft::kAgentFailed) + error.what());  // who started it says it
    return 1;
  }
}

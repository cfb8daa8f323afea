// Options of reft-agent. The command line gives what identifies the agent; the REFT_* environment
// of the ranks that start it gives the settings.
//
// Threads: values. Errors: InvalidArgument with the name, its value and what is allowed.
#pragma once

#include <string>
#include <vector>

#include "intercept/base/env.h"

namespace reft::agent {

struct CommandLine {
  std::string run_dir;
  std::string job;
  int node = 0;
  bool foreground = false;  // no fork, log on stderr
  bool help = false;
  bool version = false;
  int stack_pid = 0;       // not 0: print the stacks of that process and end
  std::string test_clock;  // see test_clock.h; for tests only, so kUsage does not list it

  static CommandLine parse(const std::vector<std::string>& arguments);
};

struct AgentOptions {
  std::string run_dir;
  // Where ranks look if the default run directory is gone; "": run_dir is no default one.
  std::string fallback_run_dir;
  bool foreground = false;
  std::string job;
  int node = 0;
  std::string vault_dir;  // "": vaults are anonymous memory
  double linger_sec = 60;
  double hang_suspect_sec = 20;
  bool abort_on_hang = false;
  int crash_loop_limit = 0;  // 0: none
  int metrics_port = 0;      // 0: none
  bool hardware_counters = true;

  static AgentOptions from(const Env& env, const CommandLine& command);
  std::string directory() const;  // <run_dir>/<job>/node-<n>
};

extern const char kUsage[];

}  // namespace reft::agent

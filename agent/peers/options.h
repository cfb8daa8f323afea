// Command line of reft-agent.
//
// Threads: values. Errors: parseOptions throws InvalidArgument.
#pragma once

#include <string>
#include <vector>

namespace reft::agent {

struct Options {
  std::string run_dir;
  std::string job;
  int node = 0;
  std::string vault_dir;
  double linger_sec = 60;
  double hang_suspect_sec = 20;
  bool abort_on_hang = false;
  int metrics_port = 0;
  bool foreground = false;  // no fork, log on stderr
  bool help = false;
  bool version = false;
  int stack_pid = 0;    // not 0: print the stacks of that process and end
  bool native = false;  // with native frames

  std::string directory() const;  // <run_dir>/<job>/node-<n>
};

extern const char kUsage[];

Options parseOptions(const std::vector<std::string>& arguments);

}  // namespace reft::agent

// Starts and ends reft-health (hang_detect/health/main.cc), asks it for samples, and takes its
// lines. The agent itself never calls NVML: a call may not return.
//
// Threads: the agent's loop only; no call blocks. Errors: none; ask() is false if the program
// cannot be started.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "intercept/base/unique_fd.h"

namespace reft::agent {

// What HardwareWatch needs of a program; tests have one of their own.
class SampleSource {
 public:
  virtual ~SampleSource() = default;
  // Asks for a sample; starts the program if none runs. False: that is not possible now.
  virtual bool ask() = 0;
  // The next line that has come, without its end.
  virtual std::optional<std::string> line() = 0;
  virtual bool running() = 0;
  virtual void kill() = 0;
};

class HealthProgram final : public SampleSource {
 public:
  // `path`: by default reft-health in the folder of this program; with these arguments.
  explicit HealthProgram(std::string path = besideThisProgram(),
                         std::vector<std::string> arguments = {});
  ~HealthProgram() override;
  HealthProgram(const HealthProgram&) = delete;
  HealthProgram& operator=(const HealthProgram&) = delete;

  bool ask() override;
  std::optional<std::string> line() override;
  bool running() override { return static_cast<bool>(socket_); }
  void kill() override;

  // Readable when line() has something to do; -1: no program runs. `starts()` counts the programs,
  // whose descriptors may have the same number.
  int fd() const { return socket_.get(); }
  uint64_t starts() const { return starts_; }

  static std::string besideThisProgram();

 private:
  bool start();
  void reap();

  std::string path_;
  std::vector<std::string> arguments_;
  UniqueFd socket_;  // its standard input and output
  pid_t child_ = 0;
  std::vector<pid_t>
      ended_;         // killed, and not reaped yet: one in a system call of the driver stays
  std::string text_;  // the begin of a line
  uint64_t starts_ = 0;
  bool reported_ = false;  // the log has why it cannot be started
};

}  // namespace reft::agent

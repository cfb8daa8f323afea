// reft-health: prints what the hardware of this machine counts, one line of JSON for each line on
// its standard input (hang_detect/evidence/hardware_sample.h).
//
// A program apart from reft-agent, which starts it, because what it calls may never return: NVML
// waits in the driver for a GPU that has fallen off the bus, and so may a file of a network card
// that has failed. The agent kills it then. It needs no privilege, has a low priority, and ends
// with its input or its parent.
//
// NVML stays initialized in between: that takes seconds where no process uses the GPUs, and only a
// process that waits for Xid errors gets them.
#include <sys/prctl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <string>
#include <string_view>

#include "hang_detect/evidence/hardware_sample.h"
#include "hang_detect/health/gpu_thread.h"
#include "hang_detect/health/kernel_log.h"
#include "hang_detect/health/network_reader.h"

namespace {

struct Options {
  bool once = false;
  // For tests, so the usage does not list them.
  std::string sys = "/sys";
  std::string kernel_log = "/dev/kmsg";
  reft::GpuThread::Limits limits;
};

bool parse(int argc, char** argv, Options& options) {
  for (int i = 1; i < argc; ++i) {
    const std::string_view name = argv[i];
    if (name == "--once") {
      options.once = true;
      continue;
    }
    if (i + 1 == argc) {
      return false;
    }
    const std::string_view value = argv[++i];
    if (name == "--test-sys") {
      options.sys = value;
    } else if (name == "--test-kernel-log") {
      options.kernel_log = value;
    } else if (name == "--test-nvml-ms") {
      int milliseconds = 0;
      const auto end = std::from_chars(value.data(), value.data() + value.size(), milliseconds);
      if (end.ec != std::errc() || end.ptr != value.data() + value.size() || milliseconds < 0) {
        return false;
      }
      options.limits.answer = options.limits.begin = std::chrono::milliseconds(milliseconds);
    } else {
      return false;
    }
  }
  return true;
}

// Waits for a line on standard input. False at its end.
bool nextRequest() {
  char text[4096];
  for (;;) {
    const ssize_t got = ::read(STDIN_FILENO, text, sizeof(text));
    if (got < 0 && errno == EINTR) {
      continue;
    }
    if (got <= 0) {
      return false;
    }
    if (std::memchr(text, '\n', static_cast<size_t>(got)) != nullptr) {
      return true;  // several lines are one request
    }
  }
}

bool print(const std::string& line) {
  for (size_t done = 0; done < line.size();) {
    const ssize_t wrote = ::write(STDOUT_FILENO, line.data() + done, line.size() - done);
    if (wrote < 0 && errno != EINTR) {
      return false;
    }
    done += wrote > 0 ? static_cast<size_t>(wrote) : 0;
  }
  return true;
}

void beHarmless() {
  // Not the lowest: on a node without an idle processor, a sample would come too late for a
  // verdict.
  constexpr int kNice = 10;
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  ::setpriority(PRIO_PROCESS, 0, kNice);
  const rlimit none{0, 0};
  ::setrlimit(RLIMIT_CORE, &none);
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  if (!parse(argc, argv, options)) {
    std::fputs(
        "usage: reft-health [--once]\n"
        "Prints what the hardware of this machine counts, for each line of input.\n",
        stderr);
    return 2;
  }
  beHarmless();
  reft::KernelLog kernel_log(options.kernel_log);
  reft::GpuThread gpus(reft::NvmlApi::from(reft::openNvml()), options.limits);
  while (options.once || nextRequest()) {
    const auto begun = std::chrono::steady_clock::now();
    reft::HardwareSample sample;
    sample.network = reft::readNetwork(options.sys);
    gpus.sample(sample);
    sample.kernel_log = kernel_log.readable();
    kernel_log.read(sample.xids);
    sample.took_sec =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - begun).count();
    if (!print(reft::hardwareSampleJson(sample) + "\n") || options.once) {
      break;
    }
  }
  ::_exit(0);  // a call into NVML may still be under way
}

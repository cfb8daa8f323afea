// reft-unwind: prints the native and Python frames of every thread of a process as JSON.
//
// A program apart from reft-agent, which starts it, for three reasons. It stops the threads of other
// processes, and parses what lies in their memory: a crash of it costs no vault. Only it links
// libunwind, whose archive in Debian is no position-independent code (R_X86_64_32), which a PIE
// cannot hold: so this program may be at a fixed address, and the agent, which lives for days and
// listens, is not.
//
// Exit code 1: Python or native frames cannot be read; the JSON says why.
#include <charconv>
#include <cstdint>
#include <cstdio>
#include <cstring>

#include "hang_detect/stacks/native_stack.h"
#include "hang_detect/unwind/native_stacks.h"

int main(int argc, char** argv) {
  int pid = 0;
  if (argc == 2) {
    const char* const end = argv[1] + std::strlen(argv[1]);
    const auto parsed = std::from_chars(argv[1], end, pid);
    pid = parsed.ec == std::errc() && parsed.ptr == end ? pid : 0;
  }
  if (pid <= 0) {
    std::fputs("usage: reft-unwind PID\n", stderr);
    return 2;
  }
  const auto stacks = reft::readNativeStacks(pid);
  std::printf("%s\n", reft::mergedStacksJson(pid, stacks.python, stacks.merged).c_str());
  return stacks.python.error.empty() && stacks.merged.error.empty() ? 0 : 1;
}

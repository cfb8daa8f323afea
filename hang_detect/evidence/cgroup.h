// The control groups that a process belongs to.
//
// Threads: re-entrant. Errors: none; what cannot be read is not there. May throw std::bad_alloc.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace reft {

struct Cgroup {
  bool is_first;  // version 1
  // From the process's own group up to the mount's root. In a container, the kernel may name the
  // host's path while the mount begins at the container's own group: then only the last one exists.
  std::vector<std::string> folders;
};

// The groups of `process` (a number, or "self") that may limit `controller`; that of version 1
// first: where it has a controller, version 2 lacks it. `root`: root of the file system, for tests.
std::vector<Cgroup> cgroupsOf(std::string_view process, std::string_view controller,
                              const std::string& root = "");

}  // namespace reft

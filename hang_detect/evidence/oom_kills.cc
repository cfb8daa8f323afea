#include "hang_detect/evidence/oom_kills.h"

#include <fstream>
#include <sstream>

#include "hang_detect/evidence/cgroup.h"

namespace reft {

std::string oomCounterOf(int pid, const std::string& root) noexcept {
  try {
    for (const Cgroup& group : cgroupsOf(std::to_string(pid), "memory", root)) {
      const std::string file = group.is_first ? "/memory.oom_control" : "/memory.events";
      for (const std::string& folder : {group.folders.front(), group.folders.back()}) {
        if (oomKills(folder + file) >= 0) {
          return folder + file;
        }
      }
    }
  } catch (...) {  // NOLINT(bugprone-empty-catch): no memory left; unknown
  }
  return "";
}

int64_t oomKills(const std::string& counter) noexcept {
  try {
    std::ifstream file(counter);
    for (std::string line; std::getline(file, line);) {
      std::istringstream words(line);
      std::string name;
      int64_t count = -1;
      if (words >> name >> count && name == "oom_kill") {
        return count;
      }
    }
  } catch (...) {  // NOLINT(bugprone-empty-catch): no memory left; unknown
  }
  return -1;
}

}  // namespace reft

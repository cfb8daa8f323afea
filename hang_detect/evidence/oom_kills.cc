#include "hang_detect/evidence/oom_kills.h"

#include <fstream>
#include <sstream>

namespace reft {

std::string oomCounterOf(int pid, const std::string& root) noexcept {
  try {
    std::ifstream list(root + "/proc/" + std::to_string(pid) + "/cgroup");
    std::string counter;
    for (std::string line; std::getline(list, line);) {
      // number:controllers:path; v2 has no controllers, and v1 wins where it has the memory.
      const size_t first = line.find(':'), second = line.find(':', first + 1);
      if (first == std::string::npos || second == std::string::npos) {
        continue;
      }
      const std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",";
      const bool v1 = controllers.find(",memory,") != std::string::npos;
      if (!v1 && (controllers != ",," || !counter.empty())) {
        continue;
      }
      const std::string mount = root + (v1 ? "/sys/fs/cgroup/memory" : "/sys/fs/cgroup");
      const std::string file = v1 ? "/memory.oom_control" : "/memory.events";
      // In a container, the path may be the host's and the mount the container's own cgroup.
      for (const std::string& path : {mount + line.substr(second + 1) + file, mount + file}) {
        if (oomKills(path) >= 0) {
          counter = path;
          break;
        }
      }
    }
    return counter;
  } catch (...) {  // no memory left
    return "";
  }
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

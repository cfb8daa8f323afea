#include "hang_detect/evidence/cgroup.h"

#include <fstream>

namespace reft {

namespace {

std::vector<std::string> upwards(const std::string& mount, std::string path) {
  std::vector<std::string> folders;
  while (!path.empty()) {
    if (path.back() == '/') {
      path.pop_back();
      continue;
    }
    folders.push_back(mount + path);
    path.resize(path.find_last_of('/') + 1);
  }
  folders.push_back(mount);
  return folders;
}

}  // namespace

std::vector<Cgroup> cgroupsOf(std::string_view process, std::string_view controller,
                              const std::string& root) {
  std::ifstream list(root + "/proc/" + std::string(process) + "/cgroup");
  const std::string mounts = root + "/sys/fs/cgroup", name(controller);
  std::vector<Cgroup> found;
  for (std::string line; std::getline(list, line);) {
    // number:controllers:path; version 2 has no controllers.
    const size_t first = line.find(':'), second = line.find(":/", first + 1);
    if (first == std::string::npos || second == std::string::npos) {
      continue;
    }
    const std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",";
    const std::string path = line.substr(second + 1);
    if (controllers == ",,") {
      found.push_back({false, upwards(mounts, path)});
    } else if (controllers.find("," + name + ",") != std::string::npos) {
      found.insert(found.begin(), {true, upwards(mounts + "/" + name, path)});
    }
  }
  return found;
}

}  // namespace reft

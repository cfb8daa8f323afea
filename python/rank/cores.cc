#include "python/rank/cores.h"

#include <sched.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <thread>

namespace reft {

namespace {

// A thread hashes some 7 GB/s; a device copies several times that. Four keep up with one device of
// a node of eight, and a quarter of the cores is what training leaves idle on such nodes.
constexpr double kMostThreads = 4;
constexpr double kCoresToAThread = 4;

double coresOfAffinity() {
  cpu_set_t allowed;
  if (::sched_getaffinity(0, sizeof(allowed), &allowed) != 0) {  // more than 1,024 processors
    return std::max(std::thread::hardware_concurrency(), 1u);
  }
  return std::max(CPU_COUNT(&allowed), 1);
}

// The group of this process below the mount; "": unknown, or version 1.
std::string groupOf(const std::string& self) {
  std::ifstream file(self);
  for (std::string line; std::getline(file, line);) {
    if (line.rfind("0::/", 0) == 0) {
      return line.substr(3);
    }
  }
  return "";
}

}  // namespace

double coresOfQuota(const std::string& root, const std::string& self) {
  double cores = HUGE_VAL;
  for (std::string group = groupOf(self); !group.empty();) {
    std::ifstream file(root + group + "/cpu.max");  // "max 100000" or "150000 100000"
    double quota = 0, period = 0;
    if (file >> quota >> period && quota > 0 && period > 0) {
      cores = std::min(cores, quota / period);
    }
    group.resize(group.find_last_of('/'));
  }
  return cores;
}

uint32_t threadsForDevices(int world, int nodes, double quota) {
  const double ranks_here = std::max(world / std::max(nodes, 1), 1);
  const double node = std::max(std::thread::hardware_concurrency(), 1u);
  // A launcher binds each rank for itself; a container's quota is that of all of them.
  const double share = std::min({node / ranks_here, coresOfAffinity(), quota / ranks_here});
  return static_cast<uint32_t>(std::clamp(share / kCoresToAThread, 1.0, kMostThreads));
}

}  // namespace reft

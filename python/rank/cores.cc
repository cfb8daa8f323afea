#include "python/rank/cores.h"

#include <sched.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <thread>

#include "hang_detect/evidence/cgroup.h"

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

// Of one group; infinite without a quota.
double quotaOf(const std::string& folder, bool is_first) {
  double quota = 0, period = 0;
  if (is_first) {
    std::ifstream(folder + "/cpu.cfs_quota_us") >> quota;  // -1: none
    std::ifstream(folder + "/cpu.cfs_period_us") >> period;
  } else {
    std::ifstream(folder + "/cpu.max") >> quota >> period;  // "max 100000" or "150000 100000"
  }
  return quota > 0 && period > 0 ? quota / period : HUGE_VAL;
}

}  // namespace

double coresOfQuota(const std::string& root) {
  double cores = HUGE_VAL;
  for (const Cgroup& group : cgroupsOf("self", "cpu", root)) {
    for (const std::string& folder : group.folders) {
      cores = std::min(cores, quotaOf(folder, group.is_first));
    }
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

// How many threads a rank may use for work during training.
//
// Threads: any. Errors: none; a limit that cannot be read is none.
#pragma once

#include <cstdint>
#include <string>

namespace reft {

// Cores that the quotas of this process's cgroups and of all groups above them leave; infinite
// without quotas. `root`: root of the file system, for tests.
double coresOfQuota(const std::string& root = "");

// Copy threads for state on devices: a quarter of the rank's share of the node's cores, 1 to 4.
uint32_t threadsForDevices(int world, int nodes, double quota = coresOfQuota());

}  // namespace reft

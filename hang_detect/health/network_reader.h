// Error counters of the network devices of this machine, from /sys: Ethernet devices (class/net)
// and the ports of InfiniBand and RoCE cards (class/infiniband). Needs no privilege.
//
// Threads: free functions, re-entrant. Errors: none; what is not there is left out.
#pragma once

#include <string>
#include <vector>

#include "hang_detect/evidence/hardware_sample.h"

namespace reft {

// `sys`: the root of the file system, "/sys". Of the devices in class/net only those that stand for
// hardware; if none does, as in a container, all but the loopback.
std::vector<NetworkSample> readNetwork(const std::string& sys);

}  // namespace reft

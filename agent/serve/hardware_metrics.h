// The hardware counters of a node as Prometheus text: those that exist.
//
//   reft_agent_gpu_…{job,node,gpu="GPU-<uuid>"}, reft_agent_gpu_xid_errors_total{…,gpu,xid},
//   reft_agent_nic_…{job,node,device="eth0"}, reft_agent_port_…{job,node,device="mlx5_0 port 1"}
//
// Threads: free function, re-entrant. Errors: none.
#pragma once

#include <string>

#include "hang_detect/evidence/hardware_sample.h"

namespace reft::agent {

// `labels`: of every series, "job=\"…\",node=\"0\"".
std::string hardwareMetrics(const HardwareSample& sample, const std::string& labels);

}  // namespace reft::agent

// Keeps copy threads on the NUMA node that training runs on.
//
// The thread that trains is the first to touch its tensors and the vault's slots, so the kernel
// puts both on the node where that thread runs. A copy thread on another node would move every byte
// twice over the link between the sockets. So it follows: to any CPU of the node that the last two
// captures agree on, but never to one that it was not allowed when it began (taskset, Slurm's
// binding, cgroups keep their word). Which of these CPUs is idle the kernel knows best. On a
// machine with one node nothing is ever changed.
//
// Threads: currentNode() any; an object belongs to the thread that made it. Errors: none; what
// cannot be read or set changes nothing.
#pragma once

#include <sched.h>

#include <optional>
#include <string>
#include <string_view>

namespace reft {

// The kernel's way to write a set of CPUs or nodes, "0-3,8,10-11"; nullopt: it is none, or has a
// number past CPU_SETSIZE.
std::optional<cpu_set_t> parseCpuList(std::string_view text);

class NodeAffinity {
 public:
  // `nodes`: a folder with `online` and node<N>/cpulist in it.
  explicit NodeAffinity(std::string nodes = "/sys/devices/system/node");

  // Of the CPU that the calling thread runs on just now; -1: unknown. No system call.
  static int currentNode() noexcept;

  // Where training was at the newest capture.
  void follow(int node) noexcept;

 private:
  std::string nodes_;
  bool several_ = false;  // nodes
  cpu_set_t allowed_{};   // at first
  int seen_ = -1;
  int followed_ = -1;
};

}  // namespace reft

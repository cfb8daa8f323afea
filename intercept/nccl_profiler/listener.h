// Takes the events of NCCL's profiler ABI and enters them into a progress table.
//
// Note [events that are asked for]
// Coll, P2p, ProxyOp and ProxyStep cost nothing where the proxy thread has no work, and a few calls
// a transfer where it has. KernelCh is asked for on request only. With it, NCCL adds a proxy op for
// each channel of each collective, also between GPUs of one node: the proxy thread then spins for
// as long as any collective runs, every launch posts those ops, a captured graph gets a host node
// for them, and the kernels write time stamps to host memory. In exchange it shows whether the
// kernel began, and it is the only progress inside one node. ProxyCtrl is left out: NCCL reports
// only changes between busy and idle, so it does not show that a proxy thread still runs; the
// thread's id helps more (NcclComm::proxy_thread). NCCL starts GroupApi, CollApi, P2pApi and Group
// events unasked; they get no handle, so that NCCL makes no further calls for them.
//
// Threads: any thread may call anything at any time. Errors: none; see progress_table.h.
#pragma once

#include <atomic>
#include <cstdint>

#include "intercept/nccl_profiler/abi.h"
#include "intercept/nccl_profiler/progress_table.h"

namespace reft {

class NcclListener {
 public:
  using Now = int64_t (*)();  // CLOCK_MONOTONIC in nanoseconds

  // `pid`: this process. It takes part in the handles, and tells the ops that the proxy thread
  // serves for another process. `kernels`: also ask for KernelCh.
  NcclListener(int pid, bool kernels, Now now);

  // As the functions of nccl_abi::ProfilerV5, but with the event's type apart: its width differs
  // between versions. Any pointer may be nullptr.
  void init(void** context, uint64_t hash, int* mask, const char* name, int nodes, int ranks,
            int rank) noexcept;
  void start(void* context, void** handle, const nccl_abi::EventV5* event, uint64_t type) noexcept;
  void stop(void* handle) noexcept;
  void record(void* handle, int state, const nccl_abi::StateArgs* args) noexcept;
  void finalize(void* context) noexcept;

  int pid() const { return pid_; }
  const NcclProgressTable& table() const { return table_; }

 private:
  uint64_t startTask(void* context, const nccl_abi::EventV5& event, bool p2p) noexcept;
  uint64_t startOp(void* context, const nccl_abi::EventV5& event) noexcept;

  const int pid_;
  const bool kernels_;
  const Now now_;
  NcclProgressTable table_;
  // NCCL's activation mask: one variable of libnccl, which all communicators share.
  std::atomic<int*> mask_{nullptr};
};

}  // namespace reft

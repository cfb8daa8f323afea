// What the profiler plugin costs NCCL's threads, a pair of events each: called through the table of
// functions that NCCL gets, with the clock that it uses.
//
//   nccl_benchmark --benchmark_repetitions=5 --benchmark_report_aggregates_only=true
#include <benchmark/benchmark.h>
#include <unistd.h>

#include <cstdlib>

#include "intercept/nccl_profiler/abi.h"
#include "intercept/nccl_profiler/plugin.h"

extern "C" const reft::nccl_abi::ProfilerV5 ncclProfiler_v5;

namespace reft {
namespace {

using nccl_abi::EventV5;
using nccl_abi::StateArgs;

struct Nccl {
  Nccl() {
    ::unsetenv("NCCL_PROFILER_PLUGIN");
    if (armNcclProfiler(true) != NcclArming::kArmed) {
      std::abort();
    }
    int mask = 0;
    plugin.init(&comm, 1, &mask, "bench", 2, 16, 0, nullptr);
    EventV5 event{};
    event.type = nccl_abi::kColl;
    event.coll.func = "AllReduce";
    plugin.start(comm, &task, &event);
    op = startOp();
  }
  ~Nccl() { plugin.finalize(comm); }

  void* startOp() const {
    EventV5 event{};
    event.type = nccl_abi::kProxyOp;
    event.parent = task;
    event.proxy_op.pid = ::getpid();
    event.proxy_op.peer = 1;
    event.proxy_op.steps = 8;
    void* handle = nullptr;
    plugin.start(comm, &handle, &event);
    return handle;
  }

  const nccl_abi::ProfilerV5& plugin = ncclProfiler_v5;
  void* comm = nullptr;
  void* task = nullptr;
  void* op = nullptr;
};

void collective(benchmark::State& state) {
  Nccl nccl;
  EventV5 event{};
  event.type = nccl_abi::kColl;
  event.coll.func = "AllReduce";
  event.coll.dtype = "ncclBfloat16";
  event.coll.algo = "RING";
  event.coll.proto = "SIMPLE";
  for (auto _ : state) {
    void* handle = nullptr;
    nccl.plugin.start(nccl.comm, &handle, &event);
    nccl.plugin.stop(handle);
  }
}
BENCHMARK(collective);

void proxyOp(benchmark::State& state) {
  Nccl nccl;
  EventV5 event{};
  event.type = nccl_abi::kProxyOp;
  event.parent = nccl.task;
  event.proxy_op.pid = ::getpid();
  for (auto _ : state) {
    void* handle = nullptr;
    nccl.plugin.start(nccl.comm, &handle, &event);
    nccl.plugin.stop(handle);
  }
}
BENCHMARK(proxyOp);

void proxyStep(benchmark::State& state) {
  Nccl nccl;
  EventV5 event{};
  event.type = nccl_abi::kProxyStep;
  event.parent = nccl.op;
  for (auto _ : state) {
    void* handle = nullptr;
    nccl.plugin.start(nccl.comm, &handle, &event);
    nccl.plugin.stop(handle);
    event.proxy_step.step = (event.proxy_step.step + 1) & 0xffff;
  }
}
BENCHMARK(proxyStep);

// All that one transfer of a send causes.
void sendStep(benchmark::State& state) {
  Nccl nccl;
  EventV5 event{};
  event.type = nccl_abi::kProxyStep;
  event.parent = nccl.op;
  StateArgs args{};
  for (auto _ : state) {
    void* handle = nullptr;
    nccl.plugin.start(nccl.comm, &handle, &event);
    nccl.plugin.record(handle, nccl_abi::kStepSendGpuWait, &args);
    nccl.plugin.record(handle, nccl_abi::kStepSendPeerWait, &args);
    nccl.plugin.record(handle, nccl_abi::kStepSendWait, &args);
    nccl.plugin.stop(handle);
    event.proxy_step.step = (event.proxy_step.step + 1) & 0xffff;
  }
}
BENCHMARK(sendStep);

// A state that NCCL repeats at each poll.
void repeatedState(benchmark::State& state) {
  Nccl nccl;
  EventV5 event{};
  event.type = nccl_abi::kProxyStep;
  event.parent = nccl.op;
  StateArgs args{};
  void* handle = nullptr;
  nccl.plugin.start(nccl.comm, &handle, &event);
  for (auto _ : state) {
    nccl.plugin.record(handle, nccl_abi::kStepSendPeerWait, &args);
  }
}
BENCHMARK(repeatedState);

void kernelChannel(benchmark::State& state) {
  Nccl nccl;
  EventV5 event{};
  event.type = nccl_abi::kKernelCh;
  event.parent = nccl.task;
  StateArgs args{};
  for (auto _ : state) {
    void* handle = nullptr;
    nccl.plugin.start(nccl.comm, &handle, &event);
    nccl.plugin.record(handle, nccl_abi::kKernelChStop, &args);
    nccl.plugin.stop(handle);
  }
}
BENCHMARK(kernelChannel);

// An event that was not asked for.
void groupEvent(benchmark::State& state) {
  Nccl nccl;
  EventV5 event{};
  event.type = nccl_abi::kGroupApi;
  for (auto _ : state) {
    void* handle = nullptr;
    nccl.plugin.start(nccl.comm, &handle, &event);
    benchmark::DoNotOptimize(handle);
  }
}
BENCHMARK(groupEvent);

// By the reader; NCCL's threads do not notice.
void snapshotOfTheTable(benchmark::State& state) {
  Nccl nccl;
  for (auto _ : state) {
    benchmark::DoNotOptimize(ncclProgressTable()->snapshot());
  }
}
BENCHMARK(snapshotOfTheTable);

}  // namespace
}  // namespace reft

BENCHMARK_MAIN();

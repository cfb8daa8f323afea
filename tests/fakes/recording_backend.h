// An inner backend that communicates with nobody: it notes which function was called and returns a
// Work that is complete.
//
// Threads: one at a time. Errors: what fail_with() was given, from every collective and message.
#pragma once

#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "c10d_backend/compat.h"

namespace reft {

class CompleteWork final : public c10d::Work {
 public:
  CompleteWork(int rank, c10d::OpType type) : Work(rank, type) { completed_ = true; }
  bool isCompleted() override { return true; }
  bool isSuccess() const override { return true; }
  bool wait(std::chrono::milliseconds) override { return true; }
  void synchronize() override {}
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    auto future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::ofTensors());
    future->markCompleted(c10::IValue(std::vector<at::Tensor>()));
    return future;
  }
};

class RecordingBackend final : public c10d::Backend {
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  using List = std::vector<at::Tensor>;
  using Lists = std::vector<List>;
  using Splits = std::vector<int64_t>;

 public:
  RecordingBackend(int rank, int size, std::string name)
      : Backend(rank, size), name_(std::move(name)) {}

  void record(bool on) { recording_ = on; }
  const std::vector<std::string>& calls() const { return calls_; }
  void clear() { calls_.clear(); }
  void fail_with(std::string text) { failure_ = std::move(text); }
  void return_null(bool on) { null_ = on; }
  std::chrono::milliseconds timeout() const { return timeout_; }

  const std::string getBackendName() const override { return name_; }
  bool supportsSplitting() const override { return note("supportsSplitting", true); }
  bool supportsCoalescing() const override { return note("supportsCoalescing", true); }
  bool supportsTimeEstimation() const override { return note("supportsTimeEstimation", true); }
  bool supportsShrinking() const override { return note("supportsShrinking", true); }
  c10::intrusive_ptr<Backend> shrink(const Splits&, int,
                                     const c10::intrusive_ptr<Options>&) override {
    note("shrink", 0);
    return c10::make_intrusive<RecordingBackend>(0, size_ - 1, name_);
  }
  void setTimeout(std::chrono::milliseconds timeout) override {
    note("setTimeout", 0);
    timeout_ = timeout;
  }
  void startCoalescing() override { note("startCoalescing", 0); }
  WorkPtr endCoalescing() override { return answer("endCoalescing", c10d::OpType::COALESCED); }
  c10::intrusive_ptr<Options> getBackendOptions() override {
    note("getBackendOptions", 0);
    return c10::make_intrusive<Options>(name_, timeout_);
  }

#define REFT_RECORD(name, type, ...)          \
  WorkPtr name(__VA_ARGS__) override {        \
    return answer(#name, c10d::OpType::type); \
  }
#define REFT_RECORD_NEW(name, type, ...)            \
  WorkPtr name(__VA_ARGS__) REFT_OVERRIDES_IF_NEW { \
    return answer(#name, c10d::OpType::type);       \
  }
  REFT_RECORD(broadcast, BROADCAST, List&, const c10d::BroadcastOptions&)
  REFT_RECORD(allreduce, ALLREDUCE, List&, const c10d::AllreduceOptions&)
  REFT_RECORD(allreduce_sparse, _ALLREDUCE_SPARSE, List&, const c10d::AllreduceOptions&)
  REFT_RECORD(allreduce_coalesced, ALLREDUCE_COALESCED, List&,
              const c10d::AllreduceCoalescedOptions&)
  REFT_RECORD(reduce, REDUCE, List&, const c10d::ReduceOptions&)
  REFT_RECORD(allgather, ALLGATHER, Lists&, List&, const c10d::AllgatherOptions&)
  REFT_RECORD(_allgather_base, _ALLGATHER_BASE, at::Tensor&, at::Tensor&,
              const c10d::AllgatherOptions&)
  REFT_RECORD(allgather_coalesced, ALLGATHER_COALESCED, Lists&, List&,
              const c10d::AllgatherOptions&)
  REFT_RECORD(allgather_into_tensor_coalesced, ALLGATHER_COALESCED, List&, List&,
              const c10d::AllgatherOptions&)
  REFT_RECORD(gather, GATHER, Lists&, List&, const c10d::GatherOptions&)
  REFT_RECORD(scatter, SCATTER, List&, Lists&, const c10d::ScatterOptions&)
  REFT_RECORD(reduce_scatter, REDUCE_SCATTER, List&, Lists&, const c10d::ReduceScatterOptions&)
  REFT_RECORD(_reduce_scatter_base, _REDUCE_SCATTER_BASE, at::Tensor&, at::Tensor&,
              const c10d::ReduceScatterOptions&)
  REFT_RECORD(reduce_scatter_tensor_coalesced, COALESCED, List&, List&,
              const c10d::ReduceScatterOptions&)
  REFT_RECORD(alltoall_base, ALLTOALL_BASE, at::Tensor&, at::Tensor&, Splits&, Splits&,
              const c10d::AllToAllOptions&)
  REFT_RECORD(alltoall, ALLTOALL, List&, List&, const c10d::AllToAllOptions&)
  REFT_RECORD(send, SEND, List&, int, int)
  REFT_RECORD(recv, RECV, List&, int, int)
  REFT_RECORD(recvAnysource, RECVANYSOURCE, List&, int)
  REFT_RECORD(barrier, BARRIER, const c10d::BarrierOptions&)
  REFT_RECORD_NEW(all_gather_single, _ALLGATHER_BASE, at::Tensor&, at::Tensor&,
                  const c10d::AllgatherOptions&)
  REFT_RECORD_NEW(all_gather_single_coalesced, ALLGATHER_COALESCED, List&, List&,
                  const c10d::AllgatherOptions&)
  REFT_RECORD_NEW(gather_single, GATHER, at::Tensor&, at::Tensor&, const c10d::GatherOptions&)
  REFT_RECORD_NEW(gather_into_tensor, GATHER, at::Tensor&, at::Tensor&, const c10d::GatherOptions&)
  REFT_RECORD_NEW(reduce_scatter_single, _REDUCE_SCATTER_BASE, at::Tensor&, at::Tensor&,
                  const c10d::ReduceScatterOptions&)
  REFT_RECORD_NEW(reduce_scatter_single_coalesced, COALESCED, List&, List&,
                  const c10d::ReduceScatterOptions&)
  REFT_RECORD_NEW(all_to_all_single, ALLTOALL_BASE, at::Tensor&, at::Tensor&, Splits&, Splits&,
                  const c10d::AllToAllOptions&)
#undef REFT_RECORD
#undef REFT_RECORD_NEW

  void monitoredBarrier(const c10d::BarrierOptions&, bool) override {
    answer("monitoredBarrier", c10d::OpType::BARRIER);
  }
  void setSequenceNumberForGroup() override {
    note("setSequenceNumberForGroup", 0);
  }
  uint64_t getSequenceNumberForGroup() override {
    return note("getSequenceNumberForGroup", uint64_t{7});
  }
  void registerOnCompletionHook(std::function<void(std::shared_ptr<c10d::WorkInfo>)>&&) override {
    note("registerOnCompletionHook", 0);
  }
  void waitForPendingWorks() override {
    note("waitForPendingWorks", 0);
  }
  void enableCollectivesTiming() override {
    note("enableCollectivesTiming", 0);
  }
  c10::intrusive_ptr<Backend> split(const c10::intrusive_ptr<c10d::Store>&,
                                    const std::vector<int>& ranks,
                                    const c10::intrusive_ptr<Options>&) override {
    note("split", 0);
    const auto place = std::find(ranks.begin(), ranks.end(), rank_);
    if (place == ranks.end()) {
      return nullptr;
    }
    return c10::make_intrusive<RecordingBackend>(static_cast<int>(place - ranks.begin()),
                                                 static_cast<int>(ranks.size()), name_);
  }
  c10::intrusive_ptr<Backend> merge(const c10::intrusive_ptr<c10d::Store>&,
                                    const c10::intrusive_ptr<Options>&, const int& rank,
                                    const int& size) override {
    note("merge", 0);
    return c10::make_intrusive<RecordingBackend>(rank, size, name_);
  }
  void setGroupUid(const std::string& uid) override {
    note("setGroupUid", 0);
    Backend::setGroupUid(uid);
  }
  void eagerConnectSingleDevice(at::Device) override {
    note("eagerConnectSingleDevice", 0);
  }
  c10d::ErrorType getError() override {
    return note("getError", c10d::ErrorType::SUCCESS);
  }
  std::shared_ptr<c10::Allocator> getMemAllocator() override {
    return note("getMemAllocator", std::shared_ptr<c10::Allocator>());
  }
  at::Tensor allocateTensor(long size, at::TensorOptions options) override {
    note("allocateTensor", 0);
    return at::empty({size}, options);
  }
  bool supportsTensorAlloc(c10::DeviceIndex) override {
    return note("supportsTensorAlloc", true);
  }
  void abort() override {
    note("abort", 0);
  }
  void shutdown() override {
    note("shutdown", 0);
  }
  void suspend() REFT_OVERRIDES_IF_NEW {
    note("suspend", 0);
  }
  void resume() REFT_OVERRIDES_IF_NEW {
    note("resume", 0);
  }
  std::unordered_map<std::string, uint64_t> getMemoryStats() REFT_OVERRIDES_IF_NEW {
    return note("getMemoryStats", std::unordered_map<std::string, uint64_t>());
  }
  bool isInitialized() REFT_OVERRIDES_IF_NEW {
    return note("isInitialized", true);
  }
  void startTimeEstimate() REFT_OVERRIDES_IF_NEW {
    note("startTimeEstimate", 0);
  }
  float endTimeEstimate() REFT_OVERRIDES_IF_NEW {
    return note("endTimeEstimate", 1.0F);
  }
  void addEphemeralTimeout(const std::chrono::milliseconds&) REFT_OVERRIDES_IF_NEW {
    note("addEphemeralTimeout", 0);
  }
  bool supportsAbortHooks() const REFT_OVERRIDES_IF_NEW {
    return note("supportsAbortHooks", true);
  }
#ifdef C10D_BACKEND_HAS_RECONFIGURE
  bool supportsReconfigure() const override {
    return note("supportsReconfigure", true);
  }
  c10d::ReconfigureHandle get_reconfigure_handle() const override {
    return note("get_reconfigure_handle", std::string("handle"));
  }
  WorkPtr reconfigure(const c10d::ReconfigureOptions&) override {
    return answer("reconfigure", c10d::OpType::UNKNOWN);
  }
#endif
#ifdef C10D_BACKEND_HAS_WINDOW
  bool supportsWindow() const override {
    return note("supportsWindow", true);
  }
  c10::intrusive_ptr<c10d::Window> new_window(const std::optional<at::Tensor>&) override {
    return note("new_window", c10::intrusive_ptr<c10d::Window>());
  }
#endif
#ifdef C10D_BACKEND_HAS_HOOKS
  void registerAbortHook(int64_t, c10d::AbortHook) override {
    note("registerAbortHook", 0);
  }
  void unregisterAbortHook(int64_t) override {
    note("unregisterAbortHook", 0);
  }
#endif
#if REFT_TORCH_HAS_COMPLETION_HOOKS
  bool supportsCompletionHooks() const override {
    return note("supportsCompletionHooks", true);
  }
  void registerCompletionHook(int64_t, c10d::CompletionHook) override {
    note("registerCompletionHook", 0);
  }
  void unregisterCompletionHook(int64_t) override {
    note("unregisterCompletionHook", 0);
  }
#endif

 private:
  template <typename T>
  T note(const char* name, T value) const {
    if (recording_) {
      calls_.emplace_back(name);
    }
    return value;
  }
  WorkPtr answer(const char* name, c10d::OpType type) {
    note(name, 0);
    TORCH_CHECK_WITH(DistBackendError, failure_.empty(), failure_);
    if (null_) {
      return nullptr;
    }
    return c10::make_intrusive<CompleteWork>(rank_, type);
  }

  const std::string name_;
  bool recording_ = true;
  bool null_ = false;
  std::string failure_;
  std::chrono::milliseconds timeout_{kBackendDefaultTimeout};
  mutable std::vector<std::string> calls_;
};

}  // namespace reft

// The backend "reft": forwards every operation to gloo (CPU tensors) or NCCL (CUDA tensors) and
// records it in the op log.
//
// torch registers one object for all devices, so this one chooses by the tensor. Python makes the
// inner backends, and only c10d::Backend's virtuals reach them: no gloo, NCCL or CUDA header is
// needed, and one build serves CPU and CUDA. The wrapper adds to gloo: AVG of integers (sum, then a
// division that truncates, as NCCL does), all_to_all of lists, send and recv to self, coalescing.
//
// Note [coalescing]: startCoalescing() does not name a device. The first CUDA op opens NCCL's
// region; CPU ops are issued at once and their Works collected. Inside a region every op returns
// null, as NCCL's do; endCoalescing() returns one Work for all. Regions belong to the backend, not
// to a thread, as in NCCL.
//
// Note [lazy state]: torch 2.11 sets the description and the bound device of a group without a
// virtual call, after the creator has returned. The next op that reaches NCCL passes them on to the
// inner backends.
//
// Threads: as c10d::Backend: ops of one group from one thread at a time; Works, abort() and
//          shutdown() from any.
// Errors:  exceptions of the inner backends pass unchanged; the op log marks the op as failed.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "c10d_backend/compat.h"
#include "c10d_backend/group_family.h"
#include "c10d_backend/loopback.h"
#include "c10d_backend/op_shape.h"
#include "c10d_backend/pending_writes.h"
#include "c10d_backend/work.h"
#include "intercept/base/mutex.h"
#include "intercept/record/op_log.h"

namespace reft {

class ReftBackend final : public c10d::Backend {
 public:
  using Parts = BackendParts;

  // `log` must outlive the backend and all its Works.
  ReftBackend(Parts parts, int rank, int size, OpLog& log = processOpLog());
  ~ReftBackend() override;

  const BackendPtr& cpu() const { return parts_.cpu; }
  const BackendPtr& cuda() const { return parts_.cuda; }
  uint32_t groupIndex() const { return group_; }
  // Whether abort() or shutdown() ran, for callers behind a wrapper that forwards neither.
  bool closed() const { return closed_.load(); }
  uint64_t splitCount() const { return family_.splitCount(); }

  const std::string getBackendName() const override { return "reft"; }
  bool supportsSplitting() const override;
  bool supportsCoalescing() const override;
  bool supportsTimeEstimation() const override;
  bool supportsShrinking() const override;
  BackendPtr shrink(const std::vector<int64_t>& ranks_to_exclude, int shrink_flags,
                    const OptionsPtr& opts_override) override;
  void setTimeout(std::chrono::milliseconds timeout) override;
  void startCoalescing() override;
  WorkPtr endCoalescing() override;
  OptionsPtr getBackendOptions() override;

  WorkPtr broadcast(TensorList& tensors, const c10d::BroadcastOptions& opts) override;
  WorkPtr allreduce(TensorList& tensors, const c10d::AllreduceOptions& opts) override;
  WorkPtr allreduce_sparse(TensorList& tensors, const c10d::AllreduceOptions& opts) override;
  WorkPtr allreduce_coalesced(TensorList& tensors,
                              const c10d::AllreduceCoalescedOptions& opts) override;
  WorkPtr reduce(TensorList& tensors, const c10d::ReduceOptions& opts) override;
  WorkPtr allgather(TensorLists& outputs, TensorList& inputs,
                    const c10d::AllgatherOptions& opts) override;
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions& opts) override;
  WorkPtr allgather_coalesced(TensorLists& outputs, TensorList& inputs,
                              const c10d::AllgatherOptions& opts) override;
  WorkPtr allgather_into_tensor_coalesced(TensorList& outputs, TensorList& inputs,
                                          const c10d::AllgatherOptions& opts) override;
  WorkPtr gather(TensorLists& outputs, TensorList& inputs,
                 const c10d::GatherOptions& opts) override;
  WorkPtr scatter(TensorList& outputs, TensorLists& inputs,
                  const c10d::ScatterOptions& opts) override;
  WorkPtr reduce_scatter(TensorList& outputs, TensorLists& inputs,
                         const c10d::ReduceScatterOptions& opts) override;
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& opts) override;
  WorkPtr reduce_scatter_tensor_coalesced(TensorList& outputs, TensorList& inputs,
                                          const c10d::ReduceScatterOptions& opts) override;
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                        std::vector<int64_t>& input_splits,
                        const c10d::AllToAllOptions& opts) override;
  WorkPtr alltoall(TensorList& outputs, TensorList& inputs,
                   const c10d::AllToAllOptions& opts) override;
  void monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) override;
  void setSequenceNumberForGroup() override;
  uint64_t getSequenceNumberForGroup() override;
  WorkPtr send(TensorList& tensors, int destination, int tag) override;
  WorkPtr recv(TensorList& tensors, int source, int tag) override;
  WorkPtr recvAnysource(TensorList& tensors, int tag) override;
  WorkPtr barrier(const c10d::BarrierOptions& opts) override;

  void registerOnCompletionHook(
      std::function<void(std::shared_ptr<c10d::WorkInfo>)>&& hook) override;
  void waitForPendingWorks() override;
  void enableCollectivesTiming() override;
  BackendPtr split(const StorePtr& store, const std::vector<int>& ranks,
                   const OptionsPtr& opts) override;
  BackendPtr merge(const StorePtr& store, const OptionsPtr& opts, const int& rank,
                   const int& size) override;
  void setGroupUid(const std::string& uid) override;
  void eagerConnectSingleDevice(at::Device device) override;
  c10d::ErrorType getError() override;
  std::shared_ptr<c10::Allocator> getMemAllocator() override;
  at::Tensor allocateTensor(long size, at::TensorOptions options) override;
  bool supportsTensorAlloc(c10::DeviceIndex device) override;
  void abort() override;
  void shutdown() override;

  // torch 2.12 and newer
  void suspend() REFT_OVERRIDES_IF_NEW;
  void resume() REFT_OVERRIDES_IF_NEW;
  std::unordered_map<std::string, uint64_t> getMemoryStats() REFT_OVERRIDES_IF_NEW;
  // torch 2.14 and newer
  bool isInitialized() REFT_OVERRIDES_IF_NEW;
  void startTimeEstimate() REFT_OVERRIDES_IF_NEW;
  float endTimeEstimate() REFT_OVERRIDES_IF_NEW;
  void addEphemeralTimeout(const std::chrono::milliseconds& timeout) REFT_OVERRIDES_IF_NEW;
  void setBoundDeviceId(std::optional<at::Device> device) REFT_OVERRIDES_IF_NEW;
  std::optional<at::Device> getBoundDeviceId() const REFT_OVERRIDES_IF_NEW {
    return bound_device_id_;
  }
  WorkPtr all_gather_single(at::Tensor& output, at::Tensor& input,
                            const c10d::AllgatherOptions& opts) REFT_OVERRIDES_IF_NEW;
  WorkPtr all_gather_single_coalesced(TensorList& outputs, TensorList& inputs,
                                      const c10d::AllgatherOptions& opts) REFT_OVERRIDES_IF_NEW;
  WorkPtr gather_single(at::Tensor& output, at::Tensor& input,
                        const c10d::GatherOptions& opts) REFT_OVERRIDES_IF_NEW;
  WorkPtr gather_into_tensor(at::Tensor& output, at::Tensor& input,
                             const c10d::GatherOptions& opts) REFT_OVERRIDES_IF_NEW;
  WorkPtr reduce_scatter_single(at::Tensor& output, at::Tensor& input,
                                const c10d::ReduceScatterOptions& opts) REFT_OVERRIDES_IF_NEW;
  WorkPtr reduce_scatter_single_coalesced(TensorList& outputs, TensorList& inputs,
                                          const c10d::ReduceScatterOptions& opts)
      REFT_OVERRIDES_IF_NEW;
  WorkPtr all_to_all_single(at::Tensor& output, at::Tensor& input,
                            std::vector<int64_t>& output_splits, std::vector<int64_t>& input_splits,
                            const c10d::AllToAllOptions& opts) REFT_OVERRIDES_IF_NEW;
#ifdef C10D_BACKEND_HAS_RECONFIGURE
  bool supportsReconfigure() const override;
  c10d::ReconfigureHandle get_reconfigure_handle() const override;
  WorkPtr reconfigure(const c10d::ReconfigureOptions& opts) override;
#endif
#ifdef C10D_BACKEND_HAS_WINDOW
  bool supportsWindow() const override;
  c10::intrusive_ptr<c10d::Window> new_window(const std::optional<at::Tensor>& tensor) override;
#endif
  bool supportsAbortHooks() const REFT_OVERRIDES_IF_NEW;
#ifdef C10D_BACKEND_HAS_HOOKS
  void registerAbortHook(int64_t id, c10d::AbortHook hook) override;
  void unregisterAbortHook(int64_t id) override;
#endif
#if REFT_TORCH_HAS_COMPLETION_HOOKS
  bool supportsCompletionHooks() const override;
  void registerCompletionHook(int64_t id, c10d::CompletionHook hook) override;
  void unregisterCompletionHook(int64_t id) override;
#endif

 private:
  struct Target {
    c10d::Backend* backend;
    ReftWork::Where where;
  };

  Target targetOf(const at::Tensor& tensor);
  Target hostTarget() const;
  // NCCL's, for what only NCCL has; without NCCL the other.
  c10d::Backend& main() const {
    return parts_.cuda ? *parts_.cuda : *parts_.cpu;
  }
  template <typename Body>
  void each(Body body) const {
    for (const BackendPtr* inner : {&parts_.cuda, &parts_.cpu}) {
      if (*inner) {
        body(**inner);
      }
    }
  }

  void checkPeer(const char* name, int peer) const;
  void countForCut(const OpShape& shape, c10d::OpType type) const;
  // `written`: what the op writes.
  template <typename Written, typename Call>
  WorkPtr issue(const Target& target, const OpShape& shape, c10d::OpType type,
                const Written& written, Call&& call);
  WorkPtr intoRegion(const Target& target, WorkPtr work, uint64_t ticket, c10d::OpType type,
                     const std::vector<PendingWrites::Range>& written);
  void openRegion(const Target& target);
  void syncLazyState();
  std::chrono::milliseconds hostTimeout();
  std::chrono::milliseconds childTimeout(const OptionsPtr& opts);
  template <typename OpOptions, typename Results, typename Call>
  WorkPtr averaged(const Target& target, c10d::OpType type, const OpOptions& opts,
                   const at::Tensor& first, const Results& results, Call&& call,
                   bool here = true) const;

  Parts parts_;
  OpLog& log_;
  const uint32_t group_;
  GroupFamily family_;
  const uint64_t cut_key_;         // the group's key in the consistent-cut check
  const uint64_t collective_cut_;  // what one collective adds to that check
  std::atomic<uint32_t> collectives_{0};
  std::atomic<uint32_t> messages_{0};
  Loopback loopback_;

  std::atomic<bool> coalescing_{false};
  struct Region {
    bool on_device = false;      // NCCL's own region is open
    std::vector<WorkPtr> works;  // Works of CPU ops
    std::vector<uint64_t> device_tickets;
    std::vector<PendingWrites::Range> device_written;
  };
  Mutex region_mutex_;
  Region region_ GUARDED_BY(region_mutex_);

  Mutex syncing_;  // one sync of the lazy state at a time; the two marks are also read without it
  std::atomic<bool> description_synced_{false};
  std::atomic<int32_t> device_synced_{0};

  std::atomic<bool> closed_{false};
  // Timeout of messages to self, which no inner backend sees; 0: not known yet.
  std::atomic<int64_t> host_timeout_ms_{0};
};

}  // namespace reft

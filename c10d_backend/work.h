// The Works that ReftBackend returns. Each forwards to an inner Work and never uses the state of
// c10d::Work itself.
//
// Threads: any thread, several at once, as for c10d::Work.
// Errors:  those of the inner Work, unchanged; FinishingWork also throws its action's.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "c10d_backend/compat.h"
#include "intercept/record/op_log.h"

namespace reft {

using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using FuturePtr = c10::intrusive_ptr<c10::ivalue::Future>;

// One op: marks wait-begin, wait-end and done in the op log. Holds no tensors, because a Work may
// be dropped without wait().
//
// When is an op done? On the host: when wait() returns, isCompleted() returns true, or the inner
// future completes. The Work requests that future only if the user requests it or drops the Work
// early. On a device, wait() only orders streams, so the op is done when the inner result future
// completes (if the inner backend has one) or isCompleted() returns true. A wait() that throws also
// marks the op done, as failed.
class ReftWork final : public c10d::Work {
 public:
  enum class Where : uint8_t { kHost, kDevice };

  // `also`: further tickets to mark done together with this one (the ops of a coalesced region).
  ReftWork(WorkPtr inner, OpLog& log, uint64_t ticket, Where where, int rank, c10d::OpType type,
           std::vector<uint64_t> also = {});
  ~ReftWork() override;

  bool isCompleted() override;
  bool isSuccess() const override { return inner_->isSuccess(); }
  std::exception_ptr exception() const override { return inner_->exception(); }
  int sourceRank() const override { return inner_->sourceRank(); }
  std::vector<at::Tensor> result() override { return inner_->result(); }
  void synchronize() override;
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void blockCurrentStream() override;
  void abort() override { inner_->abort(); }
  FuturePtr getFuture() override;
  FuturePtr getFutureResult() override { return inner_->getFutureResult(); }
  float getDuration() const override { return inner_->getDuration(); }
  uint64_t getSequencenumber() const override { return inner_->getSequencenumber(); }
  std::chrono::milliseconds getTimeout() const REFT_OVERRIDES_IF_NEW;
  uint64_t getCompletionKey() const REFT_OVERRIDES_IF_NEW;

  const WorkPtr& inner() const { return inner_; }

 private:
  void markDone(bool failed) noexcept;
  void ordered();
  void sayWhenStreamHasPassed() noexcept;
  void watch(const FuturePtr& future) noexcept;
  void unregister();

  const WorkPtr inner_;
  OpLog& log_;
  const uint64_t ticket_;
  const Where where_;
  std::atomic<bool> done_{false};
  std::atomic<bool> watched_{false};
  const std::vector<uint64_t> also_;
};

// An inner Work followed by an action on the host (a division, a copy). The action runs once, in
// the first thread that notices the completion; every wait() returns after it.
class FinishingWork final : public c10d::Work {
 public:
  // `outputs`: value of result() and of the future; if empty, those of the inner Work are used.
  FinishingWork(WorkPtr inner, std::function<void()> action, std::vector<at::Tensor> outputs,
                int rank, c10d::OpType type);

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  int sourceRank() const override { return inner_->sourceRank(); }
  std::vector<at::Tensor> result() override;
  void synchronize() override;
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void abort() override { inner_->abort(); }
  FuturePtr getFuture() override;
  FuturePtr getFutureResult() override { return inner_->getFutureResult(); }
  float getDuration() const override { return inner_->getDuration(); }
  uint64_t getSequencenumber() const override { return inner_->getSequencenumber(); }

 private:
  // Shared with the future's callback, which may outlive the Work.
  struct Action {
    std::once_flag once;
    std::function<void()> run;
    std::exception_ptr failure;
    void operator()();  // a failure is thrown on every call
  };
  const WorkPtr inner_;
  const std::shared_ptr<Action> action_;
  const std::vector<at::Tensor> outputs_;
};

// Combines several Works into one.
class CompositeWork final : public c10d::Work {
 public:
  CompositeWork(std::vector<WorkPtr> works, int rank);

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  std::vector<at::Tensor> result() override;
  void synchronize() override;
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void blockCurrentStream() override;
  void abort() override;
  FuturePtr getFuture() override;

 private:
  const std::vector<WorkPtr> works_;
};

}  // namespace reft

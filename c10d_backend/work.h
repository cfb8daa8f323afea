// The Works that ReftBackend returns. Each forwards to an inner Work and never uses the state of
// c10d::Work itself.
//
// Threads: as c10d::Work: any thread, several at once.
// Errors:  what the inner Work throws, unchanged.
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

// One op: marks wait-begin, wait-end and done in the op log. Holds no tensors: a Work dropped
// without wait is legal.
//
// When is an op done? On the host, when wait() returns, isCompleted() is true, or the inner future
// completes; that future is requested only if the user requests it or drops the Work early. On a
// device, wait() only orders streams, so the inner result future decides, if the inner backend has
// one.
class ReftWork final : public c10d::Work {
 public:
  enum class Where : uint8_t { kHost, kDevice };

  // `also`: further tickets that are done when this one is (the ops of a coalesced region).
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
  void blockCurrentStream() override { inner_->blockCurrentStream(); }
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

// An inner Work with an action on the host after its completion (a division, a copy). The action
// runs once, in the first thread that notices; every wait returns after it.
class FinishingWork final : public c10d::Work {
 public:
  // `outputs`: the value of result() and of the future; empty: the inner Work's.
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
    void operator()();  // throws the failure, every time
  };
  const WorkPtr inner_;
  const std::shared_ptr<Action> action_;
  const std::vector<at::Tensor> outputs_;
};

// Several Works as one.
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

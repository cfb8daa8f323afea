#include "c10d_backend/work.h"

#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>

#include "c10d_backend/pending_writes.h"
#include "c10d_backend/stream_ops.h"
#include "c10d_backend/stream_wait.h"

namespace reft {

namespace {

// NCCL's result future completes with a WorkResult as an integer, an ordinary future with tensors.
bool endedBadly(c10::ivalue::Future& future) noexcept {
  try {
    return future.hasError() || (future.constValue().isInt() && future.constValue().toInt() != 0);
  } catch (...) {
    return true;
  }
}

}  // namespace

ReftWork::ReftWork(WorkPtr inner, OpLog& log, uint64_t ticket, Where where, int rank,
                   c10d::OpType type, std::vector<uint64_t> also)
    : Work(rank, type),
      inner_(std::move(inner)),
      log_(log),
      ticket_(ticket),
      where_(where),
      also_(std::move(also)) {
  if (where_ == Where::kDevice) {
    try {
      const FuturePtr result = inner_->getFutureResult();
      watch(result);
      if (result != nullptr) {
        log_.flag(ticket_, OpFlag::kEndSeen);
        for (const uint64_t ticket : also_) {
          log_.flag(ticket, OpFlag::kEndSeen);
        }
      }
    } catch (...) {  // not every backend has a result future
    }
  }
}

ReftWork::~ReftWork() {
  if (where_ == Where::kDevice || done_.load(std::memory_order_relaxed)) {
    return;
  }
  // Dropped before its end was known: still record the end in the op log.
  try {
    if (inner_->isCompleted()) {
      markDone(inner_->exception() != nullptr);
    } else if (!watched_.load(std::memory_order_relaxed)) {
      watch(inner_->getFuture());
    }
  } catch (...) {  // gloo's p2p Works have no future: such an op stays open in the log
  }
}

void ReftWork::markDone(bool failed) noexcept {
  if (done_.exchange(true, std::memory_order_relaxed)) {
    return;
  }
  log_.markDone(ticket_, failed);
  processPendingWrites().remove(ticket_);
  for (const uint64_t ticket : also_) {
    log_.markDone(ticket, failed);
  }
}

// On a device: what a stream does from now on, and copies behind it, sees what the op writes.
void ReftWork::ordered() {
  if (where_ == Where::kDevice) {
    processPendingWrites().remove(ticket_);
  }
}

void ReftWork::blockCurrentStream() {
  inner_->blockCurrentStream();
  sayWhenStreamHasPassed();
  ordered();
}

void ReftWork::watch(const FuturePtr& future) noexcept {
  if (future == nullptr || watched_.exchange(true, std::memory_order_relaxed)) {
    return;
  }
  try {
    // Captures the log, which outlives every backend, and the tickets, but not this Work.
    future->addCallback(
        [&log = log_, ticket = ticket_, also = also_](c10::ivalue::Future& ended) {
          const bool failed = endedBadly(ended);
          log.markDone(ticket, failed);
          processPendingWrites().remove(ticket);
          for (const uint64_t other : also) {
            log.markDone(other, failed);
          }
        },
        /*uses_future=*/true);
  } catch (...) {
  }
}

void ReftWork::sayWhenStreamHasPassed() noexcept {
  if (where_ == Where::kDevice && !done_.load(std::memory_order_relaxed)) {
    sayWhenPassed(log_, ticket_);
    for (const uint64_t ticket : also_) {
      sayWhenPassed(log_, ticket);
    }
  }
}

// Functional collectives register the outer Work, but the inner Work unregisters only itself.
void ReftWork::unregister() {
  if (c10d::allow_inflight_collective_as_graph_input()) {
    c10d::unregister_work(c10::intrusive_ptr<ReftWork>::unsafe_reclaim_from_nonowning(this));
  }
}

bool ReftWork::isCompleted() {
  const bool completed = inner_->isCompleted();
  if (completed && !done_.load(std::memory_order_relaxed)) {
    markDone(inner_->exception() != nullptr);
  }
  return completed;
}

void ReftWork::synchronize() {
  inner_->synchronize();
  sayWhenStreamHasPassed();
  ordered();
  unregister();
}

bool ReftWork::wait(std::chrono::milliseconds timeout) {
  const StreamWait marked(where_ == Where::kDevice ? &log_ : nullptr, ticket_);
  log_.markWaitBegin(ticket_);
  bool succeeded = false;
  try {
    succeeded = inner_->wait(timeout);
  } catch (...) {
    log_.markWaitEnd(ticket_);
    markDone(/*failed=*/true);
    throw;
  }
  log_.markWaitEnd(ticket_);
  if (where_ == Where::kHost) {
    markDone(!succeeded);
  }
  if (succeeded) {  // else the stream does not wait for it
    sayWhenStreamHasPassed();
  }
  ordered();
  unregister();
  return succeeded;
}

FuturePtr ReftWork::getFuture() {
  FuturePtr future = inner_->getFuture();
  if (where_ == Where::kHost) {
    // A caller that takes the future (DDP does) never calls wait(). Without this, the op would stay
    // open in the log.
    watch(future);
  }
  return future;
}

std::chrono::milliseconds ReftWork::getTimeout() const {
  return REFT_FORWARD(inner_, getTimeout);
}

uint64_t ReftWork::getCompletionKey() const {
  return REFT_FORWARD(inner_, getCompletionKey);
}

void FinishingWork::Action::operator()() {
  std::call_once(once, [this] {
    try {
      run();
    } catch (...) {
      failure = std::current_exception();
    }
    run = nullptr;  // releases the tensors
  });
  if (failure) {
    std::rethrow_exception(failure);
  }
}

FinishingWork::FinishingWork(WorkPtr inner, std::function<void()> action,
                             std::vector<at::Tensor> outputs, int rank, c10d::OpType type)
    : Work(rank, type),
      inner_(std::move(inner)),
      action_(std::make_shared<Action>()),
      outputs_(std::move(outputs)) {
  action_->run = std::move(action);
}

bool FinishingWork::isCompleted() {
  if (!inner_->isCompleted()) {
    return false;
  }
  if (!inner_->exception()) {
    try {
      (*action_)();
    } catch (...) {  // exception() returns it
    }
  }
  return true;
}

bool FinishingWork::isSuccess() const {
  return inner_->isSuccess() && exception() == nullptr;
}

std::exception_ptr FinishingWork::exception() const {
  const std::exception_ptr failure = inner_->exception();
  return failure ? failure : action_->failure;
}

std::vector<at::Tensor> FinishingWork::result() {
  return outputs_.empty() ? inner_->result() : outputs_;
}

void FinishingWork::synchronize() {
  inner_->synchronize();
  (*action_)();
}

bool FinishingWork::wait(std::chrono::milliseconds timeout) {
  if (!inner_->wait(timeout)) {
    return false;
  }
  (*action_)();
  return true;
}

FuturePtr FinishingWork::getFuture() {
  return inner_->getFuture()->then(
      [action = action_, outputs = outputs_](c10::ivalue::Future& ended) -> c10::IValue {
        if (ended.hasError()) {
          std::rethrow_exception(ended.exception_ptr());
        }
        (*action)();
        return outputs.empty() ? ended.value() : c10::IValue(outputs);
      },
      c10::ListType::ofTensors());
}

CompositeWork::CompositeWork(std::vector<WorkPtr> works, int rank)
    : Work(rank, c10d::OpType::COALESCED), works_(std::move(works)) {}

bool CompositeWork::isCompleted() {
  for (const WorkPtr& work : works_) {
    if (!work->isCompleted()) {
      return false;
    }
  }
  return true;
}

bool CompositeWork::isSuccess() const {
  for (const WorkPtr& work : works_) {
    if (!work->isSuccess()) {
      return false;
    }
  }
  return true;
}

std::exception_ptr CompositeWork::exception() const {
  for (const WorkPtr& work : works_) {
    if (std::exception_ptr failure = work->exception()) {
      return failure;
    }
  }
  return nullptr;
}

std::vector<at::Tensor> CompositeWork::result() {
  std::vector<at::Tensor> all;
  for (const WorkPtr& work : works_) {
    for (at::Tensor& tensor : work->result()) {
      all.push_back(std::move(tensor));
    }
  }
  return all;
}

void CompositeWork::synchronize() {
  for (const WorkPtr& work : works_) {
    work->synchronize();
  }
}

bool CompositeWork::wait(std::chrono::milliseconds timeout) {
  bool succeeded = true;
  for (const WorkPtr& work : works_) {
    succeeded = work->wait(timeout) && succeeded;
  }
  return succeeded;
}

void CompositeWork::blockCurrentStream() {
  for (const WorkPtr& work : works_) {
    work->blockCurrentStream();
  }
}

void CompositeWork::abort() {
  for (const WorkPtr& work : works_) {
    work->abort();
  }
}

FuturePtr CompositeWork::getFuture() {
  c10::List<FuturePtr> futures(c10::FutureType::create(c10::ListType::ofTensors()));
  for (const WorkPtr& work : works_) {
    futures.push_back(work->getFuture());
  }
  return c10::collectAll(futures);
}

}  // namespace reft

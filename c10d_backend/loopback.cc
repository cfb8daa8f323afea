#include "c10d_backend/loopback.h"

namespace reft {

void Loopback::Message::complete(std::exception_ptr failure) {
  tensor_.reset();
  finish(std::move(failure));
}

bool Loopback::Message::wait(std::chrono::milliseconds timeout) {
  std::unique_lock<std::mutex> lock(mutex_);
  const auto patience = timeout == kNoTimeout ? timeout_ : timeout;
  TORCH_CHECK_WITH(DistBackendError, cv_.wait_for(lock, patience, [this] { return completed_; }),
                   "Timed out waiting ", patience.count(),
                   "ms for recv operation to complete: this rank receives from itself and has not "
                   "sent to itself");
  if (exception_) {
    std::rethrow_exception(exception_);
  }
  return true;
}

namespace {

void copyMessage(const at::Tensor& to, const at::Tensor& from) {
  TORCH_CHECK_VALUE(to.nbytes() == from.nbytes(), "send to self of ", from.nbytes(),
                    " bytes into a tensor of ", to.nbytes(), " bytes");
  at::NoGradGuard no_grad;
  const at::Tensor same =
      from.scalar_type() == to.scalar_type() ? from : from.view(to.scalar_type());
  to.detach().copy_(same.view(to.sizes()));
}

}  // namespace

WorkPtr Loopback::send(const at::Tensor& tensor, int tag) {
  auto work = c10::make_intrusive<Message>(rank_, c10d::OpType::SEND, at::Tensor(),
                                           std::chrono::milliseconds(0));
  const MutexLock lock(mutex_);
  auto& awaited = awaited_[tag];
  if (awaited.empty()) {
    at::NoGradGuard no_grad;
    sent_[tag].push_back(tensor.detach().contiguous().clone());
  } else {
    const auto receiver = awaited.front();
    awaited.pop_front();
    try {
      copyMessage(receiver->tensor(), tensor.detach().contiguous());
      receiver->complete();
    } catch (...) {
      receiver->complete(std::current_exception());
      throw;
    }
  }
  work->complete();
  return work;
}

WorkPtr Loopback::recv(const at::Tensor& tensor, int tag, std::chrono::milliseconds timeout) {
  auto work = c10::make_intrusive<Message>(rank_, c10d::OpType::RECV, tensor, timeout);
  const MutexLock lock(mutex_);
  auto& sent = sent_[tag];
  if (sent.empty()) {
    awaited_[tag].push_back(work);
  } else {
    const at::Tensor message = std::move(sent.front());
    sent.pop_front();
    copyMessage(tensor, message);
    work->complete();
  }
  return work;
}

}  // namespace reft

#include "c10d_backend/snapshot_transport.h"

#include <vector>

#include <ATen/ops/from_blob.h>

#include "intercept/base/error.h"

namespace reft {

namespace {

// Far from the tags that scripts use; the messages of a restore must not match a script's.
constexpr uint32_t kFirstTag = 0x52000000;

int tagOf(uint32_t tag) {
  return static_cast<int>(kFirstTag + (tag & 0xffffff));
}

std::vector<at::Tensor> tensorsOf(const std::byte* bytes, size_t count) {
  return {at::from_blob(const_cast<std::byte*>(bytes), {static_cast<int64_t>(count)}, at::kByte)};
}

class Message final : public PeerTransport::Pending {
 public:
  Message(std::vector<at::Tensor> tensors, c10::intrusive_ptr<c10d::Work> work, int peer)
      : tensors_(std::move(tensors)), work_(std::move(work)), peer_(peer) {}

  void wait() override {
    if (work_ != nullptr && !work_->wait()) {
      throw PeerFailure("restore: the message with rank " + std::to_string(peer_) +
                        " did not arrive");
    }
  }

 private:
  std::vector<at::Tensor> tensors_;
  c10::intrusive_ptr<c10d::Work> work_;
  int peer_;
};

}  // namespace

std::unique_ptr<PeerTransport::Pending> SnapshotTransport::send(std::span<const std::byte> bytes,
                                                                int to, uint32_t tag) {
  std::vector<at::Tensor> tensors = tensorsOf(bytes.data(), bytes.size());
  auto work = backend_->send(tensors, to, tagOf(tag));
  return std::make_unique<Message>(std::move(tensors), std::move(work), to);
}

std::unique_ptr<PeerTransport::Pending> SnapshotTransport::receive(std::span<std::byte> bytes,
                                                                   int from, uint32_t tag) {
  std::vector<at::Tensor> tensors = tensorsOf(bytes.data(), bytes.size());
  auto work = backend_->recv(tensors, from, tagOf(tag));
  return std::make_unique<Message>(std::move(tensors), std::move(work), from);
}

}  // namespace reft

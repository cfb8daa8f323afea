// One connection between two agents: bytes in, frames and slots out, never blocking. The bytes are
// those of a channel, which may encrypt them (channel.h); what they say is the same either way.
//
// Threads: `reft-mesh`. Errors: Corruption for what is not from an agent of the job; a broken
// connection is marked gone().
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "agent/mesh/channel.h"
#include "agent/mesh/copy_store.h"
#include "agent/mesh/frames.h"
#include "agent/mesh/handshake.h"
#include "intercept/base/unique_fd.h"

namespace reft::agent {

class Session {
 public:
  // Of an owner: a stranger has connected.
  Session(std::unique_ptr<Channel> channel, const MeshKey& key, int64_t now_ns);
  // Of a keeper, which has begun to connect to `source`.
  Session(std::unique_ptr<Channel> channel, const MeshKey& key, size_t source, int64_t now_ns);

  int fd() const { return channel_->fd(); }
  bool isKeeper() const { return keeper_; }
  size_t source() const { return source_; }
  // Both sides have shown that they have the key.
  bool isOpen() const { return phase_ == Phase::kOpen; }
  int64_t sinceNs() const { return since_ns_; }  // when it was made
  // When bytes moved last, either way, or there were none to move.
  int64_t movedNs() const { return moved_ns_; }
  bool isBusy() const { return incoming_ != nullptr || !out_.empty(); }
  void rest(int64_t now_ns) { moved_ns_ = now_ns; }

  // The next frame; nothing until more bytes come. Reads no more than `budget` bytes in all, which
  // it takes off; once it is 0, more may be there that the socket does not show. Bytes of a slot go
  // to `incoming`.
  std::optional<MeshFrame> receive(size_t& budget, int64_t now_ns);
  void send(MeshType type, std::string_view payload = {});
  // Bytes [at, at + bytes) of a file, after what is queued.
  void sendFile(int fd, uint64_t at, uint64_t bytes);
  // Sends what the socket takes; at most `budget` bytes of files.
  void flush(size_t budget, int64_t now_ns);
  // The connection of a keeper stands.
  void connected();
  bool isConnecting() const { return phase_ == Phase::kConnecting; }

  // The slot whose bytes come next. It stays until the caller takes it.
  void expect(std::unique_ptr<CopyStore::Incoming> slot) { incoming_ = std::move(slot); }
  bool hasWholeSlot() const { return incoming_ != nullptr && whole_; }
  std::unique_ptr<CopyStore::Incoming> takeSlot();
  // What comes next is a slot.
  void beginSlot();

  bool wantsRead() const { return channel_->wantsRead(); }
  bool wantsWrite() const { return isConnecting() || channel_->wantsWrite(!out_.empty()); }
  void drop() { gone_ = true; }
  bool gone() const { return gone_; }

  uint64_t sentBytes() const { return sent_bytes_; }    // of files
  uint64_t takenBytes() const { return taken_bytes_; }  // of slots

 private:
  enum class Phase : uint8_t { kConnecting, kGreeting, kAnswer, kProof, kOpen };
  struct Out {
    std::string bytes;
    UniqueFd file;
    uint64_t at = 0, left = 0;
  };
  size_t wants() const;
  void shake(std::string_view bytes);
  void open(const SessionKeys& keys);
  // False: nothing more for now.
  bool receiveSlot(size_t& budget, int64_t now_ns);
  // How many bytes came; 0: none for now.
  size_t read(std::byte* to, size_t bytes, int64_t now_ns);
  void noteMoved(int64_t now_ns);

  const std::unique_ptr<Channel> channel_;
  const MeshKey key_;
  const bool keeper_;
  const size_t source_ = 0;
  Phase phase_;
  const int64_t since_ns_;
  int64_t moved_ns_;
  uint64_t crossed_ = 0;  // bytes of the channel at that time
  Nonce own_, theirs_{};
  std::string in_;  // of the part that comes next
  std::optional<FrameSealer> sealer_;
  std::optional<FrameReader> reader_;
  std::deque<Out> out_;
  std::unique_ptr<CopyStore::Incoming> incoming_;
  bool in_slot_ = false, whole_ = false;
  bool gone_ = false;
  uint64_t sent_bytes_ = 0, taken_bytes_ = 0;
};

}  // namespace reft::agent

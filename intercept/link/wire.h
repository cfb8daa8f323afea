// Frames between ranks, tools and the agent over a Unix stream socket. The table of messages is in
// ARCHITECTURE.md.
//
// Threads: a FrameDecoder belongs to one connection; free functions are re-entrant.
// Errors:  FrameDecoder throws Corruption on a foreign magic, an unknown version or an oversized
//          payload: the peer is not reft, close the connection. sendFrame and receiveFrame throw
//          SystemError, PeerFailure (end of stream) or Timeout.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "intercept/base/unique_fd.h"

namespace reft::wire {

constexpr uint32_t kMagic = 0x57544652;  // "RFTW"
constexpr uint16_t kVersion = 3;
constexpr uint32_t kMaxPayload = 64u << 20;
// The first ranks of a node carry evidence of hangs between nodes; the second takes over if the
// first is stopped.
constexpr int kEvidenceCarriers = 2;
// Bytes of one node's evidence.
constexpr size_t kMaxEvidence = 4u << 20;

// Values are on the wire: append only.
enum class Type : uint16_t {
  kHello = 1,
  kWelcome = 2,
  kError = 3,
  kVaultPut = 10,
  kVaultAck = 11,
  kVaultList = 12,
  kVaultInventory = 13,
  kVaultGet = 14,
  kVaultFd = 15,
  kVote = 20,
  kOutcome = 21,
  kNodeVote = 22,
  kJobOutcome = 23,
  kStackRequest = 40,
  kStackReply = 41,
  kVerdict = 42,
  kAbort = 43,
  kNotes = 44,
  kGather = 45,
  kGathered = 46,
  kEvidenceRequest = 47,
  kEvidence = 48,
  kStatusRequest = 50,
  kStatus = 51,
  kMetricsRequest = 52,
  kMetrics = 53,
  kStacksRequest = 54,
  kStacks = 55,
  kBye = 60,
  kLastWords = 61,
  kWordsHeard = 62,
  kMeshOpen = 70,
  kMeshAt = 71,
  kMeshKeep = 72,
  kMeshFetch = 73,
  kMeshFetched = 74,
};

struct Header {
  uint32_t magic;
  uint16_t version;
  uint16_t type;
  uint32_t payload_bytes;
  uint32_t reserved;
};
static_assert(sizeof(Header) == 16);

// Payload of kVote, kNodeVote (sealed) and kOutcome, kJobOutcome (committed).
struct Ballot {
  int64_t step;
  uint64_t incarnation;
  // vote, node_vote: part of the consistent-cut check (cut.h); outcomes: not 0 if the cut is why
  // the step was aborted.
  uint64_t cut;
  // vote, node_vote: part of the check that replicas agree (snapshot/state/agreement.h); outcomes:
  // not 0 if that is why the step was aborted.
  uint64_t replicas;
  uint8_t yes;        // sealed / committed
  uint8_t proposal;   // proposed cadence (snapshot/cost/cadence.h); outcomes: of a committed step;
                      // 0: none
  uint8_t plan_anew;  // all ranks are to lay out their vaults anew (snapshot/commit/plan_rounds.h)
  uint8_t reserved[5];
};
static_assert(sizeof(Ballot) == 40);

struct Frame {
  Type type;
  std::string payload;
  UniqueFd fd;
};

std::string encode(Type type, std::string_view payload);
std::string encode(Type type, const Ballot& ballot);
std::optional<Ballot> decodeBallot(std::string_view payload);  // nullopt if the size is wrong

// Takes bytes as they arrive and returns whole frames.
class FrameDecoder {
 public:
  // Frames with a longer payload are Corruption from now on. At first: kMaxPayload.
  void limitPayload(uint32_t bytes) { longest_ = bytes; }
  // Appends received bytes. A descriptor belongs to the first frame that arrives with or after it
  // and whose type carries one (kVaultPut, kVaultFd); the order is kept.
  void feed(const void* data, size_t bytes);
  void feedFd(UniqueFd fd) { fds_.push_back(std::move(fd)); }
  std::optional<Frame> next();
  // Bytes that wait for next().
  size_t waiting() const { return buffer_.size() - consumed_; }

 private:
  std::string buffer_;
  size_t consumed_ = 0;
  uint32_t longest_ = kMaxPayload;
  std::deque<UniqueFd> fds_;
};

// Blocking helpers for clients. `fd_to_send` = -1: none.
void sendFrame(int socket, Type type, std::string_view payload, int fd_to_send = -1);
// Reads the available bytes into the decoder, 64 KiB at most; returns false at the end of the
// stream. Without `take_fds`, the kernel closes descriptors that come with them.
bool receiveInto(int socket, FrameDecoder& decoder, bool take_fds = true);
Frame receiveFrame(int socket, FrameDecoder& decoder, std::chrono::milliseconds timeout);

}  // namespace reft::wire

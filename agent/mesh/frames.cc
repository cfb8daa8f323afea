#include "agent/mesh/frames.h"

#include <cstring>
#include <type_traits>

#include "intercept/base/error.h"

namespace reft::agent {

namespace {

constexpr uint32_t kFrameMagic = 0x4D544652;  // "RFTM"
constexpr int kMostRanks = 1 << 20;
// Far above what any rank has; what is taken is bounded by memory as it comes (copy_store.h).
constexpr uint64_t kMostTable = 1ull << 30;
constexpr uint64_t kMostObjects = 1ull << 33;
constexpr uint64_t kMostPayload = 1ull << 42;

struct Header {
  uint32_t magic = kFrameMagic;
  uint16_t type = 0;
  uint16_t reserved = 0;
  uint32_t payload_bytes = 0;
};
static_assert(sizeof(Header) == 12);

struct WantHead {
  int32_t world = 0;
  uint32_t count = 0;
};

template <typename T>
std::string bytesOf(const T& value) {
  static_assert(std::is_trivially_copyable_v<T>);
  return {reinterpret_cast<const char*>(&value), sizeof(value)};
}

template <typename T>
T valueIn(std::string_view bytes) {
  T value;
  std::memcpy(static_cast<void*>(&value), bytes.data(), sizeof(value));
  return value;
}

[[noreturn]] void refuse(const char* what) {
  throw Corruption(std::string("mesh: ") + what);
}

Sha256 macOf(const Sha256& key, uint64_t number, std::string_view header,
             std::string_view payload) {
  return hmacSha256({reinterpret_cast<const char*>(key.data()), key.size()},
                    {bytesOf(number), header, payload});
}

}  // namespace

std::string payloadOf(const Want& want) {
  std::string bytes = bytesOf(WantHead{want.world, static_cast<uint32_t>(want.ranks.size())});
  for (const int32_t rank : want.ranks) {
    bytes += bytesOf(rank);
  }
  return bytes;
}

std::string payloadOf(const SlotHead& head) {
  return bytesOf(head);
}

std::string payloadOf(const HeldSlot& held) {
  return bytesOf(held);
}

std::string payloadOf(const std::vector<VaultHead>& vaults) {
  std::string bytes;
  for (const VaultHead& vault : vaults) {
    bytes += bytesOf(vault);
  }
  return bytes;
}

Want wantIn(std::string_view payload) {
  if (payload.size() < sizeof(WantHead)) {
    refuse("a list of ranks that is too short");
  }
  const auto head = valueIn<WantHead>(payload);
  if (head.count > kMostWanted || head.world < 1 || head.world > kMostRanks ||
      payload.size() != sizeof(WantHead) + size_t{head.count} * sizeof(int32_t)) {
    refuse("a list of ranks that cannot be");
  }
  Want want{head.world, {}};
  for (uint32_t i = 0; i < head.count; ++i) {
    const auto rank = valueIn<int32_t>(payload.substr(sizeof(WantHead) + i * sizeof(int32_t)));
    if (rank < 0 || rank >= head.world) {
      refuse("a rank that cannot be");
    }
    want.ranks.push_back(rank);
  }
  return want;
}

SlotHead slotHeadIn(std::string_view payload) {
  if (payload.size() != sizeof(SlotHead)) {
    refuse("the head of a slot of another size");
  }
  const auto head = valueIn<SlotHead>(payload);
  const bool in_chunks =
      head.payload_bytes <= kMostPayload && head.chunk_bytes > 0 &&
      head.chunk_bytes <= kMostPayload &&
      head.chunk_count == (head.payload_bytes + head.chunk_bytes - 1) / head.chunk_bytes;
  if (head.world < 1 || head.world > kMostRanks || head.rank < 0 || head.rank >= head.world ||
      head.step < 0 || head.table_bytes > kMostTable || head.objects_bytes > kMostObjects ||
      !in_chunks || head.group_count > kMaxGroupDigests || head.plan_anew > 1 ||
      head.has_committed > 1 || head.still_count > kMaxSlots) {
    refuse("the head of a slot that cannot be");
  }
  return head;
}

std::vector<VaultHead> vaultHeadsIn(std::string_view payload) {
  std::vector<VaultHead> vaults;
  if (payload.size() % sizeof(VaultHead) != 0 || payload.size() / sizeof(VaultHead) > kMostWanted) {
    refuse("a list of vaults of another size");
  }
  for (size_t at = 0; at < payload.size(); at += sizeof(VaultHead)) {
    vaults.push_back(valueIn<VaultHead>(payload.substr(at)));
    if (vaults.back().rank < 0 || vaults.back().rank >= kMostRanks || vaults.back().resumed < -1) {
      refuse("a vault that cannot be");
    }
  }
  return vaults;
}

HeldSlot heldSlotIn(std::string_view payload) {
  if (payload.size() != sizeof(HeldSlot)) {
    refuse("an answer of another size");
  }
  const auto held = valueIn<HeldSlot>(payload);
  if (held.rank < 0 || held.rank >= kMostRanks || held.kept > Kept::kLater) {
    refuse("an answer that cannot be");
  }
  return held;
}

std::string FrameSealer::seal(MeshType type, std::string_view payload) {
  std::string frame = bytesOf(
      Header{kFrameMagic, static_cast<uint16_t>(type), 0, static_cast<uint32_t>(payload.size())});
  const Sha256 mac = macOf(key_, number_++, frame, payload);
  frame += payload;
  frame.append(reinterpret_cast<const char*>(mac.data()), mac.size());
  return frame;
}

size_t FrameReader::wants() const {
  return header_.empty() ? sizeof(Header) : valueIn<Header>(header_).payload_bytes + sizeof(Sha256);
}

std::optional<MeshFrame> FrameReader::take(std::string_view bytes) {
  if (bytes.size() != wants()) {
    refuse("a part of another size");
  }
  if (header_.empty()) {
    const auto header = valueIn<Header>(bytes);
    // Not authenticated yet: only these few bytes decide what is read next.
    if (header.magic != kFrameMagic || header.reserved != 0 ||
        header.payload_bytes > kMostMeshPayload) {
      refuse("bytes that are no frame");
    }
    header_ = bytes;
    return std::nullopt;
  }
  const std::string_view payload = bytes.substr(0, bytes.size() - sizeof(Sha256));
  Sha256 mac{};
  std::memcpy(mac.data(), bytes.data() + payload.size(), mac.size());
  if (!sameInConstantTime(mac, macOf(key_, number_++, header_, payload))) {
    refuse("a frame that is not from an agent of this job");
  }
  const auto type = static_cast<MeshType>(valueIn<Header>(header_).type);
  if (type < MeshType::kWant || type > MeshType::kAll) {
    refuse("a frame of unknown kind");
  }
  header_.clear();
  return MeshFrame{type, std::string(payload)};
}

}  // namespace reft::agent

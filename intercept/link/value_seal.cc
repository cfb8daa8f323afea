#include "intercept/link/value_seal.h"

#include <cstring>

#include "intercept/base/error.h"
#include "intercept/base/log.h"
#include "intercept/link/sha256.h"
#include "intercept/link/wire.h"

namespace reft {

namespace {

constexpr uint32_t kMagic = 0x56544652;  // "RFTV"
constexpr uint8_t kVersion = 1;
constexpr size_t kMacAt = 16;

struct Header {
  uint32_t magic;
  uint8_t version;
  uint8_t kind;
  uint16_t reserved;
  uint32_t publisher;
  uint32_t payload_bytes;
};
static_assert(sizeof(Header) == kMacAt);
static_assert(kMacAt + sizeof(Sha256) == ValueSeal::kHeaderBytes);

std::atomic<uint64_t> refused_values{0};

std::string_view bytesOf(const auto& value) {
  return {reinterpret_cast<const char*>(&value), sizeof(value)};
}

}  // namespace

size_t mostBytesOf(ValueKind kind) {
  constexpr size_t kKiB = 1024;
  switch (kind) {
    case ValueKind::kRound:
    case ValueKind::kTable:
    case ValueKind::kObjects: return size_t{1} << 30;
    case ValueKind::kReplicas: return 256 * kKiB * kKiB;
    case ValueKind::kAgent: return 4 * kKiB;
    case ValueKind::kName: return kKiB;
    case ValueKind::kRequest: return kKiB;
    case ValueKind::kAnswer: return wire::kMaxEvidence + 64 * kKiB;
    case ValueKind::kVote:
    case ValueKind::kOutcome: return 64;
  }
  return 0;
}

ValueSeal::ValueSeal(std::string_view secret, std::string_view attempt, int world) {
  if (secret.size() != kSecretBytes) {
    throw InvalidArgument("secret of the job", std::to_string(secret.size()) + " bytes",
                          std::to_string(kSecretBytes) + " bytes");
  }
  key_ = hkdfSha256(secret, attempt,
                    "reft values of the store, version " + std::to_string(kVersion) + ", " +
                        std::to_string(world) + " ranks");
}

ValueSeal::Mac ValueSeal::macOf(std::string_view header, std::string_view key,
                                std::string_view payload) const {
  const auto length = static_cast<uint32_t>(key.size());
  return hmacSha256({reinterpret_cast<const char*>(key_.data()), key_.size()},
                    {header, bytesOf(length), key, payload});
}

std::string ValueSeal::seal(ValueKind kind, std::string_view key, uint32_t publisher,
                            std::string_view payload) const {
  if (payload.size() > mostBytesOf(kind)) {
    throw InvalidArgument("value of the store", std::to_string(payload.size()) + " bytes",
                          "at most " + std::to_string(mostBytesOf(kind)));
  }
  const Header header{kMagic, kVersion,  static_cast<uint8_t>(kind),
                      0,      publisher, static_cast<uint32_t>(payload.size())};
  const Mac mac = macOf(bytesOf(header), key, payload);
  std::string value;
  value.reserve(kHeaderBytes + payload.size());
  value.append(bytesOf(header));
  value.append(reinterpret_cast<const char*>(mac.data()), mac.size());
  value.append(payload);
  return value;
}

std::optional<ValueSeal::Opened> ValueSeal::open(ValueKind kind, std::string_view key,
                                                 uint32_t publisher, std::string_view value,
                                                 size_t longest) const {
  if (value.size() < kHeaderBytes) {
    refuse(key, "too short");
    return std::nullopt;
  }
  const size_t bytes = value.size() - kHeaderBytes;
  if (bytes > mostBytesOf(kind) || bytes > longest) {
    refuse(key, "too long");
    return std::nullopt;
  }
  Header header{};
  std::memcpy(&header, value.data(), sizeof(header));
  const bool is_for_us = header.magic == kMagic && header.version == kVersion &&
                         header.kind == static_cast<uint8_t>(kind) && header.reserved == 0 &&
                         header.payload_bytes == bytes &&
                         (publisher == kAnyRank || header.publisher == publisher);
  Mac mac{};
  std::memcpy(mac.data(), value.data() + kMacAt, mac.size());
  const std::string_view payload = value.substr(kHeaderBytes);
  if (!is_for_us || !sameInConstantTime(mac, macOf(bytesOf(header), key, payload))) {
    refuse(key, "not written by the rank that it should be of, in this attempt of the job");
    return std::nullopt;
  }
  return Opened{header.publisher, std::string(payload)};
}

void ValueSeal::refuse(std::string_view key, const char* why) const {
  if (refused_values.fetch_add(1, std::memory_order_relaxed) == 0) {
    logWarn("backend", "ignored a value of the job's store: ", std::string(key), " is ", why,
            "; further ones are counted only");
  }
}

uint64_t ValueSeal::refused() {
  return refused_values.load(std::memory_order_relaxed);
}

}  // namespace reft

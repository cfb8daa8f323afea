// Seals values for the job's store, so that a rank can tell those of its job from others.
//
// Every process that reaches the port of the store can write to it. A sealed value carries an
// HMAC-SHA256 under a key that only ranks of this job's attempt have. It covers what the value is
// (kind, key, publisher) and what it says, so neither a changed value, nor one of another key, rank
// or attempt opens. It does not keep anything secret, and a value can still be deleted, or held
// back.
//
// Layout, little endian: u32 magic 'RFTV', u8 version, u8 kind, u16 0, u32 publisher, u32 bytes of
// the payload, 32 bytes MAC, payload. The MAC is over the first 16 bytes, the length of the key
// name as u32, the key name, and the payload. Its key is derived (HKDF-SHA256) from the job's
// secret, the number of the attempt and the number of ranks.
//
// Threads: const functions from any.
// Errors:  the constructor throws InvalidArgument; seal() throws InvalidArgument for a payload that
//          no reader would take. open() gives nothing for a value that is not ours, and counts it.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace reft {

// What a value is. Numbers are in the store: append only.
enum class ValueKind : uint8_t {
  kRound = 1,     // of a round of all ranks (python/reft/_link/gather.py)
  kAgent = 2,     // where the agent of a node is
  kTable = 3,     // of a snapshot
  kObjects = 4,   // small state of a rank
  kReplicas = 5,  // comparison of replica groups
  kName = 6,      // of the job, for its next attempt
  kRequest = 7,   // for evidence of a hang
  kAnswer = 8,    // evidence of a hang
  kVote = 9,      // of a node, for a commit
  kOutcome = 10,  // of a commit
};

// Most bytes of a payload; 0: there is no such kind.
size_t mostBytesOf(ValueKind kind);

class ValueSeal {
 public:
  static constexpr size_t kSecretBytes = 32;
  static constexpr size_t kHeaderBytes = 48;
  static constexpr uint32_t kAnyRank = UINT32_MAX;  // in open(): any publisher

  struct Opened {
    uint32_t publisher = 0;
    std::string payload;
  };

  // `attempt`: names the attempt, and no other one of any job.
  ValueSeal(std::string_view secret, std::string_view attempt, int world);

  // A value to write to `key`.
  std::string seal(ValueKind kind, std::string_view key, uint32_t publisher,
                   std::string_view payload) const;
  // Of a value that was read from `key`; nothing if no rank of this attempt has sealed it there.
  // `longest`: a limit in addition to that of the kind.
  std::optional<Opened> open(ValueKind kind, std::string_view key, uint32_t publisher,
                             std::string_view value, size_t longest = SIZE_MAX) const;

  // How many values this process has refused, with all seals.
  static uint64_t refused();

 private:
  using Mac = std::array<unsigned char, 32>;
  Mac macOf(std::string_view header, std::string_view key, std::string_view payload) const;
  void refuse(std::string_view key, const char* why) const;

  Mac key_{};
};

}  // namespace reft

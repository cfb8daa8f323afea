// JSON payloads of the peers, checked field by field.
//
// Threads: re-entrant. Errors: InvalidArgument names the field, its value and what is allowed, for anything that is not
// what it should be; the payload may come from anybody of this user.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace reft::agent {

constexpr int kMaxRank = 1 << 20;

struct Hello {
  bool is_rank = false;
  std::string version;
  std::string job;
  int node = 0;
  int rank = -1;
  int local_rank = 0;
  int world = 1;
  int local_world = 1;
  int pid = 0;
  uint64_t incarnation = 0;
  int attempt = 0;
  int restarts_left = 0;  // how often the launcher would start the ranks again
};

Hello parseHello(std::string_view payload);

struct VaultPut {
  int rank = 0;
  uint64_t bytes = 0;
};

VaultPut parseVaultPut(std::string_view payload);
int parseVaultGet(std::string_view payload);                    // rank
std::vector<int> parseStacksRequest(std::string_view payload);  // empty = all ranks
uint64_t parseStackReplyId(std::string_view payload);

// What a rank says about its state: (about, where, kind, why), at most kMaxNotes of them, texts of at most 512 bytes.
constexpr size_t kMaxNotes = 256;
using Note = std::array<std::string, 4>;
std::vector<Note> parseNotes(std::string_view payload);

// {"what", "hint"} of kError.
std::string errorPayload(const std::string& what, const std::string& hint);

// A name that becomes a directory: letters, digits, `.`, `_`, `-`, at most 128, not starting with a dot.
bool validJobId(std::string_view job);

}  // namespace reft::agent

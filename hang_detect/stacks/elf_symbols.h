// Where an ELF file (64 bits, little endian) says that its symbols are. Only what finding them
// needs.
//
// Threads: free functions, re-entrant. Errors: none: a file that is damaged or hostile has fewer
// symbols, or is none.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace reft {

// Reads exactly `bytes` at `offset`; false if that is not possible.
using ReadAt = std::function<bool(uint64_t offset, void* into, size_t bytes)>;

struct ElfSymbols {
  bool moves = false;          // loaded at any address, which `first_address` is then taken off
  uint64_t first_address = 0;  // of its first page
  std::map<std::string, uint64_t> value;  // of those that were looked for and are defined
};

struct ElfFunction {
  std::string name;    // "" = not known
  uint64_t begin = 0;  // of the function, as the file counts
};

// The function that holds each of these addresses, which are counted as the file does, not as it is
// loaded. Of several names for one function, that which is seen from outside, with the fewest
// underscores before it.
std::map<uint64_t, ElfFunction> findElfFunctions(const ReadAt& read,
                                                 std::vector<uint64_t> addresses);

// nullopt if the file is no such ELF file.
std::optional<ElfSymbols> findElfSymbols(const ReadAt& read,
                                         const std::vector<std::string_view>& names);

}  // namespace reft

// Symbols of a 64-bit little-endian ELF file: addresses of names, and names of addresses.
//
// Threads: free functions, re-entrant. Errors: none: a damaged or hostile file yields fewer
// symbols, or nullopt.
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

// Reads exactly `bytes` at `offset`; false on failure.
using ReadAt = std::function<bool(uint64_t offset, void* into, size_t bytes)>;

struct ElfSymbols {
  bool moves = false;          // position-independent: addresses are relative to first_address
  uint64_t first_address = 0;  // address of the file's first page
  std::map<std::string, uint64_t> value;  // the requested symbols that are defined
};

struct ElfFunction {
  std::string name;    // "" = unknown
  uint64_t begin = 0;  // its first address, as the file counts
};

// The function around each of these addresses, which count as in the file, not as loaded. Of
// several names for one function: a global one, with the fewest leading underscores.
std::map<uint64_t, ElfFunction> findElfFunctions(const ReadAt& read,
                                                 std::vector<uint64_t> addresses);

// nullopt if the file is not of this kind.
std::optional<ElfSymbols> findElfSymbols(const ReadAt& read,
                                         const std::vector<std::string_view>& names);

}  // namespace reft

// Hashes of words, for keys, positions and pseudo-random draws. Bytes are hashed by
// snapshot/vault/hash.h.
//
// Ranks compare some of the results and files hold others: the functions never change.
//
// Threads: re-entrant. Errors: none.
#pragma once

#include <cstdint>

namespace reft {

// 2^64 divided by the golden ratio: multiples of it are far apart.
inline constexpr uint64_t kGoldenRatio = 0x9E3779B97F4A7C15;

// The finaliser of splitmix64: every bit of `word` moves every bit of the result; 0 stays 0.
constexpr uint64_t mixed(uint64_t word) {
  word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9;
  word = (word ^ (word >> 27)) * 0x94D049BB133111EB;
  return word ^ (word >> 31);
}

// splitmix64: the number that follows `word`.
constexpr uint64_t splitmix64(uint64_t word) {
  return mixed(word + kGoldenRatio);
}

// Adds a word to the hash of a sequence. One multiplication: it is on the path of every op.
constexpr uint64_t hashCombine(uint64_t hash, uint64_t word) {
  hash = (hash ^ word) * kGoldenRatio;
  return hash ^ (hash >> 32);
}

}  // namespace reft

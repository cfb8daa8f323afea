// Names of ops, groups, ranks, types, sizes and times, as every report prints them.
//
// Threads: free functions, re-entrant. Errors: none; foreign text comes out as printable ASCII.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "hang_detect/evidence/evidence.h"
#include "intercept/record/op_log.h"

namespace reft::words {

std::string groupName(const OpGroup& group);
std::string groupName(const RankEvidence& rank, uint32_t group);  // "#7" if the rank has none such
std::string opName(const OpEntry& op, const RankEvidence& rank);  // "recv seq 7 of group pp from 0"
std::string rankList(const std::vector<int>& ranks);              // "rank 2", "ranks 0-3 7"
std::string nodeList(const std::vector<int>& nodes);              // "node 1", "nodes 1 3-5"
std::string bytes(uint64_t bytes);                                // "4.0 MiB"
std::string seconds(double seconds);                              // "31.2 s", "5 min"
std::string dtypeName(uint8_t dtype);  // c10::ScalarType as "float32"; 255: "no dtype"
std::string reduceOpName(uint8_t op);  // c10d::ReduceOp::RedOpType as "sum"; 255: "no reduction"

}  // namespace reft::words

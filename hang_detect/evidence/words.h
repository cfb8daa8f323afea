// How the report names things: ops, groups, ranks, places, sizes and times.
//
// Threads: free functions, re-entrant. Errors: none; foreign text comes out as printable ASCII.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "hang_detect/evidence/evidence.h"
#include "hang_detect/stacks/stacks.h"

namespace reft::words {

// Said of a dead rank in whose cgroup the OOM killer has been, oom_kills.h.
inline constexpr char kOomKilled[] =
    "the kernel's OOM killer has ended a process of its cgroup since it began";

std::string printable(std::string_view text,
                      size_t limit = 1000);   // no control characters: it may reach a terminal
std::string groupName(const OpGroup& group);  // up to the NUL, if there is one
bool isOfLibrary(std::string_view file);      // of the interpreter or of a package, not the user's
std::string groupName(const RankEvidence& rank,
                      uint32_t group);  // "#7" if the rank has no such group
bool isOpen(
    const OpEntry& op);  // begun, and not known to be done: ops on a device are seldom known to be
bool isHeld(const OpEntry& op);  // open, and its caller is inside the call or inside wait()
std::string opName(const OpEntry& op, const RankEvidence& rank);  // "recv seq 7 of group pp from 0"
std::string rankList(const std::vector<int>& ranks);              // "rank 2", "ranks 0-3 7"
std::string bytes(uint64_t bytes);                                // "4.0 MiB"
std::string seconds(double seconds);                              // "31.2 s", "2 min 5 s"
std::string dtypeName(uint8_t dtype);  // c10::ScalarType as Python names it: "float32"; "no dtype"
std::string reduceOpName(uint8_t op);  // c10d::ReduceOp::RedOpType: "sum"
std::string fileName(std::string_view path);  // last part
// Where a thread stands: "train.py:88 load_batch"; empty if there is no stack. A frame of the
// interpreter's or torch's own is preceded by the nearest one that is not.
std::string placeOf(const ThreadStack& thread);
std::string mainThreadPlace(const RankEvidence& rank);
// Breaks at blanks; lines after the first start with `indent` blanks.
std::string wrap(std::string_view text, size_t indent, size_t columns = 80);

}  // namespace reft::words

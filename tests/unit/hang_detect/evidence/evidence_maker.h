// Makes evidence for tests of the verdict engine.
#pragma once

#include <cstring>
#include <string>
#include <vector>

#include "hang_detect/evidence/evidence.h"
#include "hang_detect/verdict/verdict.h"

namespace reft::testing_evidence {

constexpr int64_t kNow = 1'000'000'000'000;
constexpr int64_t kSec = 1'000'000'000;
constexpr double kStillSec = 31;  // since the newest mark

inline OpGroup group(const std::string& name, int rank, int size) {
  OpGroup result{};
  std::strncpy(result.name, name.c_str(), OpGroup::kNameBytes - 1);
  result.rank = rank;
  result.size = size;
  return result;
}

inline OpEntry op(OpKind kind, uint32_t seq, bool done, int32_t peer = -1, uint32_t group = 0) {
  OpEntry result;
  result.ticket = seq;
  result.kind = kind;
  result.seq = seq;
  result.peer = peer;
  result.group = group;
  result.bytes = 4u << 20;
  result.signature = 7;
  result.call_site = 1;
  result.begin_ns =
      static_cast<uint64_t>(kNow - static_cast<int64_t>(kStillSec * kSec)) - 10'000'000;
  result.enqueued_ns = result.begin_ns + 1000;
  result.wait_begin_ns = result.begin_ns + 2000;
  if (done) {
    result.begin_ns -= 1'000'000'000;
    result.enqueued_ns -= 1'000'000'000;
    result.wait_begin_ns -= 1'000'000'000;
    result.wait_end_ns = result.done_ns = result.begin_ns + 5'000'000;
  }
  return result;
}

// `done` finished all_reduces, then what is given.
inline std::vector<OpEntry> after(uint32_t done, std::vector<OpEntry> rest = {}) {
  std::vector<OpEntry> tail;
  for (uint32_t seq = 1; seq <= done; ++seq) {
    tail.push_back(op(OpKind::kAllreduce, seq, true));
  }
  tail.insert(tail.end(), rest.begin(), rest.end());
  return tail;
}

inline std::string stackOf(const std::string& frames) {
  return "Current thread 0x00007f0000000002 (most recent call first):\n" + frames;
}

inline RankEvidence rankOf(int rank, int world, std::vector<OpEntry> tail) {
  RankEvidence result;
  result.rank = rank;
  result.pid = 1000 + rank;
  result.host = "n0";
  result.alive = result.answered = true;
  result.proc_state = "S";
  result.groups = {group("default", rank, world)};
  result.ops_begun = tail.size();
  result.tail = std::move(tail);
  result.stacks = stackOf(
      "  File \"/home/u/train.py\", line 88 in load_batch\n  File \"/home/u/train.py\", line 120 "
      "in <module>\n");
  return result;
}

inline HangEvidence job(std::vector<RankEvidence> ranks) {
  HangEvidence result;
  result.job = "demo";
  result.world = static_cast<int>(ranks.size());
  result.now_ns = kNow;
  result.suspect_sec = 30;
  result.ranks = std::move(ranks);
  return result;
}

inline std::vector<int> ranksOf(const std::vector<Culprit>& list) {
  std::vector<int> ranks;
  for (const Culprit& culprit : list) {
    ranks.push_back(culprit.rank);
  }
  return ranks;
}

}  // namespace reft::testing_evidence

#include "hang_detect/verdict/disagreement.h"

#include <algorithm>
#include <map>
#include <optional>
#include <unordered_map>

#include "hang_detect/evidence/ops.h"
#include "hang_detect/verdict/verdict_words.h"

namespace reft {

namespace {

std::optional<uint32_t> firstDisagreement(const GroupLog& group) {
  std::unordered_map<uint32_t, const OpEntry*> first;
  std::optional<uint32_t> result;
  for (const Member& member : group.members) {
    for (const OpEntry* op : member.ops) {
      const auto [at, added] = first.emplace(op->seq, op);
      if (!added && !(contractOf(*at->second) == contractOf(*op))) {
        result = std::min(result.value_or(op->seq), op->seq);
      }
    }
  }
  return result;
}

const char* classOf(const OpEntry& op, const OpEntry& usual) {
  return op.kind != usual.kind || op.reduce_op != usual.reduce_op ? "op_mismatch"
         : op.dtype != usual.dtype                                ? "dtype_mismatch"
         : contractOf(op).root != contractOf(usual).root          ? "root_mismatch"
                                                                  : "size_mismatch";
}

// nullopt if one rank's log holds two ops of this number, which is damage.
std::optional<Disagreement> describe(const JobView& view, const GroupLog& group, uint32_t seq) {
  Disagreement found;
  found.group = group.name;
  found.seq = seq;
  std::map<OpContract, OpSide> sides;
  for (const Member& member : group.members) {
    if (const OpEntry* op = member.find(seq)) {
      OpSide& side = sides[contractOf(*op)];
      side.op = side.op != nullptr ? side.op : op;
      side.ranks.push_back(member.rank);
      found.ranks.push_back(view.ranks()[member.rank].rank);
    }
    found.waited_for =
        found.waited_for || std::any_of(member.from(seq), member.ops.end(), [&](const OpEntry* op) {
          return view.isHeld(member.rank, *op) || op->failed;
        });
  }
  if (sides.size() < 2) {
    return std::nullopt;
  }
  std::sort(found.ranks.begin(), found.ranks.end());
  const auto usual = std::max_element(sides.begin(), sides.end(), [](const auto& a, const auto& b) {
    return a.second.ranks.size() < b.second.ranks.size();
  });
  const bool majority = static_cast<int64_t>(usual->second.ranks.size()) * 2 > group.size;
  std::vector<OpSide> all_sides;
  for (const auto& [contract, side] : sides) {
    all_sides.push_back(side);
    if (contract == usual->first) {
      continue;
    }
    if (found.what.empty()) {
      found.what = classOf(*side.op, *usual->second.op);
    }
    if (majority) {
      const std::vector<int> numbers = view.numbersOf(side.ranks);
      found.minority.insert(found.minority.end(), numbers.begin(), numbers.end());
    }
  }
  std::sort(found.minority.begin(), found.minority.end());
  // The odd ranks first: a screen may have no room for more.
  std::stable_sort(all_sides.begin(), all_sides.end(), [](const OpSide& a, const OpSide& b) {
    return a.ranks.size() < b.ranks.size();
  });
  found.text = disagreementSentence(view, group, seq, all_sides);
  return found;
}

}  // namespace

std::vector<Disagreement> findDisagreements(const JobView& view) {
  std::vector<Disagreement> result;
  for (const GroupLog& group : view.groups()) {
    if (const auto seq = firstDisagreement(group)) {
      if (auto found = describe(view, group, *seq)) {
        found->log = static_cast<size_t>(&group - view.groups().data());
        result.push_back(std::move(*found));
      }
    }
  }
  return result;
}

}  // namespace reft

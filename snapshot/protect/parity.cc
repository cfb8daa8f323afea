#include "snapshot/protect/parity.h"

#include <algorithm>
#include <cstddef>
#include <utility>

#include "snapshot/state/parity_cells.h"

namespace reft {

namespace {

// Splits members into sets of at most kMostInAParitySet that differ by one member at most.
void split(const std::vector<uint32_t>& members, ParitySets& sets) {
  const size_t count = (members.size() + kMostInAParitySet - 1) / kMostInAParitySet;
  auto at = members.begin();
  for (size_t set = 0; set < count; ++set) {
    const size_t size = members.size() / count + (set < members.size() % count ? 1 : 0);
    sets.emplace_back(at, at + static_cast<ptrdiff_t>(size));
    at += static_cast<ptrdiff_t>(size);
  }
}

bool holds(const std::vector<uint32_t>& parts, uint32_t part) {
  return std::ranges::find(parts, part) != parts.end();
}

}  // namespace

double Parity::storedShards(const MemberNodes& nodes) const {
  double most = 1;
  for (const std::vector<uint32_t>& set : paritySets(nodes)) {
    most = std::max(most, 1 + 1.0 / static_cast<double>(set.size() - 1));
  }
  return most;
}

ParitySets Parity::paritySets(const MemberNodes& nodes) const {
  ParitySets sets;
  if (nodes.size() < 2) {
    return sets;
  }
  const std::vector<std::vector<uint32_t>> rows = rowsOf(nodes);
  if (rows.back().size() > 1) {
    for (const std::vector<uint32_t>& row : rows) {
      split(row, sets);
    }
  } else {
    // One node has more than half of the members: its loss is too much in any case.
    split(ringOf(nodes), sets);
  }
  return sets;
}

StoredShards Parity::placement(const MemberNodes& nodes) const {
  const auto members = static_cast<uint32_t>(nodes.size());
  StoredShards stored(members);
  for (uint32_t member = 0; member < members; ++member) {
    stored[member].push_back(member);
  }
  for (const std::vector<uint32_t>& set : paritySets(nodes)) {
    for (const uint32_t member : set) {
      stored[member].push_back(members + member);
    }
  }
  return stored;
}

std::vector<std::vector<Recipe>> Parity::recipes(const StoredShards& stored,
                                                 const ParitySets& sets) const {
  const auto members = static_cast<uint32_t>(stored.size());
  std::vector<std::vector<Recipe>> found(members);
  for (uint32_t member = 0; member < members; ++member) {
    if (holds(stored[member], member)) {
      found[member].push_back({Decode::kCopy, {{member, member}}});
    }
  }
  for (const std::vector<uint32_t>& set : sets) {
    std::vector<uint32_t> lost;
    Recipe recipe{Decode::kXor, {}};
    for (const uint32_t member : set) {
      if (found[member].empty()) {
        lost.push_back(member);
      } else if (holds(stored[member], members + member)) {
        recipe.parts.push_back({member, members + member});
      }
    }
    if (lost.size() == 1 && set.size() > 1 && recipe.parts.size() == set.size() - 1) {
      found[lost.front()].push_back(std::move(recipe));
    }
  }
  return found;
}

// Two lost members of a set are too many.
Survival Parity::survival(const MemberNodes& nodes) const {
  if (nodes.size() < 2) {
    return {0, {0}};
  }
  Survival found;
  for (const std::vector<uint32_t>& set : paritySets(nodes)) {
    for (size_t a = 0; a < set.size(); ++a) {
      for (size_t b = a + 1; b < set.size(); ++b) {
        if (nodes[set[a]] == nodes[set[b]]) {
          return {0, {std::min(set[a], set[b]), std::max(set[a], set[b])}};
        }
      }
    }
    if (found.weakest.empty()) {
      found = {1, {std::min(set[0], set[1]), std::max(set[0], set[1])}};
    }
  }
  return found;
}

}  // namespace reft

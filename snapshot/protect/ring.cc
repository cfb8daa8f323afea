#include "snapshot/protect/ring.h"

#include <algorithm>
#include <unordered_map>

namespace reft {

std::vector<std::vector<uint32_t>> rowsOf(const MemberNodes& nodes) {
  std::vector<std::vector<uint32_t>> all;  // the members of each node
  std::unordered_map<int, size_t> index;
  for (uint32_t member = 0; member < nodes.size(); ++member) {
    const auto [at, is_new] = index.emplace(nodes[member], all.size());
    if (is_new) {
      all.emplace_back();
    }
    all[at->second].push_back(member);
  }
  std::stable_sort(all.begin(), all.end(),
                   [](const auto& a, const auto& b) { return a.size() > b.size(); });
  // Deal the nodes' members, the largest node first: no node has more than there are rows.
  std::vector<std::vector<uint32_t>> rows(all.empty() ? 0 : all.front().size());
  size_t next = 0;
  for (const std::vector<uint32_t>& members : all) {
    for (const uint32_t member : members) {
      rows[next++ % rows.size()].push_back(member);
    }
  }
  return rows;
}

// Two members of a node are on different rows, one row or more apart.
std::vector<uint32_t> ringOf(const MemberNodes& nodes) {
  std::vector<uint32_t> ring;
  ring.reserve(nodes.size());
  for (const std::vector<uint32_t>& row : rowsOf(nodes)) {
    ring.insert(ring.end(), row.begin(), row.end());
  }
  return ring;
}

}  // namespace reft

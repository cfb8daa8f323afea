#include "hang_detect/verdict/dead_paths.h"

#include <algorithm>
#include <map>
#include <utility>

#include "hang_detect/evidence/words.h"
#include "hang_detect/stacks/printable.h"

namespace reft {

namespace {

constexpr size_t kMaxSentences = 4;

// An address of the host itself is another one on each host.
std::string keyOf(const std::string& address, int node) {
  return address.starts_with("127.") || address.starts_with("[::1]")
             ? std::to_string(node) + " " + address
             : address;
}

std::string nameOf(const RankEvidence& rank) {
  return "rank " + std::to_string(rank.rank) + " (" +
         (rank.host.empty() ? "node " + std::to_string(rank.node) : printable(rank.host, 40)) + ")";
}

std::string resentOf(const DeadPath& path) {
  return path.resent == 0 ? ""
                          : ": " + words::bytes(static_cast<uint64_t>(path.unacknowledged)) +
                                " wait, sent again " + std::to_string(path.resent) + " times";
}

std::string sentenceOf(const RankEvidence& from, const RankEvidence& to, const DeadPath& path) {
  if (path.both) {
    return "nothing passes between " + nameOf(from) + " and " + nameOf(to) + resentOf(path);
  }
  return path.resent > 0
             ? nameOf(to) + " does not acknowledge what " + nameOf(from) + " sends" + resentOf(path)
             : "nothing comes to " + nameOf(to) + " from " + nameOf(from);
}

}  // namespace

std::vector<DeadPath> deadPaths(const JobView& view, const std::set<size_t>& among) {
  std::map<std::string, size_t> owners;
  for (size_t r = 0; r < view.ranks().size(); ++r) {
    for (const std::string& address : view.ranks()[r].connections.addresses) {
      owners.emplace(keyOf(address, view.ranks()[r].node), r);
    }
  }
  std::map<std::pair<size_t, size_t>, DeadPath> directed;
  for (const size_t from : among) {
    const RankEvidence& rank = view.ranks()[from];
    for (const DeadConnection& dead : rank.connections.dead) {
      const auto owner = owners.find(keyOf(dead.peer, rank.node));
      if (owner == owners.end() || owner->second == from || !among.contains(owner->second)) {
        continue;
      }
      DeadPath& path = directed[{from, owner->second}];
      path.from = from;
      path.to = owner->second;
      path.unacknowledged += dead.unacknowledged;
      path.resent = std::max(path.resent, dead.resent);
    }
  }
  std::vector<DeadPath> paths;
  for (auto& [ends, path] : directed) {
    const auto back = directed.find({ends.second, ends.first});
    path.both = back != directed.end();
    if (!path.both || ends.first < ends.second) {
      paths.push_back(path);
    }
  }
  return paths;
}

std::vector<std::string> deadPathSentences(const JobView& view,
                                           const std::vector<DeadPath>& paths) {
  std::vector<std::string> sentences;
  std::set<int> common;
  for (size_t i = 0; i < paths.size(); ++i) {
    const DeadPath& path = paths[i];
    const RankEvidence& from = view.ranks()[path.from];
    const RankEvidence& to = view.ranks()[path.to];
    if (i < kMaxSentences) {
      sentences.push_back(sentenceOf(from, to, path));
    }
    const std::set<int> ends{from.node, to.node};
    if (i == 0) {
      common = ends;
    }
    std::erase_if(common, [&](int node) { return !ends.contains(node); });
  }
  if (paths.size() > kMaxSentences) {
    sentences.push_back("and " + std::to_string(paths.size() - kMaxSentences) + " more such pairs");
  }
  std::set<int> nodes;
  for (const DeadPath& path : paths) {
    nodes.insert({view.ranks()[path.from].node, view.ranks()[path.to].node});
  }
  if (common.size() == 1 && nodes.size() > 2) {
    sentences.push_back("node " + std::to_string(*common.begin()) + " is one end of all of them");
  }
  return sentences;
}

}  // namespace reft

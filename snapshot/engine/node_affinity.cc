#include "snapshot/engine/node_affinity.h"

#include <charconv>
#include <exception>
#include <fstream>
#include <iterator>
#include <utility>

namespace reft {

namespace {

std::optional<cpu_set_t> cpusOf(const std::string& path) {
  std::ifstream file(path);
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  return parseCpuList(text);
}

}  // namespace

std::optional<cpu_set_t> parseCpuList(std::string_view text) {
  while (!text.empty() && (text.back() == '\n' || text.back() == ' ')) {
    text.remove_suffix(1);
  }
  cpu_set_t cpus;
  CPU_ZERO(&cpus);
  const char* at = text.data();
  const char* const end = at + text.size();
  const auto number = [&](unsigned& value) {
    const auto [next, error] = std::from_chars(at, end, value);
    at = next;
    return error == std::errc() && value < CPU_SETSIZE;
  };
  while (at != end) {
    unsigned first = 0;
    if (!number(first)) {
      return std::nullopt;
    }
    unsigned last = first;
    if (at != end && *at == '-' && (++at, !number(last) || last < first)) {
      return std::nullopt;
    }
    for (unsigned cpu = first; cpu <= last; ++cpu) {
      CPU_SET(cpu, &cpus);
    }
    if (at != end && (*at++ != ',' || at == end)) {
      return std::nullopt;
    }
  }
  return cpus;
}

NodeAffinity::NodeAffinity(std::string nodes) : nodes_(std::move(nodes)) {
  const bool known = ::sched_getaffinity(0, sizeof(allowed_), &allowed_) == 0;
  const auto online = cpusOf(nodes_ + "/online");  // numbers of nodes, written alike
  several_ = known && online && CPU_COUNT(&*online) > 1;
}

int NodeAffinity::currentNode() noexcept {
  unsigned cpu = 0;
  unsigned node = 0;
  return ::getcpu(&cpu, &node) == 0 ? static_cast<int>(node) : -1;
}

void NodeAffinity::follow(int node) noexcept {
  const bool settled = node == std::exchange(seen_, node);
  if (!several_ || node < 0 || !settled || node == followed_) {
    return;
  }
  followed_ = node;
  try {
    const auto cpus = cpusOf(nodes_ + "/node" + std::to_string(node) + "/cpulist");
    if (!cpus) {
      return;
    }
    cpu_set_t wanted;
    CPU_AND(&wanted, &*cpus, &allowed_);
    if (CPU_COUNT(&wanted) > 0) {
      ::sched_setaffinity(0, sizeof(wanted), &wanted);
    }
  } catch (const std::exception&) {  // no memory: it stays where it is
  }
}

}  // namespace reft

#include "hang_detect/health/network_reader.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <optional>
#include <system_error>

#include "hang_detect/stacks/printable.h"
#include "intercept/base/unique_fd.h"

namespace reft {

namespace {

namespace fs = std::filesystem;

constexpr size_t kMaxEntries = 4096;  // of a folder that are looked at

// The first line of a small file; "" if it cannot be read.
std::string lineOf(const fs::path& path) {
  const UniqueFd file(::open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC | O_NOCTTY));
  char text[128];
  const ssize_t got = file ? ::read(file.get(), text, sizeof(text)) : -1;
  const std::string_view all(text, static_cast<size_t>(std::max<ssize_t>(got, 0)));
  return printable(all.substr(0, all.find('\n')), sizeof(text));
}

std::optional<uint64_t> numberOf(const fs::path& path) {
  const std::string text = lineOf(path);
  uint64_t value = 0;
  const auto [end, problem] = std::from_chars(text.data(), text.data() + text.size(), value);
  return problem == std::errc() && end == text.data() + text.size() ? std::optional(value)
                                                                    : std::nullopt;
}

// In order, so that two samples list the same devices.
std::vector<std::string> namesIn(const fs::path& folder) {
  std::vector<std::string> names;
  std::error_code problem;
  for (fs::directory_iterator at(folder, problem), end;
       !problem && at != end && names.size() < kMaxEntries; at.increment(problem)) {
    names.push_back(at->path().filename().string());
  }
  std::sort(names.begin(), names.end());
  return names;
}

bool isThere(const fs::path& path) {
  std::error_code problem;
  return fs::exists(path, problem);
}

void addCounters(NetworkSample& device, HardwareCounter::Kind kind,
                 std::initializer_list<fs::path> folders) {
  for (const HardwareCounter& counter : hardwareCounters()) {
    for (const fs::path& folder : folders) {
      if (const auto value =
              counter.kind == kind ? numberOf(folder / counter.name) : std::nullopt) {
        device.counters.emplace(counter.name, *value);
        break;
      }
    }
  }
}

void readNics(const fs::path& net, std::vector<NetworkSample>& found) {
  std::vector<std::string> names = namesIn(net);
  std::erase(names, "lo");
  const auto is_virtual = [&](const std::string& name) { return !isThere(net / name / "device"); };
  if (!std::ranges::all_of(names, is_virtual)) {
    std::erase_if(names, is_virtual);
  }
  for (const std::string& name : names) {
    if (found.size() >= kMaxNetworkDevices / 2 || !isThere(net / name / "statistics")) {
      continue;  // the other half is for ports
    }
    NetworkSample& device = found.emplace_back();
    device.device = printable(name, 32);
    device.state = lineOf(net / name / "operstate");
    addCounters(device, HardwareCounter::Kind::kNic, {net / name / "statistics", net / name});
  }
}

void readPorts(const fs::path& infiniband, std::vector<NetworkSample>& found) {
  for (const std::string& card : namesIn(infiniband)) {
    for (const std::string& port : namesIn(infiniband / card / "ports")) {
      if (found.size() >= kMaxNetworkDevices) {
        return;
      }
      const fs::path folder = infiniband / card / "ports" / port;
      NetworkSample& device = found.emplace_back();
      device.device = printable(card, 32) + " port " + printable(port, 8);
      device.infiniband = true;
      const std::string state = lineOf(folder / "state");  // "4: ACTIVE"
      const size_t word = state.find(": ");
      device.state = word == state.npos ? state : state.substr(word + 2);
      std::ranges::transform(device.state, device.state.begin(), [](char c) {
        return static_cast<char>(c >= 'A' && c <= 'Z' ? c - 'A' + 'a' : c);
      });
      addCounters(device, HardwareCounter::Kind::kPort,
                  {folder / "counters", folder / "hw_counters"});
    }
  }
}

}  // namespace

std::vector<NetworkSample> readNetwork(const std::string& sys) {
  std::vector<NetworkSample> found;
  readNics(fs::path(sys) / "class/net", found);
  readPorts(fs::path(sys) / "class/infiniband", found);
  return found;
}

}  // namespace reft

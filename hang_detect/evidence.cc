#include <charconv>
#include <cstdio>
#include <cstring>
#include <exception>

#include <fcntl.h>
#include <unistd.h>

#include <nlohmann/json.hpp>

#include "hang_detect/report.h"
#include "intercept/base/unique_fd.h"

namespace reft {

namespace {

void addError(RankEvidence& rank, const char* what, const std::string& text) noexcept {
  try {
    rank.error += (rank.error.empty() ? "" : "; ") + std::string(what) + ": " + text;
  } catch (...) {  // NOLINT(bugprone-empty-catch): no memory left for the sentence
  }
}

}  // namespace

void addOpLog(RankEvidence& rank, const void* area, size_t bytes, int64_t now_ns, size_t count) noexcept {
  try {
    const OpLogReader reader(area, bytes);
    rank.groups = reader.groups();
    rank.tail = reader.tail(count);
    rank.ops_begun = reader.opsBegun();
    const uint64_t heartbeat = reader.heartbeatNs();
    const auto now = static_cast<uint64_t>(now_ns);
    rank.heartbeat_age_ns = heartbeat != 0 && heartbeat < now ? now - heartbeat : 0;
  } catch (const std::exception& problem) {
    addError(rank, "op log", problem.what());
  }
}

void addStackReply(RankEvidence& rank, std::string_view payload) noexcept {
  try {
    const auto reply = nlohmann::json::parse(payload, nullptr, /*allow_exceptions=*/false);
    if (!reply.is_object() || !reply.contains("text") || !reply["text"].is_string()) {
      addError(rank, "stacks", "the reply is not one");
      return;
    }
    rank.answered = true;
    rank.stacks_text = reply["text"].get<std::string>();
    if (reply.contains("error") && reply["error"].is_string() && !reply["error"].get<std::string>().empty()) {
      addError(rank, "stacks", reply["error"].get<std::string>());
    }
    if (reply.contains("call_sites") && reply["call_sites"].is_object()) {
      for (const auto& [id, text] : reply["call_sites"].items()) {
        uint32_t number = 0;
        const auto [end, problem] = std::from_chars(id.data(), id.data() + id.size(), number);
        if (problem == std::errc() && end == id.data() + id.size() && text.is_string()) {
          rank.call_sites.emplace(number, text.get<std::string>());
        }
      }
    }
  } catch (const std::exception& problem) {
    addError(rank, "stacks", problem.what());
  }
}

void addProcessState(RankEvidence& rank) noexcept {
  rank.alive = false;
  rank.proc_state.clear();
  if (rank.pid <= 0) {
    return;
  }
  char path[64];
  std::snprintf(path, sizeof(path), "/proc/%d/stat", rank.pid);
  UniqueFd fd(::open(path, O_RDONLY | O_CLOEXEC));
  char text[512];
  const ssize_t got = fd ? ::read(fd.get(), text, sizeof(text)) : -1;
  if (got <= 0) {
    return;
  }
  // The state follows the last parenthesis: the name before may hold anything.
  const auto* close = static_cast<const char*>(::memrchr(text, ')', static_cast<size_t>(got)));
  if (close == nullptr || close + 2 >= text + got) {
    return;
  }
  rank.proc_state.assign(1, close[2]);
  rank.alive = close[2] != 'Z' && close[2] != 'X';
}

}  // namespace reft

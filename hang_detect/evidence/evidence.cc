#include "hang_detect/evidence/evidence.h"

#include <exception>

#include <nlohmann/json.hpp>

namespace reft {

namespace {

void addError(RankEvidence& rank, const char* what, const std::string& text) noexcept {
  try {
    rank.error += (rank.error.empty() ? "" : "; ") + std::string(what) + ": " + text;
  } catch (...) {  // NOLINT(bugprone-empty-catch): no memory left for the sentence
  }
}

}  // namespace

void addOpLog(RankEvidence& rank, const void* area, size_t bytes, int64_t now_ns, size_t count,
              uint32_t writer) noexcept {
  try {
    const OpLogReader reader(area, bytes);
    if (writer != 0 && reader.writerPid() != writer) {
      addError(rank, "op log", "the process has not begun its own yet");
      return;
    }
    rank.groups = reader.groups();
    rank.tail = reader.tail(count);
    rank.call_sites = reader.callSites();
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
    rank.stacks = reply["text"].get<std::string>();
    if (reply.contains("error") && reply["error"].is_string() &&
        !reply["error"].get<std::string>().empty()) {
      addError(rank, "stacks", reply["error"].get<std::string>());
    }
  } catch (const std::exception& problem) {
    addError(rank, "stacks", problem.what());
  }
}

}  // namespace reft

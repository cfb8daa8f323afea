#include "hang_detect/stack_reply.h"

#include <memory>

#include <unistd.h>

#include <nlohmann/json.hpp>

namespace reft {

std::string stackReplyJson(std::string_view request, int rank, const StackDump& dump,
                           const std::map<uint32_t, std::string>& call_sites) {
  const auto asked = nlohmann::json::parse(request, nullptr, /*allow_exceptions=*/false);
  nlohmann::json reply;
  reply["id"] = asked.is_object() && asked.contains("id") ? asked["id"] : nlohmann::json();
  reply["rank"] = rank;
  reply["pid"] = ::getpid();
  reply["text"] = dump.text;
  reply["error"] = dump.error;
  reply["call_sites"] = nlohmann::json::object();
  for (const auto& [id, text] : call_sites) {
    reply["call_sites"][std::to_string(id)] = text;
  }
  return reply.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

void installStackReplies(AgentClient& client, int rank, StackPrinter printer, CallSites call_sites) {
  auto dumper = std::make_shared<StackDumper>(printer);
  // The handler lives in the client and runs on its thread, which the client's destructor joins: `client` is alive.
  client.handle(wire::Type::kStackRequest, [&client, dumper, rank, call_sites](const wire::Frame& frame) {
    const auto sites = call_sites != nullptr ? call_sites() : std::map<uint32_t, std::string>();
    client.send(wire::Type::kStackReply, stackReplyJson(frame.payload, rank, dumper->dump(), sites));
  });
}

}  // namespace reft

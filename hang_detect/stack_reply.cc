#include "hang_detect/stack_reply.h"

#include <memory>

#include <unistd.h>

#include <nlohmann/json.hpp>

namespace reft {

std::string stackReplyJson(std::string_view request, int rank, const StackDump& dump) {
  const auto asked = nlohmann::json::parse(request, nullptr, /*allow_exceptions=*/false);
  nlohmann::json reply;
  reply["id"] = asked.is_object() && asked.contains("id") ? asked["id"] : nlohmann::json();
  reply["rank"] = rank;
  reply["pid"] = ::getpid();
  reply["text"] = dump.text;
  reply["error"] = dump.error;
  return reply.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

void installStackReplies(AgentClient& client, int rank, StackPrinter printer) {
  auto dumper = std::make_shared<StackDumper>(printer);
  // The handler lives in the client and runs on its thread, which the client's destructor joins: `client` is alive.
  client.handle(wire::Type::kStackRequest, [&client, dumper, rank](const wire::Frame& frame) {
    client.send(wire::Type::kStackReply, stackReplyJson(frame.payload, rank, dumper->dump()));
  });
}

}  // namespace reft

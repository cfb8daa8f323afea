#include "hang_detect/rank/stack_reply.h"

#include <memory>

#include <sys/prctl.h>
#include <unistd.h>

#include <nlohmann/json.hpp>

#include "hang_detect/evidence/nccl_finding_json.h"
#include "hang_detect/rank/driver_use_now.h"
#include "hang_detect/rank/nccl_now.h"
#include "intercept/base/json.h"
#include "intercept/base/log.h"
#include "intercept/record/device_ops.h"
#include "intercept/record/op_log.h"

namespace reft {

std::string stackReplyJson(std::string_view request, int rank, const StackDump& dump,
                           const DriverUse& driver, const std::vector<NcclFinding>& nccl) {
  const auto asked = parseJson(request);
  nlohmann::json reply;
  reply["id"] = asked.is_object() && asked.contains("id") ? asked["id"] : nlohmann::json();
  reply["rank"] = rank;
  reply["pid"] = ::getpid();
  reply["text"] = dump.text;
  reply["error"] = dump.error;
  reply["driver"] = driverUseFields(driver);
  reply["nccl"] = ncclFields(nccl);
  return reply.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

namespace {

void permitReading(const std::string& welcome) {
  const auto fields = parseJson(welcome);
  if (fields.is_object() && fields.contains("agent_pid") &&
      fields["agent_pid"].is_number_unsigned()) {
    ::prctl(PR_SET_PTRACER, fields["agent_pid"].get<unsigned long>(), 0, 0,
            0);  // fails with EINVAL on a kernel without Yama
  }
}

}  // namespace

void installStackReplies(AgentClient& client, int rank, StackPrinter printer) {
  auto dumper = std::make_shared<StackDumper>(printer);
  permitReading(client.welcome());
  // The handler lives in the client and runs on its thread, which the client's destructor joins:
  // `client` is alive.
  client.handle(wire::Type::kStackRequest, [&client, dumper, rank](const wire::Frame& frame) {
    permitReading(client.welcome());             // the agent may be another process by now
    processOpLog().refresh(processDeviceOps());  // the agent reads the log after the answer
    const StackDump dump = dumper->dump();
    logDebug("hang", "rank ", rank, " answers a stack request with ", dump.text.size(), " bytes",
             dump.error.empty() ? "" : ", error: ", dump.error);
    client.send(wire::Type::kStackReply,
                stackReplyJson(frame.payload, rank, dump, driverUseNow(), ncclFindingsNow()));
  });
}

}  // namespace reft

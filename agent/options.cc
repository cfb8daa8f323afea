#include "agent/options.h"

#include <unistd.h>

#include <charconv>
#include <cstdint>
#include <cstdlib>

#include "agent/peers/messages.h"
#include "intercept/base/error.h"

namespace reft::agent {

const char kUsage[] =
    "usage: reft-agent --run-dir DIR --job ID --node N [--foreground]\n"
    "       reft-agent --version | --stack PID\n"
    "Keeps the vaults of one job on one node. Ranks start it with their environment, which holds "
    "its\n"
    "settings (REFT_AGENT_LINGER_SEC, ...); it ends by itself.\n";

namespace {

int number(const std::string& name, const std::string& value, int low, int high) {
  int result = 0;
  const auto parsed = std::from_chars(value.data(), value.data() + value.size(), result);
  if (parsed.ec != std::errc() || parsed.ptr != value.data() + value.size() || result < low ||
      result > high) {
    throw InvalidArgument(name, value, std::to_string(low) + ".." + std::to_string(high));
  }
  return result;
}

}  // namespace

CommandLine CommandLine::parse(const std::vector<std::string>& arguments) {
  CommandLine command;
  bool node_given = false;
  for (size_t i = 0; i < arguments.size(); ++i) {
    const auto& name = arguments[i];
    if (name == "--help" || name == "-h") {
      command.help = true;
      return command;
    }
    if (name == "--version") {
      command.version = true;
      return command;
    }
    if (name == "--foreground") {
      command.foreground = true;
      continue;
    }
    if (i + 1 >= arguments.size()) {
      throw InvalidArgument(name, "without a value", "see --help");
    }
    const auto& value = arguments[++i];
    if (name == "--stack") {
      command.stack_pid = number(name, value, 1, INT32_MAX);
      if (i + 1 < arguments.size()) {
        throw InvalidArgument("option", arguments[i + 1], "none after --stack PID");
      }
      return command;
    }
    if (name == "--run-dir") {
      command.run_dir = value;
    } else if (name == "--job") {
      command.job = value;
    } else if (name == "--node") {
      command.node = number(name, value, 0, kMaxRank);
      node_given = true;
    } else if (name == "--test-clock") {
      command.test_clock = value;
    } else {
      throw InvalidArgument("option", name, "those of --help");
    }
  }
  // The daemon's working directory is /.
  if (command.run_dir.empty() || command.run_dir[0] != '/') {
    throw InvalidArgument("--run-dir", command.run_dir, "an absolute path");
  }
  if (!validJobId(command.job)) {
    throw InvalidArgument("--job", command.job, "letters, digits, . _ -");
  }
  if (!node_given) {
    throw InvalidArgument("--node", "absent", "the number of this node");
  }
  return command;
}

AgentOptions AgentOptions::from(const Env& env, const CommandLine& command) {
  AgentOptions options;
  options.run_dir = command.run_dir;
  options.foreground = command.foreground;
  // As default_run_dir() in python/reft/_link/job_identity.py.
  const char* temporary = std::getenv("TMPDIR");
  const char* runtime = std::getenv("XDG_RUNTIME_DIR");
  const auto shared = std::string(temporary == nullptr || *temporary != '/' ? "/tmp" : temporary) +
                      "/reft-" + std::to_string(::getuid());
  const auto of_session = std::string(runtime == nullptr ? "" : runtime) + "/reft";
  if (options.run_dir == shared || options.run_dir == of_session) {
    options.fallback_run_dir = shared;
  }
  options.job = command.job;
  options.node = command.node;
  options.vault_dir = env.text("vault_dir");
  options.linger_sec = env.seconds("agent_linger_sec");
  options.hang_suspect_sec = env.seconds("hang_suspect_sec");
  options.abort_on_hang = env.text("hang_action") == "abort";
  options.crash_loop_limit = static_cast<int>(env.integer("crash_loop_limit"));
  options.hardware_counters = env.flag("hardware_counters");
  options.metrics_port = static_cast<int>(env.integer("metrics_port"));
  // The daemon's working directory is /.
  if (!options.vault_dir.empty() && options.vault_dir[0] != '/') {
    throw InvalidArgument("REFT_VAULT_DIR", "'" + options.vault_dir + "'", "an absolute path");
  }
  return options;
}

std::string AgentOptions::directory() const {
  return run_dir + "/" + job + "/node-" + std::to_string(node);
}

}  // namespace reft::agent

#include "agent/peers/options.h"

#include <charconv>

#include "agent/peers/messages.h"
#include "intercept/base/error.h"

namespace reft::agent {

const char kUsage[] =
    "usage: reft-agent --run-dir DIR --job ID --node N [--vault-dir DIR] [--linger-sec S]\n"
    "                  [--metrics-port P] [--hang-suspect-sec S]\n"
    "                  [--hang-action report|abort] [--foreground]\n"
    "       reft-agent --version | --stack PID [--native]\n"
    "Keeps the vaults of one job on one node. Ranks start it; it ends by itself.\n";

namespace {

double number(const std::string& name, const std::string& value, double low, double high) {
  double result = 0;
  const auto parsed = std::from_chars(value.data(), value.data() + value.size(), result);
  if (parsed.ec != std::errc() || parsed.ptr != value.data() + value.size() ||
      !(result >= low && result <= high)) {
    throw InvalidArgument(name, value,
                          std::to_string(static_cast<int64_t>(low)) + ".." +
                              std::to_string(static_cast<int64_t>(high)));
  }
  return result;
}

}  // namespace

std::string Options::directory() const {
  return run_dir + "/" + job + "/node-" + std::to_string(node);
}

Options parseOptions(const std::vector<std::string>& arguments) {
  Options options;
  bool node_given = false;
  for (size_t i = 0; i < arguments.size(); ++i) {
    const auto& name = arguments[i];
    if (name == "--help" || name == "-h") {
      options.help = true;
      return options;
    }
    if (name == "--version") {
      options.version = true;
      return options;
    }
    if (name == "--foreground") {
      options.foreground = true;
      continue;
    }
    if (i + 1 >= arguments.size()) {
      throw InvalidArgument(name, "without a value", "see --help");
    }
    const auto& value = arguments[++i];
    if (name == "--stack") {
      options.stack_pid = static_cast<int>(number(name, value, 1, INT32_MAX));
      options.native = i + 1 < arguments.size() && arguments[i + 1] == "--native";
      if (i + (options.native ? 2 : 1) < arguments.size()) {
        throw InvalidArgument("option", arguments[i + (options.native ? 2 : 1)],
                              "--native, after --stack PID");
      }
      return options;
    }
    if (name == "--run-dir") {
      options.run_dir = value;
    } else if (name == "--job") {
      options.job = value;
    } else if (name == "--node") {
      options.node = static_cast<int>(number(name, value, 0, kMaxRank));
      node_given = true;
    } else if (name == "--vault-dir") {
      options.vault_dir = value;
    } else if (name == "--linger-sec") {
      options.linger_sec = number(name, value, 0, 86400);
    } else if (name == "--hang-suspect-sec") {
      options.hang_suspect_sec = number(name, value, 0.1, 86400);
    } else if (name == "--hang-action") {
      if (value != "report" && value != "abort") {
        throw InvalidArgument(name, value, "report|abort");
      }
      options.abort_on_hang = value == "abort";
    } else if (name == "--metrics-port") {
      options.metrics_port = static_cast<int>(number(name, value, 0, 65535));
    } else {
      throw InvalidArgument("option", name, "those of --help");
    }
  }
  // The daemon's working directory is /.
  if (options.run_dir.empty() || options.run_dir[0] != '/') {
    throw InvalidArgument("--run-dir", options.run_dir, "an absolute path");
  }
  if (!options.vault_dir.empty() && options.vault_dir[0] != '/') {
    throw InvalidArgument("--vault-dir", options.vault_dir, "an absolute path");
  }
  if (!validJobId(options.job)) {
    throw InvalidArgument("--job", options.job, "letters, digits, . _ -");
  }
  if (!node_given) {
    throw InvalidArgument("--node", "absent", "the number of this node");
  }
  return options;
}

}  // namespace reft::agent

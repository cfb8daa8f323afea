#include "agent/options.h"

#include <map>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "intercept/base/error.h"

namespace reft::agent {
namespace options_test {

using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

Env envOf(const std::map<std::string, std::string>& variables) {
  return Env::parse([&](const std::string& name) -> std::optional<std::string> {
    const auto found = variables.find(name);
    return found == variables.end() ? std::nullopt : std::optional(found->second);
  });
}

const CommandLine kCommand = CommandLine::parse({"--run-dir", "/run", "--job", "j", "--node", "3"});

TEST(AgentOptions, TakeSettingsFromTheEnvironment) {
  const auto options = AgentOptions::from(envOf({{"REFT_VAULT_DIR", "/vaults"},
                                                 {"REFT_METRICS_PORT", "9400"},
                                                 {"REFT_HANG_ACTION", "abort"},
                                                 {"REFT_HANG_SUSPECT_SEC", "7.5"},
                                                 {"REFT_AGENT_LINGER_SEC", "77"}}),
                                          kCommand);
  EXPECT_EQ(options.directory(), "/run/j/node-3");
  EXPECT_EQ(options.vault_dir, "/vaults");
  EXPECT_EQ(options.metrics_port, 9400);
  EXPECT_TRUE(options.abort_on_hang);
  EXPECT_EQ(options.hang_suspect_sec, 7.5);
  EXPECT_EQ(options.linger_sec, 77);
}

TEST(AgentOptions, HaveNoFolderAndNoPortByDefault) {
  const auto options = AgentOptions::from(envOf({}), kCommand);
  EXPECT_EQ(options.vault_dir, "");
  EXPECT_EQ(options.metrics_port, 0);
  EXPECT_FALSE(options.abort_on_hang);
}

TEST(AgentOptions, RejectAFolderThatIsRelative) {
  EXPECT_THAT(
      [] {
        AgentOptions::from(envOf({{"REFT_VAULT_DIR", "vaults"}}), kCommand);
      },
      ThrowsMessage<InvalidArgument>(HasSubstr("REFT_VAULT_DIR")));
}

}  // namespace options_test
}  // namespace reft::agent

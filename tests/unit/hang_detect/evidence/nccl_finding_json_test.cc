#include "hang_detect/evidence/nccl_finding_json.h"

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

namespace reft {
namespace nccl_finding_json_test {

TEST(NcclFindingJson, KeepsAllFields) {
  NcclFinding finding;
  finding.comm = uint64_t{1} << 63;
  finding.name = "dp";
  finding.rank = 3;
  finding.ranks = 8;
  finding.nodes = 4;
  finding.proxy = NcclProxy::kStuck;
  finding.advancing = finding.in_op = finding.p2p = finding.never_taken = finding.kernels = true;
  finding.busy_before = finding.busy_elsewhere = true;
  finding.quiet_ns = 5;
  finding.op = {"AllReduce", 6};
  finding.algo = "RING";
  finding.kernels_begun = 1;
  finding.sends_begun = 2;
  finding.sends_done = 3;
  finding.recvs_begun = 4;
  finding.recvs_done = 5;
  finding.edges = {{1, 2, true, true, NcclCause::kFlush, 3, 4, 5}};
  finding.passed = {{"Broadcast", 1}};
  finding.queued = {{"AllGather", 2}, {"AllGather", 3}};
  const std::string text = ncclFields({finding}).dump();
  const auto read = ncclFindingsFrom(nlohmann::json::parse(text));
  ASSERT_EQ(read.size(), 1u);
  EXPECT_EQ(ncclFields(read).dump(), text);
  EXPECT_EQ(read[0].edges.at(0).cause, NcclCause::kFlush);
  EXPECT_EQ(read[0].comm, finding.comm);
  EXPECT_TRUE(read[0].complete);
}

TEST(NcclFindingJson, TakesDamagedFieldsForUnknown) {
  for (const char* text : {"null", "{}", "7", "[7, null, []]"}) {
    EXPECT_TRUE(ncclFindingsFrom(nlohmann::json::parse(text)).empty()) << text;
  }
  const auto read = ncclFindingsFrom(nlohmann::json::parse(
      R"([{"proxy": 99, "edges": [{"cause": 200}, 5], "op": 4, "passed": {}, "rank": "x"}])"));
  ASSERT_EQ(read.size(), 1u);
  EXPECT_EQ(read[0].proxy, NcclProxy::kUnknown);
  EXPECT_EQ(read[0].edges.at(0).cause, NcclCause::kUnknown);
  EXPECT_FALSE(read[0].complete);
  nlohmann::json many = nlohmann::json::array();
  for (int i = 0; i < 1000; ++i) {
    many.push_back({{"edges", nlohmann::json::array()}, {"complete", true}});
    for (int k = 0; i == 0 && k < 1000; ++k) {
      many[0]["edges"].push_back(nlohmann::json::object());
    }
  }
  const auto bounded = ncclFindingsFrom(many);
  EXPECT_EQ(bounded.size(), 64u);
  EXPECT_EQ(bounded[0].edges.size(), 256u);
  EXPECT_FALSE(bounded[0].complete);  // so that it is not decided from
}

}  // namespace nccl_finding_json_test
}  // namespace reft

#include "hang_detect/evidence/nccl_progress.h"

#include <string>

#include <gtest/gtest.h>

#include "tests/fakes/nccl_script.h"

namespace reft {
namespace nccl_progress_test {

constexpr int64_t kQuiet = 20 * kSecond;

NcclFinding findingOf(const std::string& script, double now,
                      const std::map<uint32_t, NcclProxy>& proxies = {}) {
  NcclScript nccl(true);
  nccl.run(script);
  return diagnoseNccl(nccl.progress(), static_cast<int64_t>(now * kSecond), kQuiet, proxies).at(0);
}

const std::string kCollective = R"(
  at 100
  comm dp hash=7 rank=1 ranks=2 nodes=2
  coll c dp AllReduce seq=4 algo=RING
  stop c
)";

struct State {
  const char* script;
  NcclCause cause;
};

TEST(NcclProgress, TheOldestOpenStepIsTheCause) {
  const State states[] = {
      {"op o dp c send peer=0\nstep o 0\ngpu o 0", NcclCause::kOwnGpuFills},
      {"op o dp c send peer=0\nstep o 0\npeer o 0\nstep o 1\ngpu o 1", NcclCause::kPeerPosts},
      {"op o dp c send peer=0\nstep o 7\nnet o 7\nstep o 8\ngpu o 8", NcclCause::kNetworkSends},
      {"op o dp c peer=0\nstep o 0\nrecv o 0", NcclCause::kDataComes},
      {"op o dp c peer=0\nstep o 0\nflush o 0", NcclCause::kFlush},
      {"op o dp c peer=0\nstep o 0\ntake o 0\nstep o 1\nrecv o 1", NcclCause::kOwnGpuTakes},
      {"op o dp c peer=0\nstep o 0", NcclCause::kNetworkTakes},
      {"op o dp c peer=0", NcclCause::kProxyBegins},
      {"op o dp c peer=0\nprogress o", NcclCause::kUnknown},
  };
  for (const State& state : states) {
    const NcclFinding finding = findingOf(kCollective + state.script, 130);
    EXPECT_FALSE(finding.advancing) << state.script;
    EXPECT_TRUE(finding.in_op);
    EXPECT_EQ(finding.op, (NcclOpName{"AllReduce", 4}));
    EXPECT_EQ(finding.quiet_ns, 30 * kSecond);
    ASSERT_EQ(finding.edges.size(), 1u);
    EXPECT_EQ(finding.edges[0].cause, state.cause) << state.script;
    EXPECT_EQ(finding.edges[0].peer, 0);
  }
}

// N16: one collective of half a minute. A step that ended within the time is progress.
TEST(NcclProgress, AHugeCollectiveAdvances) {
  const std::string huge = kCollective + R"(
    op o dp c send peer=0 steps=100000
    at 125
    step o 999
    gpu o 999)";
  EXPECT_TRUE(findingOf(huge, 130).advancing);
  EXPECT_FALSE(findingOf(huge, 146).advancing);
}

TEST(NcclProgress, AKernelChannelThatBeganIsProgress) {
  const std::string inside = kCollective + "at 125\nkernel k c ch=3";
  EXPECT_TRUE(findingOf(inside, 130).advancing);
  EXPECT_EQ(findingOf(inside, 150).kernels_begun, 8u);
}

TEST(NcclProgress, PollingIsNoProgress) {
  EXPECT_FALSE(findingOf(kCollective + R"(
    op o dp c send peer=0
    step o 0
    peer o 0
    at 129
    peer o 0
    step o 0)",
                         130)
                   .advancing);
}

// H57: the proxy thread took parts of earlier collectives, and none of this one.
TEST(NcclProgress, AProxyThatTakesNothingIsSeenByTheOpsBefore) {
  const std::string before = kCollective + R"(
    op o dp c send peer=0
    stop o
    coll d dp AllReduce seq=5 algo=RING
    stop d)";
  const NcclFinding finding = findingOf(before, 130);
  EXPECT_TRUE(finding.never_taken);
  EXPECT_EQ(finding.op, (NcclOpName{"AllReduce", 5}));
  EXPECT_EQ(finding.passed, (std::vector<NcclOpName>{{"AllReduce", 4}}));
  EXPECT_FALSE(findingOf(before, 110).never_taken);
  // Inside a node, no collective has parts.
  EXPECT_FALSE(findingOf(kCollective + "coll d dp AllReduce seq=5\nstop d", 130).in_op);
}

TEST(NcclProgress, OpsBehindTheOneInQuestionAreQueued) {
  const NcclFinding finding = findingOf(kCollective + R"(
    op o dp c send peer=0
    coll d dp AllGather seq=1
    stop d
    op p dp d send peer=0)",
                                        130);
  EXPECT_EQ(finding.op, (NcclOpName{"AllReduce", 4}));
  EXPECT_EQ(finding.edges.size(), 1u);
  EXPECT_EQ(finding.queued, (std::vector<NcclOpName>{{"AllGather", 1}}));
}

TEST(NcclProgress, TheProxyThreadIsFoundByItsId) {
  NcclScript nccl;
  nccl.run(kCollective + "op o dp c send peer=0");
  const NcclProgress progress = nccl.progress();
  const uint32_t thread = progress.comms.at(0).proxy_thread;
  EXPECT_NE(thread, 0u);
  const auto stuck = diagnoseNccl(progress, 200 * kSecond, kQuiet, {{thread, NcclProxy::kStuck}});
  EXPECT_EQ(stuck.at(0).proxy, NcclProxy::kStuck);
  const auto other = diagnoseNccl(progress, 200 * kSecond, kQuiet, {{thread + 1, {}}});
  EXPECT_EQ(other.at(0).proxy, NcclProxy::kUnknown);
}

TEST(NcclProgress, AnotherCommunicatorMayKeepTheGpu) {
  NcclScript nccl;
  nccl.run(kCollective + R"(
    op o dp c send peer=0
    comm tp hash=8 nodes=1
    coll t tp AllReduce seq=1
    stop t)");
  const auto findings = diagnoseNccl(nccl.progress(), 200 * kSecond, kQuiet);
  EXPECT_TRUE(findings.at(0).busy_elsewhere);
  nccl.run("end tp");
  EXPECT_FALSE(diagnoseNccl(nccl.progress(), 200 * kSecond, kQuiet).at(0).busy_elsewhere);
}

TEST(NcclProgress, AMessageThatGotLostInTheTableIsTold) {
  EXPECT_FALSE(findingOf(kCollective + "op o dp - send peer=0", 130).complete);
  EXPECT_TRUE(findingOf(kCollective, 130).complete);
}

}  // namespace nccl_progress_test
}  // namespace reft

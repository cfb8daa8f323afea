#include "hang_detect/verdict/nccl_edges.h"

#include <memory>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "tests/fakes/nccl_script.h"

namespace reft {
namespace nccl_edges_test {

using Kind = NcclAnswer::Kind;
using Link = NcclAnswer::Link;

constexpr int64_t kQuiet = 20 * kSecond;

// A ring of ranks in one collective on channel 0, each with a proxy op to the next rank and one
// from the previous rank. The states are those of the oldest open steps.
class Ring {
 public:
  explicit Ring(int ranks, int nodes = 0, bool kernels = false) : ranks_(ranks) {
    for (int r = 0; r < ranks; ++r) {
      auto& nccl = *ranks_of_.emplace_back(std::make_unique<NcclScript>(kernels));
      nccl.run("at 100\ncomm dp hash=7 rank=" + std::to_string(r) + " ranks=" +
               std::to_string(ranks) + " nodes=" + std::to_string(nodes == 0 ? ranks : nodes));
      proxies_.push_back(NcclProxy::kRuns);
    }
    enter(1);
  }

  // All ranks finish what they have begun and enter the next collective.
  void enter(int seq) {
    for (int r = 0; r < ranks_; ++r) {
      enter(r, seq);
    }
  }
  void enter(int r, int seq) {
    run(r, "coll c dp AllReduce seq=" + std::to_string(seq) + "\nstop c");
  }
  void takeOps(int r) {
    run(r, "op out dp c send peer=" + std::to_string((r + 1) % ranks_) +
               "\nprogress out\nop in dp c peer=" + std::to_string((r + ranks_ - 1) % ranks_) +
               "\nprogress in");
  }
  void takeOps() {
    for (int r = 0; r < ranks_; ++r) {
      takeOps(r);
    }
  }
  void finish(int r) { run(r, "stop out\nstop in"); }
  void finish() {
    for (int r = 0; r < ranks_; ++r) {
      finish(r);
    }
  }
  // What a rank waits for: "gpu", "peer", "net" for its send, "recv", "take" for its receive.
  void waits(int r, const std::string& send, const std::string& recv) {
    run(r, "step out 0\n" + send + " out 0\nstep in 0\n" + recv + " in 0");
  }
  void run(int r, const std::string& script) { ranks_of_.at(static_cast<size_t>(r))->run(script); }
  void setProxy(int r, NcclProxy proxy) { proxies_.at(static_cast<size_t>(r)) = proxy; }

  std::vector<NcclFinding> findings(double now = 200) const {
    std::vector<NcclFinding> all;
    for (int r = 0; r < ranks_; ++r) {
      const NcclProgress progress = ranks_of_[static_cast<size_t>(r)]->progress();
      auto found = diagnoseNccl(progress, static_cast<int64_t>(now * kSecond), kQuiet);
      found.at(0).proxy = proxies_[static_cast<size_t>(r)];
      all.push_back(std::move(found[0]));
    }
    return all;
  }
  NcclAnswer answer(double now = 200) const { return joinNccl(findings(now)); }

 private:
  int ranks_;
  std::vector<std::unique_ptr<NcclScript>> ranks_of_;
  std::vector<NcclProxy> proxies_;
};

// A ring of 4 in which data of rank `r` does not reach the next rank.
Ring withALink(int r, const char* send = "net") {
  Ring ring(4);
  ring.takeOps();
  for (int rank = 0; rank < 4; ++rank) {
    ring.waits(rank, rank == r ? send : "gpu", "recv");
  }
  return ring;
}

TEST(NcclEdges, WithoutProxyOpsNothingIsKnown) {
  EXPECT_EQ(Ring(4).answer().kind, Kind::kNothing);
  EXPECT_EQ(joinNccl({}).kind, Kind::kNothing);
}

// H54
TEST(NcclEdges, ALinkThatCarriesNothingIsNamedAndNoRank) {
  for (int r = 0; r < 4; ++r) {
    const NcclAnswer answer = withALink(r).answer();
    EXPECT_EQ(answer.kind, Kind::kNetwork) << r;
    EXPECT_EQ(answer.links, (std::vector<Link>{{r, (r + 1) % 4, false}}));
    EXPECT_EQ(answer.rank, -1);
    EXPECT_TRUE(answer.candidates.empty());
  }
}

TEST(NcclEdges, ALinkWhoseCreditsAreLostIsNamed) {
  EXPECT_EQ(withALink(1, "peer").answer().links, (std::vector<Link>{{1, 2, false}}));
}

TEST(NcclEdges, BothDirectionsOfALinkAreOneLink) {
  Ring ring(2);
  ring.takeOps();
  ring.waits(0, "net", "recv");
  ring.waits(1, "net", "recv");
  EXPECT_EQ(ring.answer().links, (std::vector<Link>{{0, 1, true}}));
}

TEST(NcclEdges, ALinkIsNotBlamedIfAProxyThreadMayHaveStopped) {
  Ring ring = withALink(1);
  ring.setProxy(2, NcclProxy::kUnknown);
  const NcclAnswer answer = ring.answer();
  EXPECT_EQ(answer.kind, Kind::kUndecidable);
  EXPECT_EQ(answer.candidates, (std::vector<int>{1, 2}));
  EXPECT_EQ(answer.why, "the network, or a proxy thread that is not known to run");
}

// H57
TEST(NcclEdges, AStoppedProxyThreadIsNamedWhateverItsOpsSay) {
  for (const char* const send : {"net", "peer", "gpu"}) {
    Ring ring = withALink(1, send);
    ring.setProxy(1, NcclProxy::kStuck);
    const NcclAnswer answer = ring.answer();
    EXPECT_EQ(answer.kind, Kind::kProxy) << send;
    EXPECT_EQ(answer.rank, 1);
  }
}

TEST(NcclEdges, AProxyThreadThatTakesNoPartIsNamed) {
  Ring ring(4);
  ring.takeOps();
  ring.finish();
  ring.enter(2);
  for (const int r : {0, 1, 3}) {
    ring.takeOps(r);
    ring.waits(r, r == 1 ? "peer" : "gpu", "recv");
  }
  ring.setProxy(2, NcclProxy::kUnknown);
  NcclAnswer answer = ring.answer();
  EXPECT_EQ(answer.kind, Kind::kProxy);
  EXPECT_EQ(answer.rank, 2);
  // It cannot both run and take nothing: then the table is not to be trusted.
  ring.setProxy(2, NcclProxy::kRuns);
  answer = ring.answer();
  EXPECT_EQ(answer.kind, Kind::kUndecidable);
  EXPECT_EQ(answer.candidates, (std::vector<int>{2}));
}

// P5: data has arrived, and the GPU neither takes it nor fills its send buffers.
TEST(NcclEdges, AGpuThatNeitherTakesNorFillsIsNamed) {
  Ring ring(4);
  ring.takeOps();
  ring.waits(0, "gpu", "recv");
  ring.waits(1, "gpu", "take");
  ring.waits(2, "gpu", "recv");
  ring.waits(3, "gpu", "recv");
  const NcclAnswer answer = ring.answer();
  EXPECT_EQ(answer.kind, Kind::kGpu);
  EXPECT_EQ(answer.rank, 1);
}

TEST(NcclEdges, AGpuThatSharesItsNodeIsNotNamed) {
  Ring ring(4, 2);
  ring.takeOps();
  for (int r = 0; r < 4; ++r) {
    ring.waits(r, "gpu", r == 1 ? "take" : "recv");
  }
  const NcclAnswer answer = ring.answer();
  EXPECT_EQ(answer.kind, Kind::kUndecidable);
  EXPECT_EQ(answer.candidates, (std::vector<int>{1}));
}

TEST(NcclEdges, AGpuThatSharesItsNodeIsNamedIfItsKernelHasNotBegun) {
  Ring ring(4, 2, true);
  ring.takeOps();
  for (int r = 0; r < 4; ++r) {
    ring.waits(r, "gpu", r == 1 ? "take" : "recv");
    if (r != 1) {
      ring.run(r, "kernel k c ch=0");
    }
  }
  EXPECT_EQ(ring.answer().kind, Kind::kGpu);
  EXPECT_EQ(ring.answer().rank, 1);
}

TEST(NcclEdges, AGpuThatMayBeInAnotherCommunicatorIsNotNamed) {
  Ring ring(4);
  ring.takeOps();
  for (int r = 0; r < 4; ++r) {
    ring.waits(r, "gpu", r == 1 ? "take" : "recv");
  }
  ring.run(1, "comm tp hash=8 nodes=1\ncoll t tp AllReduce seq=1\nstop t");
  EXPECT_EQ(ring.answer().kind, Kind::kUndecidable);
  EXPECT_EQ(ring.answer().why, "its GPU may be in an op of another communicator");
}

// Two messages inside a node have no proxy: whether they ended is not known.
TEST(NcclEdges, AGpuThatMayBeInAnEarlierOpIsNotNamed) {
  Ring ring(4);
  ring.takeOps();
  ring.finish();
  ring.run(1, "p2p m dp Send peer=0\nstop m");
  ring.enter(2);
  ring.takeOps();
  for (int r = 0; r < 4; ++r) {
    ring.waits(r, "gpu", r == 1 ? "take" : "recv");
  }
  EXPECT_EQ(ring.answer().why, "its GPU may be in an earlier op");
  // A step that has ended shows that the GPU came to this op.
  ring.run(1, "done in 0\nstep in 1\ntake in 1\nat 100");
  EXPECT_EQ(ring.answer().kind, Kind::kGpu);
}

TEST(NcclEdges, GpusThatWaitForEachOtherAreUndecidable) {
  Ring ring(3);
  ring.takeOps();
  for (int r = 0; r < 3; ++r) {
    ring.waits(r, "gpu", "recv");
  }
  const NcclAnswer answer = ring.answer();
  EXPECT_EQ(answer.kind, Kind::kUndecidable);
  EXPECT_EQ(answer.candidates, (std::vector<int>{0, 1, 2}));
}

TEST(NcclEdges, TwoCausesAreUndecidable) {
  Ring ring(4);
  ring.takeOps();
  ring.waits(0, "net", "take");
  ring.waits(1, "gpu", "recv");
  ring.waits(2, "gpu", "take");
  ring.waits(3, "gpu", "recv");
  const NcclAnswer answer = ring.answer();
  EXPECT_EQ(answer.kind, Kind::kUndecidable);
  EXPECT_EQ(answer.candidates, (std::vector<int>{0, 1, 2}));
}

TEST(NcclEdges, APartitionNamesItsLinksAndNoRank) {
  Ring ring(4);
  ring.takeOps();
  ring.waits(0, "gpu", "recv");
  ring.waits(1, "net", "recv");
  ring.waits(2, "gpu", "recv");
  ring.waits(3, "net", "recv");
  EXPECT_EQ(ring.answer().links, (std::vector<Link>{{1, 2, false}, {3, 0, false}}));
}

TEST(NcclEdges, ARankWithoutEvidenceIsACandidate) {
  auto findings = withALink(1).findings();
  findings.erase(findings.begin() + 2);
  const NcclAnswer answer = joinNccl(findings);
  EXPECT_EQ(answer.kind, Kind::kUndecidable);
  EXPECT_EQ(answer.candidates, (std::vector<int>{2}));
}

TEST(NcclEdges, ARankThatIsNotInTheOpIsACandidate) {
  Ring ring(3);
  ring.takeOps();
  ring.finish();
  for (const int r : {0, 1}) {
    ring.enter(r, 2);
    ring.takeOps(r);
    ring.waits(r, r == 1 ? "peer" : "gpu", "recv");
  }
  const NcclAnswer answer = ring.answer();
  EXPECT_EQ(answer.kind, Kind::kUndecidable);
  EXPECT_EQ(answer.candidates, (std::vector<int>{2}));
}

// Rank 1 has sent its part of op 1 and is in op 2; rank 2 still waits for that part.
TEST(NcclEdges, DataOfAFinishedOpThatDoesNotArriveIsTheLinks) {
  Ring ring(4);
  ring.takeOps();
  for (const int r : {0, 1, 3}) {
    ring.finish(r);
  }
  ring.waits(2, "gpu", "recv");
  for (const int r : {0, 1, 3}) {
    ring.enter(r, 2);
    ring.takeOps(r);
    ring.waits(r, r == 1 ? "peer" : "gpu", "recv");
  }
  ring.enter(2, 2);
  const NcclAnswer answer = ring.answer();
  EXPECT_EQ(answer.kind, Kind::kNetwork);
  EXPECT_EQ(answer.links, (std::vector<Link>{{1, 2, false}}));
}

// H16, N16
TEST(NcclEdges, OneRankThatAdvancesIsEnough) {
  Ring ring = withALink(1);
  ring.run(3, "at 195\ndone out 0");
  EXPECT_EQ(ring.answer().kind, Kind::kAdvancing);
  EXPECT_EQ(ring.answer(230).kind, Kind::kUndecidable);
}

TEST(NcclEdges, ATableThatLostEventsDecidesNothing) {
  Ring ring = withALink(1);
  ring.run(3, "op lost dp - send peer=0\nstop lost");
  const NcclAnswer answer = ring.answer();
  EXPECT_EQ(answer.kind, Kind::kUndecidable);
  EXPECT_EQ(answer.why, "a table that lost events");
}

TEST(NcclEdges, AMessageThatItsSenderDoesNotFillIsItsGpus) {
  NcclScript sender, receiver;
  sender.run(R"(
    at 100
    comm pp rank=0 ranks=2 nodes=2
    p2p s pp Send peer=1
    stop s
    op o pp s send peer=1
    step o 0
    gpu o 0)");
  receiver.run(R"(
    comm pp rank=1 ranks=2 nodes=2
    p2p r pp Recv peer=0
    stop r
    op o pp r peer=0
    step o 0
    recv o 0)");
  std::vector<NcclFinding> findings;
  for (const NcclScript* const nccl : {&sender, &receiver}) {
    findings.push_back(diagnoseNccl(nccl->progress(), 200 * kSecond, kQuiet).at(0));
    findings.back().proxy = NcclProxy::kRuns;
  }
  const NcclAnswer answer = joinNccl(findings);
  EXPECT_EQ(answer.kind, Kind::kGpu);
  EXPECT_EQ(answer.rank, 0);
}

TEST(NcclEdges, AnUnknownAlgorithmIsUndecidable) {
  auto findings = withALink(1).findings();
  findings[0].algo = "COLLNET_CHAIN";
  EXPECT_EQ(joinNccl(findings).kind, Kind::kUndecidable);
}

TEST(NcclEdges, ALongRingIsFollowedToItsEnd) {
  constexpr int kRanks = 512;
  NcclFinding base;
  base.comm = 7;
  base.ranks = base.nodes = kRanks;
  base.in_op = true;
  base.op = {"AllReduce", 1};
  base.algo = "RING";
  base.proxy = NcclProxy::kRuns;
  std::vector<NcclFinding> findings;
  for (int r = 0; r < kRanks; ++r) {
    NcclFinding& finding = findings.emplace_back(base);
    finding.rank = r;
    const int next = (r + 1) % kRanks, before = (r + kRanks - 1) % kRanks;
    finding.edges.push_back(
        {next, 0, true, true, r == 99 ? NcclCause::kNetworkSends : NcclCause::kOwnGpuFills});
    finding.edges.push_back({before, 0, false, false, NcclCause::kDataComes});
  }
  EXPECT_EQ(joinNccl(findings).links, (std::vector<Link>{{99, 100, false}}));
}

}  // namespace nccl_edges_test
}  // namespace reft

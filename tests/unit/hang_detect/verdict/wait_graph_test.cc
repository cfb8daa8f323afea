#include "hang_detect/verdict/wait_graph.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/unit/hang_detect/evidence/evidence_maker.h"

namespace reft {
namespace wait_graph_test {

using namespace testing_evidence;  // NOLINT(google-build-using-namespace)
using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::Pair;
using ::testing::UnorderedElementsAre;

constexpr OpKind kReduce = OpKind::kAllreduce;

// A graph with what it points into.
struct Graph {
  explicit Graph(std::vector<RankEvidence> ranks)
      : evidence(job(std::move(ranks))), view(evidence), graph(view), ends(graph.ends()) {}
  const HangEvidence evidence;
  const JobView view;
  const WaitGraph graph;
  const WaitGraph::Ends ends;
};

RankEvidence waitsIn(int rank, int world, OpEntry op) {
  return rankOf(rank, world, after(4, {op}));
}

TEST(WaitGraph, IsEmptyWhereNoRankWaits) {
  const Graph g({rankOf(0, 2, after(4)), rankOf(1, 2, after(4))});
  EXPECT_THAT(g.graph.waits(), IsEmpty());
  EXPECT_EQ(g.graph.widestWait(), nullptr);
  EXPECT_THAT(g.ends.sinks, IsEmpty());
  EXPECT_THAT(g.ends.cycles, IsEmpty());
  EXPECT_FALSE(g.ends.outside || g.ends.stuck);
}

TEST(WaitGraph, LeadsFromACollectiveToTheRankThatHasNotBegunIt) {
  const OpEntry open = op(kReduce, 5, false);
  const Graph g({waitsIn(0, 3, open), waitsIn(1, 3, open), rankOf(2, 3, after(4))});
  EXPECT_THAT(g.graph.waitingRanks(), ElementsAre(0, 1));
  EXPECT_THAT(g.ends.sinks, ElementsAre(2));
  const auto& wait = std::get<CollectiveWait>(*g.graph.widestWait());
  EXPECT_EQ(wait.seq, 5u);
  EXPECT_THAT(wait.waiting, ElementsAre(0, 1));
  EXPECT_THAT(wait.missing, ElementsAre(2));
  EXPECT_FALSE(wait.all_begun);
}

TEST(WaitGraph, FollowsMessagesToTheEnd) {
  // 0 and 3 wait for 1 in a collective, 1 in a receive from 2, which waits for none.
  const OpEntry open = op(kReduce, 5, false);
  const Graph g({waitsIn(0, 4, open), waitsIn(1, 4, op(OpKind::kRecv, 9, false, 2)),
                 rankOf(2, 4, after(4, {open})), waitsIn(3, 4, open)});
  EXPECT_THAT(g.graph.waitingRanks(), ElementsAre(0, 1, 2, 3));
  // Rank 2 itself waits in the collective that rank 1 has not begun.
  EXPECT_THAT(g.ends.sinks, IsEmpty());
  EXPECT_THAT(g.ends.cycles, ElementsAre(ElementsAre(1, 2)));
  const Graph chain(
      {waitsIn(0, 3, open), waitsIn(1, 3, op(OpKind::kRecv, 9, false, 2)), rankOf(2, 3, after(4))});
  EXPECT_THAT(chain.ends.sinks, ElementsAre(2));
  EXPECT_THAT(chain.ends.cycles, IsEmpty());
}

TEST(WaitGraph, FindsARingOfReceivesAsOneCycle) {
  std::vector<RankEvidence> ranks;
  for (int r = 0; r < 5; ++r) {
    ranks.push_back(waitsIn(r, 5, op(OpKind::kRecv, 9, false, (r + 1) % 5)));
  }
  const Graph g(std::move(ranks));
  EXPECT_THAT(g.ends.cycles, ElementsAre(ElementsAre(0, 1, 2, 3, 4)));
  EXPECT_THAT(g.ends.sinks, IsEmpty());
}

TEST(WaitGraph, IsStuckWhereEveryMemberHasBegunTheOp) {
  const OpEntry open = op(kReduce, 5, false);
  const Graph g({waitsIn(0, 2, open), waitsIn(1, 2, open)});
  EXPECT_TRUE(g.ends.stuck);
  EXPECT_THAT(g.ends.sinks, IsEmpty());
  EXPECT_TRUE(std::get<CollectiveWait>(*g.graph.widestWait()).all_begun);
}

TEST(WaitGraph, LeadsOutsideWhereMembersAreNotVisible) {
  const Graph g({waitsIn(0, 3, op(kReduce, 5, false)), rankOf(1, 3, after(4))});
  EXPECT_TRUE(g.ends.outside);
  EXPECT_THAT(g.ends.sinks, ElementsAre(1));
}

TEST(WaitGraph, DeadRanksWaitForNoneAndAreSinks) {
  const OpEntry open = op(kReduce, 5, false);
  RankEvidence dead = waitsIn(1, 2, open);
  dead.alive = false;
  const Graph g({waitsIn(0, 2, open), dead});
  EXPECT_THAT(g.graph.waitingRanks(), ElementsAre(0));
  EXPECT_THAT(g.ends.sinks, ElementsAre(1));
  EXPECT_FALSE(g.ends.stuck);
}

TEST(WaitGraph, RemembersMessagesThatDoNotMatch) {
  OpEntry send = op(OpKind::kSend, 9, false, 1);
  OpEntry recv = op(OpKind::kRecv, 9, false, 0);
  recv.tag = 3;
  const Graph tags({waitsIn(0, 2, send), waitsIn(1, 2, recv)});
  EXPECT_THAT(tags.graph.mismatches(), UnorderedElementsAre(Pair(0, 1), Pair(1, 0)));
  EXPECT_FALSE(tags.ends.stuck);
  recv.tag = 0;
  recv.signature = send.signature + 1;
  const Graph sizes({waitsIn(0, 2, send), waitsIn(1, 2, recv)});
  EXPECT_THAT(sizes.graph.mismatches(), UnorderedElementsAre(Pair(0, 1), Pair(1, 0)));
  EXPECT_TRUE(sizes.ends.stuck);
}

TEST(WaitGraph, ACollectiveCountsMoreThanAMessage) {
  const OpEntry open = op(kReduce, 5, false);
  const Graph g({waitsIn(0, 4, op(OpKind::kRecv, 9, false, 3)), waitsIn(1, 4, open),
                 waitsIn(2, 4, open), rankOf(3, 4, after(4))});
  EXPECT_EQ(g.graph.waits().size(), 2u);
  EXPECT_TRUE(std::holds_alternative<CollectiveWait>(*g.graph.widestWait()));
}

}  // namespace wait_graph_test
}  // namespace reft

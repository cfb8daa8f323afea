#include "hang_detect/verdict/agreement_watch.h"

#include <memory>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace reft {
namespace agreement_watch_test {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr uint8_t kInt32 = 3, kFloat32 = 6;
constexpr int64_t kSoon = AgreementWatch::kWaitNs / 2, kLater = 2 * AgreementWatch::kWaitNs;

// The op logs of a node whose ranks share one group.
class Node {
 public:
  explicit Node(int ranks, int world = 0) {
    for (int rank = 0; rank < ranks; ++rank) {
      logs_.push_back(std::make_unique<OpLog>(nullptr, 4096));
      logs_.back()->nameCallSite(1, "train.py:88 step");
    }
    group("default", world > 0 ? world : ranks);
  }

  void group(const std::string& name, int world) {
    for (size_t rank = 0; rank < logs_.size(); ++rank) {
      logs_[rank]->addGroup(name, static_cast<int>(rank), world);
    }
  }

  void op(size_t rank, uint32_t seq, uint8_t dtype = kFloat32, uint32_t group = 0) {
    logs_[rank]->begin({.kind = OpKind::kAllreduce,
                        .group = group,
                        .seq = seq,
                        .bytes = 256,
                        .dtype = dtype,
                        .call_site = 1,
                        .signature = dtype});
  }

  void all(uint32_t first, uint32_t last, uint32_t group = 0) {
    for (uint32_t seq = first; seq <= last; ++seq) {
      for (size_t rank = 0; rank < logs_.size(); ++rank) {
        op(rank, seq, kFloat32, group);
      }
    }
  }

  void read(AgreementWatch& watch, size_t rank, int64_t now_ns = 0) {
    watch.read(static_cast<int>(rank), OpLogReader(logs_[rank]->area(), logs_[rank]->areaBytes()),
               now_ns);
  }
  void readAll(AgreementWatch& watch, int64_t now_ns = 0) {
    for (size_t rank = 0; rank < logs_.size(); ++rank) {
      read(watch, rank, now_ns);
    }
  }

 private:
  std::vector<std::unique_ptr<OpLog>> logs_;
};

TEST(AgreementWatch, RanksThatAgreeAreNotToldOf) {
  Node node(4);
  AgreementWatch watch;
  for (uint32_t round = 0; round < 50; ++round) {
    node.all(round * 100 + 1, round * 100 + 100);
    node.readAll(watch);
    EXPECT_FALSE(watch.next(kLater));
  }
  EXPECT_EQ(watch.count(), 0u);
}

TEST(AgreementWatch, NamesTheMinorityWithItsLineOnceForAGroup) {
  Node node(4);
  AgreementWatch watch;
  node.all(1, 10);
  for (uint32_t seq = 11; seq <= 13; ++seq) {
    for (size_t rank = 0; rank < 4; ++rank) {
      node.op(rank, seq, rank == 2 ? kInt32 : kFloat32);
    }
  }
  node.readAll(watch);
  node.readAll(watch);  // where they were called
  const auto found = watch.next(0);
  ASSERT_TRUE(found);
  EXPECT_EQ(found->what, "dtype_mismatch");
  EXPECT_EQ(found->seq, 11u);
  EXPECT_THAT(found->minority, ElementsAre(2));
  EXPECT_THAT(found->ranks, ElementsAre(0, 1, 2, 3));
  EXPECT_THAT(found->text,
              AllOf(HasSubstr("rank 2 calls all_reduce (256 B, int32) at train.py:88 step"),
                    HasSubstr("ranks 0 1 3 call all_reduce (256 B, float32) at train.py:88 step")));
  EXPECT_FALSE(watch.next(kLater));
  EXPECT_EQ(watch.count(), 3u);
}

TEST(AgreementWatch, WaitsForThoseWhoHaveNotComeButNotForLong) {
  Node node(3);
  AgreementWatch watch;
  node.op(0, 1);
  node.op(1, 1, kInt32);
  node.readAll(watch);
  node.op(2, 1);
  EXPECT_FALSE(watch.next(kSoon)) << "rank 2 tells which of the two is wrong";
  node.read(watch, 2, kSoon);
  EXPECT_FALSE(watch.next(kSoon)) << "where they were called is not known yet";
  node.readAll(watch, kSoon);
  const auto found = watch.next(kSoon);
  ASSERT_TRUE(found);
  EXPECT_THAT(found->minority, ElementsAre(1));

  watch.reset();
  Node other(3);
  other.op(0, 1);
  other.op(1, 1, kInt32);
  other.readAll(watch);
  other.op(2, 7);
  other.read(watch, 2, kSoon);  // it is elsewhere
  EXPECT_FALSE(watch.next(kSoon));
  const auto open = watch.next(kLater);
  ASSERT_TRUE(open);
  EXPECT_THAT(open->ranks, ElementsAre(0, 1));
  EXPECT_THAT(open->minority, IsEmpty());
}

TEST(AgreementWatch, WithoutAMajorityOfTheWholeGroupNobodyIsNamed) {
  Node node(4, 16);
  AgreementWatch watch;
  for (size_t rank = 0; rank < 4; ++rank) {
    node.op(rank, 1, rank == 0 ? kInt32 : kFloat32);
  }
  node.readAll(watch);
  node.readAll(watch);  // where they were called
  const auto found = watch.next(0);
  ASSERT_TRUE(found);
  EXPECT_THAT(found->minority, IsEmpty());
}

TEST(AgreementWatch, RanksMayBeReadAtDifferentPlaces) {
  Node node(2);
  AgreementWatch watch;
  for (uint32_t seq = 1; seq <= 3000; ++seq) {
    node.op(0, seq, seq == 2500 ? kInt32 : kFloat32);
    node.op(1, seq);
    if (seq % 7 == 0) {
      node.read(watch, 0);
    }
    if (seq % 900 == 0) {
      node.read(watch, 1);
    }
  }
  node.readAll(watch);
  EXPECT_EQ(watch.count(), 1u);
}

TEST(AgreementWatch, WhoIsTooFarBehindIsNotCompared) {
  Node node(2);
  AgreementWatch watch;
  node.op(0, 1, kInt32);
  node.read(watch, 0);
  node.all(2, 2000);
  node.op(1, 1);  // long after
  node.readAll(watch);
  EXPECT_EQ(watch.count(), 0u);
}

TEST(AgreementWatch, AGroupThatWasMadeAgainIsAnother) {
  Node node(2);
  AgreementWatch watch;
  for (size_t rank = 0; rank < 2; ++rank) {
    node.op(rank, 1, kInt32);
  }
  node.group("default", 2);  // destroyed, and made again under its name
  node.op(0, 1, kFloat32, 1);
  node.read(watch, 0);
  node.read(watch, 1);
  node.op(1, 1, kFloat32, 1);
  node.readAll(watch);
  EXPECT_EQ(watch.count(), 0u);
}

// After the default group was made again, torch counts from the beginning: ranks 2 and 3 may have a
// group that is called as an earlier one of ranks 0 and 1.
TEST(AgreementWatch, GroupsOfDifferentRanksThatAreCalledTheSameAreNotCompared) {
  AgreementWatch watch;
  for (int rank = 0; rank < 4; ++rank) {
    OpLog log(nullptr, 256);
    log.addGroup("1", rank % 2, 2);
    log.begin({.kind = OpKind::kAllreduce, .seq = 1, .signature = static_cast<uint64_t>(rank / 2)});
    watch.read(rank, OpLogReader(log.area(), log.areaBytes()), 0);
  }
  EXPECT_EQ(watch.count(), 0u);
  EXPECT_FALSE(watch.next(kLater));
}

// As torch names them: the default group "0", made again, and then "1" for whoever is in a second
// group.
TEST(AgreementWatch, GroupsOfTwoLivesAreTwoGroups) {
  AgreementWatch watch;
  OpLog first(nullptr, 256), second(nullptr, 256);
  first.addGroup("0", 0, 3);
  first.addGroup("1", 0, 2);
  first.addGroup("0", 0, 3);
  first.begin({.kind = OpKind::kAllreduce, .group = 1, .seq = 1, .signature = 1});
  second.addGroup("0", 2, 3);
  second.addGroup("0", 2, 3);
  second.addGroup("1", 1, 2);
  second.begin({.kind = OpKind::kBroadcast, .group = 2, .seq = 1, .signature = 2});
  watch.read(0, OpLogReader(first.area(), first.areaBytes()), 0);
  watch.read(2, OpLogReader(second.area(), second.areaBytes()), 0);
  EXPECT_EQ(watch.count(), 0u);
}

TEST(AgreementWatch, GroupsThatDoNotFitIntoTheTableAreNotCompared) {
  AgreementWatch watch;
  OpLog log(nullptr, 4096);
  for (int group = 0; group < 1030; ++group) {
    const uint32_t index = log.addGroup("g" + std::to_string(group), 0, 1);
    log.begin({.kind = OpKind::kAllreduce,
               .group = index,
               .seq = 1,
               .signature = static_cast<uint64_t>(group)});
  }
  watch.read(0, OpLogReader(log.area(), log.areaBytes()), 0);
  EXPECT_EQ(watch.count(), 0u);
}

TEST(AgreementWatch, TellsReductionsThatDiffer) {
  AgreementWatch watch;
  std::vector<std::unique_ptr<OpLog>> logs;
  for (int rank = 0; rank < 3; ++rank) {
    logs.push_back(std::make_unique<OpLog>(nullptr, 256));
    logs.back()->addGroup("0", rank, 3);
    const auto reduce_op = static_cast<uint8_t>(rank == 1 ? 4 : 0);
    logs.back()->begin({.kind = OpKind::kAllreduce,
                        .seq = 1,
                        .dtype = kFloat32,
                        .reduce_op = reduce_op,
                        .signature = reduce_op});
  }
  for (int round = 0; round < 2; ++round) {
    for (int rank = 0; rank < 3; ++rank) {
      watch.read(rank, OpLogReader(logs[static_cast<size_t>(rank)]->area(), logs[0]->areaBytes()),
                 0);
    }
  }
  const auto found = watch.next(0);
  ASSERT_TRUE(found);
  EXPECT_EQ(found->what, "op_mismatch");
  EXPECT_THAT(found->text, AllOf(HasSubstr("rank 1 calls all_reduce (0 B, float32, max)"),
                                 HasSubstr("float32, sum)")));
}

TEST(AgreementWatch, MessagesAndStepsAreNotCompared) {
  Node node(2);
  OpLog log(nullptr, 256), other(nullptr, 256);
  log.addGroup("default", 0, 2);
  other.addGroup("default", 1, 2);
  log.begin({.kind = OpKind::kSend, .seq = 1, .signature = 1});
  log.begin({.kind = OpKind::kStep, .seq = 1});
  other.begin({.kind = OpKind::kRecv, .seq = 1, .signature = 2});
  AgreementWatch watch;
  watch.read(0, OpLogReader(log.area(), log.areaBytes()), 0);
  watch.read(1, OpLogReader(other.area(), other.areaBytes()), 0);
  EXPECT_EQ(watch.count(), 0u);
}

TEST(AgreementWatch, AHostileLogCostsNoMoreThanItsWindows) {
  AgreementWatch watch;
  for (int rank = 0; rank < 80; ++rank) {
    OpLog log(nullptr, 256);
    for (int group = 0; group < 300; ++group) {
      log.addGroup("g" + std::to_string(rank) + "." + std::to_string(group), 0, 1);
    }
    log.begin({.kind = OpKind::kAllreduce, .group = 1u << 31, .seq = 1});
    log.begin({.kind = static_cast<OpKind>(200), .group = 5, .seq = 0});
    log.begin({.kind = OpKind::kAllreduce, .group = 299, .seq = UINT32_MAX});
    watch.read(rank, OpLogReader(log.area(), log.areaBytes()), 0);
  }
  EXPECT_EQ(watch.count(), 0u);
  EXPECT_FALSE(watch.next(kLater));
}

}  // namespace agreement_watch_test
}  // namespace reft

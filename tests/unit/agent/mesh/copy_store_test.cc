#include "agent/mesh/copy_store.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "intercept/base/error.h"
#include "tests/unit/agent/mesh/owner.h"

namespace reft::agent {
namespace copy_store_test {

using mesh_test::fillOf;
using mesh_test::kWorld;
using mesh_test::Owner;

constexpr uint64_t kFirst = 7, kSecond = 8;  // incarnations

class CopyStoreTest : public testing::Test {
 protected:
  // Takes a slot, in pieces. Returns the answer to its offer.
  Kept take(const Owner& owner, uint32_t slot, bool has_committed = false) {
    const SlotHead head = owner.head(slot, has_committed);
    return take(head, owner.bytes(slot));
  }
  Kept take(const SlotHead& head, const std::string& bytes) {
    Kept answer = Kept::kNo;
    auto incoming = store_.begin(head, answer);
    if (incoming == nullptr) {
      return answer;
    }
    size_t at = 0;
    for (size_t piece = 1; !incoming->next().empty(); piece = piece * 3 % 5000 + 1) {
      const auto room = incoming->next();
      const size_t count = std::min({piece, room.size(), bytes.size() - at});
      std::memcpy(room.data(), bytes.data() + at, count);
      incoming->took(count);
      at += count;
    }
    EXPECT_EQ(at, bytes.size());
    store_.seal(*incoming, 99);
    return Kept::kYes;
  }
  char fill(int64_t step, uint64_t incarnation) const {
    const auto copies = store_.copies();
    return copies.empty() ? '?' : fillOf(copies[0].vault->get(), step, incarnation);
  }

  CopyStore store_{"job"};
};

TEST_F(CopyStoreTest, ASlotIsThereAsItsRankWroteIt) {
  Owner owner;
  owner.seal(0, 3, kFirst, 'a');
  ASSERT_EQ(take(owner, 0), Kept::kYes);
  EXPECT_EQ(fill(3, kFirst), 'a');
  const auto copies = store_.copies();
  ASSERT_EQ(copies.size(), 1u);
  const VaultReader copy(copies[0].vault->get()), own(owner.fd());
  EXPECT_EQ(copy.identity().rank, 1);
  EXPECT_EQ(copy.identity().world, kWorld);
  EXPECT_EQ(copy.identity().job, "job");
  const SlotView view = copy.slots().at(0);
  EXPECT_EQ(view.cut, 5u);
  EXPECT_EQ(view.group_digests, (std::vector<uint64_t>{11, 22}));
  EXPECT_EQ(copy.table(view).toJson(), own.table(own.slots().at(0)).toJson());
  const RawSlot raw = copy.rawSlots().at(0);
  EXPECT_EQ(raw.replicas, 6u);
  EXPECT_EQ(raw.proposal, 3);
  EXPECT_TRUE(raw.plan_anew);
  EXPECT_EQ(take(owner, 0), Kept::kYes) << "it is there";
  EXPECT_EQ(VaultReader(store_.copies()[0].vault->get()).slots().size(), 1u);
}

TEST_F(CopyStoreTest, AByteThatChangesOnTheWayIsFoundAndCostsNothingElse) {
  Owner owner;
  owner.seal(0, 3, kFirst, 'a');
  ASSERT_EQ(take(owner, 0), Kept::kYes);
  owner.seal(1, 4, kFirst, 'b');
  const std::string bytes = owner.bytes(1);
  const SlotHead head = owner.head(1);
  for (const size_t at : {size_t{0}, head.table_bytes, head.table_bytes + head.objects_bytes,
                          bytes.size() - head.payload_bytes, bytes.size() - 1}) {
    std::string changed = bytes;
    changed[at] = static_cast<char>(changed[at] ^ 1);
    EXPECT_THROW(take(head, changed), Corruption) << at;
    EXPECT_EQ(fill(4, kFirst), '?') << at;
    EXPECT_EQ(fill(3, kFirst), 'a') << at;
  }
  EXPECT_EQ(take(owner, 1), Kept::kYes);
  EXPECT_EQ(fill(4, kFirst), 'b');
}

TEST_F(CopyStoreTest, WhatTheRankHasOverwrittenMakesRoom) {
  Owner owner;
  for (int64_t step = 1; step <= 6; ++step) {
    owner.seal(step % 2, step, kFirst, static_cast<char>('a' + step));
    ASSERT_EQ(take(owner, step % 2, step > 1), Kept::kYes) << step;
    EXPECT_EQ(fill(step, kFirst), 'a' + step);
    if (step > 1) {
      EXPECT_EQ(fill(step - 1, kFirst), 'a' + step - 1);
      EXPECT_EQ(fill(step - 2, kFirst), '?');
    }
  }
}

TEST_F(CopyStoreTest, AStepThatMayBeCommittedStaysUntilTheRankOverwritesIt) {
  // The rank does not know yet that step 1 is committed, and has sealed step 2.
  Owner owner;
  owner.seal(0, 1, kSecond, 'a');
  take(owner, 0);
  owner.seal(1, 2, kSecond, 'b');
  ASSERT_EQ(take(owner, 1), Kept::kYes);
  EXPECT_EQ(fill(1, kSecond), 'a');
  EXPECT_EQ(fill(2, kSecond), 'b');
}

TEST_F(CopyStoreTest, StepsOfTheAttemptBeforeStayUntilThisOneHasCommitted) {
  Owner before;
  before.seal(0, 5, kFirst, 'a');
  before.seal(1, 6, kFirst, 'b');
  take(before, 0);
  take(before, 1);
  Owner owner;  // of a replacement: its vault is empty
  owner.seal(0, 6, kSecond, 'c');
  ASSERT_EQ(take(owner, 0), Kept::kYes);
  EXPECT_EQ(fill(5, kFirst), 'a');
  EXPECT_EQ(fill(6, kFirst), 'b');
  EXPECT_EQ(fill(6, kSecond), 'c');
  owner.seal(1, 7, kSecond, 'd');
  EXPECT_EQ(take(owner, 1), Kept::kLater);
  EXPECT_EQ(fill(6, kSecond), 'c');
  ASSERT_EQ(take(owner, 1, true), Kept::kYes) << "step 6 is committed";
  EXPECT_EQ(fill(6, kSecond), 'c');
  EXPECT_EQ(fill(7, kSecond), 'd');
  EXPECT_EQ(VaultReader(store_.copies()[0].vault->get()).slots().size(), 2u);
}

TEST_F(CopyStoreTest, ASlotThatDidNotArriveWholeCountsForNothing) {
  Owner owner;
  owner.seal(0, 1, kFirst, 'a');
  Kept answer = Kept::kNo;
  const std::string bytes = owner.bytes(0);
  {
    auto incoming = store_.begin(owner.head(0), answer);
    size_t at = 0;
    while (at < bytes.size() - 100) {
      const auto room = incoming->next();
      const size_t count = std::min(room.size(), bytes.size() - 100 - at);
      std::memcpy(room.data(), bytes.data() + at, count);
      incoming->took(count);
      at += count;
    }
    EXPECT_THROW(store_.seal(*incoming, 1), InvalidArgument);
  }
  EXPECT_EQ(fill(1, kFirst), '?');
  EXPECT_EQ(take(owner, 0), Kept::kYes);
  EXPECT_EQ(fill(1, kFirst), 'a');
}

TEST_F(CopyStoreTest, WithoutMemoryNothingIsTakenAndNothingLost) {
  Owner owner;
  owner.seal(0, 1, kFirst, 'a');
  uint64_t room = 1 << 20;
  store_.limit([&](uint64_t bytes) { return bytes <= room; });
  ASSERT_EQ(take(owner, 0), Kept::kYes);
  room = 100;
  owner.seal(1, 2, kFirst, 'b');
  EXPECT_THROW(take(owner, 1), Unavailable);
  EXPECT_EQ(fill(1, kFirst), 'a');
  EXPECT_GT(store_.bytes(), 0u);
}

TEST_F(CopyStoreTest, CopiesThatAreNoLongerWantedGo) {
  Owner one(1), two(2);
  one.seal(0, 1, kFirst, 'a');
  two.seal(0, 1, kFirst, 'b');
  take(one, 0);
  take(two, 0);
  const auto kept = store_.copies();
  ASSERT_EQ(kept.size(), 2u);
  store_.keepOnly({{2, kWorld}});
  ASSERT_EQ(store_.copies().size(), 1u);
  EXPECT_EQ(store_.copies()[0].owner.rank, 2);
  EXPECT_EQ(fillOf(kept[0].vault->get(), 1, kFirst), 'a') << "a reader of the other one goes on";
}

}  // namespace copy_store_test
}  // namespace reft::agent

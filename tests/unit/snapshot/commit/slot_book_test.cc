#include "snapshot/commit/slot_book.h"

#include <gtest/gtest.h>

#include "intercept/base/error.h"

namespace reft {
namespace slot_book_test {

constexpr uint64_t kInc = 7;

int write(SlotBook& book, int64_t step) {
  const auto slot = book.acquire(step, kInc);
  EXPECT_TRUE(slot.has_value()) << step;
  book.sealed(*slot);
  return *slot;
}

TEST(SlotBook, WaitsWhileTheNewestSnapshotIsUndecided) {
  SlotBook book(2);
  write(book, 1);
  book.outcome(1, kInc, true);
  write(book, 2);
  EXPECT_FALSE(book.canAcquire());
  EXPECT_FALSE(book.acquire(3, kInc).has_value());
  book.outcome(2, kInc, true);
  EXPECT_EQ(book.acquire(3, kInc), 0);
  EXPECT_EQ(book.newestCommitted(), 2);
  EXPECT_TRUE(book.find(2, kInc).has_value());
}

TEST(SlotBook, FillsBothEmptySlotsBeforeTheFirstOutcome) {
  SlotBook book(2);
  EXPECT_EQ(write(book, 1), 0);
  EXPECT_EQ(write(book, 2), 1);
  EXPECT_EQ(book.undecided(), 2u);
  EXPECT_FALSE(book.canAcquire());
}

TEST(SlotBook, ReusesAbortedSlotAndKeepsCommittedOne) {
  SlotBook book(2);
  const int kept = write(book, 1);
  book.outcome(1, kInc, true);
  const int second = write(book, 2);
  book.outcome(2, kInc, false);
  EXPECT_EQ(book.acquire(3, kInc), second);
  EXPECT_EQ(book.find(1, kInc), kept);
}

TEST(SlotBook, KeepsCommittedSlotWhenALateAbortNamesIt) {
  SlotBook book(2);
  write(book, 1);
  book.outcome(1, kInc, true);
  book.outcome(1, kInc, false);
  EXPECT_TRUE(book.find(1, kInc).has_value());
  write(book, 2);
  EXPECT_FALSE(book.canAcquire());
}

TEST(SlotBook, FreesSlotWhoseAbortCameWhileItWasWritten) {
  SlotBook book(2);
  write(book, 1);
  book.outcome(1, kInc, true);
  const auto slot = book.acquire(2, kInc);
  book.outcome(2, kInc, false);
  book.sealed(*slot);
  EXPECT_FALSE(book.find(2, kInc).has_value());
  EXPECT_EQ(book.acquire(3, kInc), slot);
}

TEST(SlotBook, HoldsWhatIsSealedAndNotAborted) {
  SlotBook book(3);
  book.adopt(0, 9, kInc - 1);
  EXPECT_TRUE(book.holds(0));
  EXPECT_FALSE(book.holds(1));
  const int slot = *book.acquire(10, kInc);
  EXPECT_FALSE(book.holds(slot)) << "being written";
  book.sealed(slot);
  EXPECT_TRUE(book.holds(slot));
  book.outcome(10, kInc, false);
  EXPECT_FALSE(book.holds(slot));
}

TEST(SlotBook, DroppedSlotIsFreeAtOnce) {
  SlotBook book(2);
  write(book, 1);
  book.outcome(1, kInc, true);
  const auto slot = book.acquire(2, kInc);
  book.dropped(*slot);
  EXPECT_EQ(book.acquire(3, kInc), slot);
}

TEST(SlotBook, IgnoresCommitOfStepThatNoSlotHolds) {
  SlotBook book(2);
  write(book, 1);
  book.outcome(1, kInc, true);
  write(book, 2);
  book.outcome(9, kInc, true);
  EXPECT_EQ(book.newestCommitted(), 1);
  EXPECT_FALSE(book.canAcquire());
}

TEST(SlotBook, IgnoresOutcomesOfAnotherIncarnation) {
  SlotBook book(2);
  write(book, 1);
  book.outcome(1, kInc + 1, true);
  EXPECT_EQ(book.newestCommitted(), SlotBook::kNone);
  EXPECT_EQ(book.undecided(), 1u);
}

TEST(SlotBook, ProtectsRestoredSlotUntilSomethingNewerIsCommitted) {
  SlotBook book(2);
  book.adopt(1, 100, 3);
  EXPECT_EQ(book.newestCommitted(), 100);
  EXPECT_EQ(book.acquire(101, kInc), 0);
  book.sealed(0);
  EXPECT_FALSE(book.canAcquire());
  book.outcome(101, kInc, false);
  EXPECT_EQ(book.acquire(102, kInc), 0);
  book.sealed(0);
  book.outcome(102, kInc, true);
  EXPECT_EQ(book.acquire(103, kInc), 1);
}

TEST(SlotBook, AdoptedSlotIsOlderThanALowerStepOfThisIncarnation) {
  SlotBook book(2);
  book.adopt(0, 100, 3);
  EXPECT_EQ(book.acquire(0, kInc), 1);
  book.sealed(1);
  book.outcome(0, kInc, true);
  EXPECT_EQ(book.newestCommitted(), 0);
  EXPECT_EQ(book.acquire(1, kInc), 0);
}

TEST(SlotBook, ThreeSlotsReuseTheOldestFirst) {
  SlotBook book(3);
  for (int64_t step = 1; step <= 3; ++step) {
    write(book, step);
    book.outcome(step, kInc, true);
  }
  EXPECT_EQ(book.acquire(4, kInc), 0);
}

TEST(SlotBook, RejectsMisuse) {
  EXPECT_THROW(SlotBook(0), InvalidArgument);
  SlotBook book(2);
  EXPECT_THROW(book.sealed(0), InvalidArgument);
  EXPECT_THROW(book.dropped(5), InvalidArgument);
  EXPECT_THROW(book.adopt(2, 1, 1), InvalidArgument);
  book.adopt(0, 1, 1);
  EXPECT_THROW(book.adopt(1, 2, 1), InvalidArgument);
  book.acquire(5, kInc);
  EXPECT_THROW(book.acquire(6, kInc), InvalidArgument);
  book.sealed(1);
  EXPECT_THROW(book.acquire(5, kInc), InvalidArgument);
  EXPECT_THROW(book.acquire(6, kInc + 1), InvalidArgument);
  EXPECT_THROW(book.adopt(0, 1, 1), InvalidArgument);
}

}  // namespace slot_book_test
}  // namespace reft

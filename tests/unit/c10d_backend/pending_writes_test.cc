#include "c10d_backend/pending_writes.h"

#include <gtest/gtest.h>

namespace reft {
namespace pending_writes_test {

// Its future and itself end when the test ends them, in either order.
class ManualWork : public c10d::Work {
 public:
  explicit ManualWork(bool has_future) {
    if (has_future) {
      future_ = c10::make_intrusive<c10::ivalue::Future>(c10::NoneType::get());
    }
  }
  bool isCompleted() override { return completed; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    return future_ ? future_ : c10d::Work::getFuture();  // which throws
  }
  void endFuture() { future_->markCompleted(c10::IValue()); }

  bool completed = false;

 private:
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

class PendingWritesTest : public ::testing::TestWithParam<bool> {
 protected:
  PendingWritesTest() {
    pending_.add(1, OpKind::kAllreduce, work_, PendingWrites::rangesOf(tensor_));
  }
  bool isPending() { return pending_.find(memory_).has_value(); }

  at::Tensor tensor_ = at::ones({4});
  std::vector<PendingWrites::Range> memory_ = PendingWrites::rangesOf(tensor_);
  c10::intrusive_ptr<ManualWork> work_ = c10::make_intrusive<ManualWork>(GetParam());
  PendingWrites pending_;
};

TEST_P(PendingWritesTest, AnOpIsPendingUntilItsWorkIsComplete) {
  EXPECT_TRUE(isPending());
  EXPECT_FALSE(pending_.find(PendingWrites::rangesOf(at::ones({4})))) << "other memory";
  work_->completed = true;
  EXPECT_FALSE(isPending());
}

// A script that waits for the future goes on before the Work counts as complete (PowerSGD's hook).
TEST_P(PendingWritesTest, OrUntilItsFutureIs) {
  if (GetParam()) {
    work_->endFuture();
  }
  EXPECT_EQ(isPending(), !GetParam());
}

TEST_P(PendingWritesTest, OrUntilNobodyHoldsIt) {
  work_.reset();
  EXPECT_FALSE(isPending());
}

INSTANTIATE_TEST_SUITE_P(WithAndWithoutFuture, PendingWritesTest, ::testing::Bool());

}  // namespace pending_writes_test
}  // namespace reft

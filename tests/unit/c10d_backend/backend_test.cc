// Every virtual of c10d::Backend, called through its base, reaches the inner backend under the same
// name.
#include "c10d_backend/backend.h"

#include <gtest/gtest.h>

#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "c10d_backend/call_site.h"
#include "intercept/record/cut.h"
#include "tests/fakes/recording_backend.h"

namespace reft {
namespace backend_test {

class Forwarding : public ::testing::Test {
 protected:
  Forwarding() {
    inner_ = c10::make_intrusive<RecordingBackend>(0, 2, "inner");
    ReftBackend::Parts parts;
    parts.cpu = inner_;
    parts.store = c10::make_intrusive<c10d::HashStore>();
    parts.store_prefix = "attempt/";
    parts.group_name = "group";
    outer_ = c10::make_intrusive<ReftBackend>(std::move(parts), 0, 2, log_);
  }

  std::vector<OpEntry> entries() const {
    return OpLogReader(log_.area(), log_.areaBytes()).tail(1000);
  }

  template <typename Call>
  void reaches(const std::string& name, Call call) {
    inner_->clear();
    call(static_cast<c10d::Backend&>(*outer_));
    EXPECT_EQ(inner_->calls(), std::vector<std::string>{name});
  }

  OpLog log_{nullptr, 1024};
  c10::intrusive_ptr<RecordingBackend> inner_;
  c10::intrusive_ptr<ReftBackend> outer_;
  std::vector<at::Tensor> tensors_{at::ones({4})};
  std::vector<at::Tensor> more_{at::ones({8})};
  std::vector<std::vector<at::Tensor>> lists_{{at::ones({4}), at::ones({4})}};
  std::vector<int64_t> splits_;
  c10::intrusive_ptr<c10d::Backend::Options> options_ =
      c10::make_intrusive<c10d::Backend::Options>("inner");
};

TEST_F(Forwarding, CountsForTheConsistentCut) {
  const uint64_t group = CutCounter::groupKey("group");
  const auto adds = [](auto call) {
    const uint64_t before = processCut().value();
    call();
    return processCut().value() - before;
  };
  const uint64_t collective = CutCounter::collectiveTerm(group, 0, 2);
  ASSERT_NE(collective, 0u);
  EXPECT_EQ(adds([&] { outer_->allreduce(tensors_, {}); }), collective);
  EXPECT_EQ(adds([&] { outer_->barrier({}); }), collective);
  EXPECT_EQ(adds([&] { outer_->send(tensors_, 1, 0); }), CutCounter::messageTerm(group, 0, 1));
  EXPECT_EQ(adds([&] { outer_->recv(tensors_, 1, 0); }), 0 - CutCounter::messageTerm(group, 1, 0));
  outer_->recvAnysource(tensors_, 0);
  EXPECT_EQ(processCut().value(), kUnknownCut);
  processCut().restart();
}

TEST_F(Forwarding, Collectives) {
  using B = c10d::Backend;
  reaches("broadcast", [&](B& b) { b.broadcast(tensors_); });
  reaches("allreduce", [&](B& b) { b.allreduce(tensors_); });
  reaches("allreduce_sparse", [&](B& b) { b.allreduce_sparse(tensors_); });
  reaches("allreduce_coalesced", [&](B& b) { b.allreduce_coalesced(tensors_); });
  reaches("reduce", [&](B& b) { b.reduce(tensors_); });
  reaches("allgather", [&](B& b) { b.allgather(lists_, tensors_); });
  reaches("_allgather_base", [&](B& b) { b._allgather_base(more_[0], tensors_[0]); });
  reaches("allgather_coalesced", [&](B& b) { b.allgather_coalesced(lists_, tensors_); });
  reaches("allgather_into_tensor_coalesced",
          [&](B& b) { b.allgather_into_tensor_coalesced(more_, tensors_); });
  reaches("gather", [&](B& b) { b.gather(lists_, tensors_); });
  reaches("scatter", [&](B& b) { b.scatter(tensors_, lists_); });
  reaches("reduce_scatter", [&](B& b) { b.reduce_scatter(tensors_, lists_); });
  reaches("_reduce_scatter_base", [&](B& b) { b._reduce_scatter_base(tensors_[0], more_[0]); });
  reaches("reduce_scatter_tensor_coalesced",
          [&](B& b) { b.reduce_scatter_tensor_coalesced(tensors_, more_); });
  reaches("alltoall_base", [&](B& b) { b.alltoall_base(more_[0], more_[0], splits_, splits_); });
  // gloo has no list form: the flat one does it.
  std::vector<at::Tensor> two{at::ones({1}), at::ones({2})};
  reaches("alltoall_base", [&](B& b) { b.alltoall(two, two); });
  reaches("barrier", [&](B& b) { b.barrier(); });
  reaches("monitoredBarrier", [&](B& b) { b.monitoredBarrier({}); });
  reaches("send", [&](B& b) { b.send(tensors_, 1, 0); });
  reaches("recv", [&](B& b) { b.recv(tensors_, 1, 0); });
  reaches("recvAnysource", [&](B& b) { b.recvAnysource(tensors_, 0); });
#if REFT_TORCH_AT_LEAST(2, 15)
  reaches("all_gather_single", [&](B& b) { b.all_gather_single(more_[0], tensors_[0]); });
  reaches("all_gather_single_coalesced",
          [&](B& b) { b.all_gather_single_coalesced(more_, tensors_); });
  reaches("gather_single", [&](B& b) { b.gather_single(more_[0], tensors_[0]); });
  reaches("gather_into_tensor", [&](B& b) { b.gather_into_tensor(more_[0], tensors_[0]); });
  reaches("reduce_scatter_single", [&](B& b) { b.reduce_scatter_single(tensors_[0], more_[0]); });
  reaches("reduce_scatter_single_coalesced",
          [&](B& b) { b.reduce_scatter_single_coalesced(tensors_, more_); });
  reaches("all_to_all_single",
          [&](B& b) { b.all_to_all_single(more_[0], more_[0], splits_, splits_); });
#endif
}

TEST_F(Forwarding, TheRest) {
  using B = c10d::Backend;
  reaches("supportsSplitting", [](B& b) { EXPECT_TRUE(b.supportsSplitting()); });
  reaches("setTimeout", [](B& b) { b.setTimeout(std::chrono::milliseconds(5)); });
  reaches("getBackendOptions", [](B& b) { EXPECT_EQ(b.getBackendOptions()->backend, "inner"); });
#if !REFT_TORCH_AT_LEAST(2, 14)
  reaches("setSequenceNumberForGroup", [](B& b) { b.setSequenceNumberForGroup(); });
#endif
  reaches("getSequenceNumberForGroup", [](B& b) { EXPECT_EQ(b.getSequenceNumberForGroup(), 7U); });
  reaches("registerOnCompletionHook", [](B& b) {
    b.registerOnCompletionHook([](const std::shared_ptr<c10d::WorkInfo>&) {});
    EXPECT_TRUE(b.hasHooks());
  });
  reaches("waitForPendingWorks", [](B& b) { b.waitForPendingWorks(); });
  reaches("enableCollectivesTiming", [](B& b) { b.enableCollectivesTiming(); });
  reaches("setGroupUid", [this](B& b) {
    b.setGroupUid("uid");
    EXPECT_EQ(inner_->getGroupUid(), "uid");
  });
  reaches("eagerConnectSingleDevice", [](B& b) { b.eagerConnectSingleDevice(at::Device("cpu")); });
  reaches("getError", [](B& b) { b.getError(); });
  reaches("getMemAllocator", [](B& b) { b.getMemAllocator(); });
  reaches("allocateTensor", [](B& b) { EXPECT_EQ(b.allocateTensor(3).numel(), 3); });
  reaches("supportsTensorAlloc", [](B& b) { EXPECT_TRUE(b.supportsTensorAlloc(0)); });
  reaches("merge", [this](B& b) {
    EXPECT_EQ(b.merge(c10::make_intrusive<c10d::HashStore>(), options_, 1, 4)->getSize(), 4);
  });
  reaches("abort", [](B& b) { b.abort(); });
#if REFT_TORCH_AT_LEAST(2, 15)
  reaches("suspend", [](B& b) { b.suspend(); });
  reaches("resume", [](B& b) { b.resume(); });
  reaches("getMemoryStats", [](B& b) { b.getMemoryStats(); });
  reaches("isInitialized", [](B& b) { b.isInitialized(); });
  reaches("startTimeEstimate", [](B& b) { b.startTimeEstimate(); });
  reaches("endTimeEstimate", [](B& b) { b.endTimeEstimate(); });
  reaches("addEphemeralTimeout", [](B& b) { b.addEphemeralTimeout(std::chrono::milliseconds(1)); });
  reaches("supportsWindow", [](B& b) { b.supportsWindow(); });
  reaches("new_window", [](B& b) { b.new_window(); });
  reaches("get_reconfigure_handle", [](B& b) { b.get_reconfigure_handle(); });
  reaches("supportsAbortHooks", [](B& b) { b.supportsAbortHooks(); });
  reaches("registerAbortHook", [](B& b) { b.registerAbortHook(1, [] {}); });
  reaches("unregisterAbortHook", [](B& b) { b.unregisterAbortHook(1); });
  reaches("supportsCompletionHooks", [](B& b) { b.supportsCompletionHooks(); });
  reaches("registerCompletionHook",
          [](B& b) { b.registerCompletionHook(1, [](const c10d::CompletionHookArgs&) {}); });
  reaches("unregisterCompletionHook", [](B& b) { b.unregisterCompletionHook(1); });
#endif
}

TEST_F(Forwarding, ShutdownIsForwardedOnce) {
  c10d::Backend& backend = *outer_;
  reaches("shutdown", [](c10d::Backend& b) { b.shutdown(); });
  inner_->clear();
  backend.shutdown();
  EXPECT_TRUE(inner_->calls().empty());
}

TEST_F(Forwarding, NullWorkIsPassedOnAndDone) {
  inner_->return_null(true);
  EXPECT_EQ(outer_->allreduce(tensors_, {}), nullptr);
  ASSERT_EQ(entries().size(), 1U);
  EXPECT_NE(entries()[0].done_ns, 0U);
}

TEST_F(Forwarding, ExceptionIsUnchangedAndMarksTheOpAsFailed) {
  inner_->fail_with("broken");
  try {
    outer_->allreduce(tensors_, {});
    FAIL();
  } catch (const c10::DistBackendError& error) {
    EXPECT_STREQ(error.what_without_backtrace(), "broken");
  }
  EXPECT_TRUE(entries().at(0).failed);
}

TEST_F(Forwarding, PhasesReachTheLogInOrder) {
  const WorkPtr work = outer_->allreduce(tensors_, {});
  EXPECT_EQ(entries().at(0).done_ns, 0U);
  work->wait();
  const OpEntry entry = entries().at(0);
  EXPECT_LE(entry.begin_ns, entry.enqueued_ns);
  EXPECT_LE(entry.enqueued_ns, entry.wait_begin_ns);
  EXPECT_LE(entry.wait_begin_ns, entry.wait_end_ns);
  EXPECT_LE(entry.wait_end_ns, entry.done_ns);
  EXPECT_EQ(entry.bytes, 16U);
  EXPECT_EQ(entry.seq, 1U);
}

TEST_F(Forwarding, CollectivesAndMessagesAreCountedApart) {
  outer_->allreduce(tensors_, {});
  outer_->send(tensors_, 1, 7);
  outer_->allreduce(more_, {});
  const auto rows = entries();
  EXPECT_EQ(rows[0].seq, 1U);
  EXPECT_EQ(rows[1].seq, 1U);
  EXPECT_EQ(rows[1].tag, 7U);
  EXPECT_EQ(rows[2].seq, 2U);
  EXPECT_NE(rows[0].signature, rows[2].signature);
}

TEST_F(Forwarding, SendAndRecvAgreeOnTheirSignature) {
  outer_->send(tensors_, 1, 0);
  outer_->recv(tensors_, 1, 0);
  EXPECT_EQ(entries()[0].signature, entries()[1].signature);
}

TEST_F(Forwarding, SplitTwiceWithOneNameGivesOneChild) {
  options_->group_name = "child";
  const StorePtr store = c10::make_intrusive<c10d::HashStore>();
  inner_->clear();
  const BackendPtr first = outer_->split(store, {0, 1}, options_);
  const BackendPtr second = outer_->split(store, {0, 1}, options_);
  EXPECT_EQ(first, second);
  EXPECT_EQ(inner_->calls(), std::vector<std::string>{"split"});
  options_->group_name = "others";
  EXPECT_EQ(outer_->split(store, {1}, options_), nullptr);
}

TEST_F(Forwarding, MessageToItselfIsMatchedByTag) {
  std::vector<at::Tensor> first{at::zeros({4})};
  std::vector<at::Tensor> second{at::zeros({4})};
  const WorkPtr early = outer_->recv(first, 0, 2);
  EXPECT_FALSE(early->isCompleted());
  std::vector<at::Tensor> twos{at::full({4}, 2.0)};
  outer_->send(tensors_, 0, 1)->wait();
  outer_->send(twos, 0, 2)->wait();
  EXPECT_TRUE(early->wait());
  EXPECT_TRUE(outer_->recv(second, 0, 1)->wait());
  EXPECT_TRUE(at::equal(first[0], twos[0]));
  EXPECT_TRUE(at::equal(second[0], tensors_[0]));
}

// NCCL is played by a second recording backend; its tensors are of device "meta", which needs no
// hardware.
class TwoDevices : public ::testing::Test {
 protected:
  TwoDevices() {
    cpu_ = c10::make_intrusive<RecordingBackend>(0, 2, "gloo");
    cuda_ = c10::make_intrusive<RecordingBackend>(0, 2, "nccl");
    ReftBackend::Parts parts;
    parts.cpu = cpu_;
    parts.cuda = cuda_;
    parts.group_name = "both";
    outer_ = c10::make_intrusive<ReftBackend>(std::move(parts), 0, 2, log_);
    cpu_->clear();
    cuda_->clear();
  }
  OpLog log_{nullptr, 1024};
  c10::intrusive_ptr<RecordingBackend> cpu_;
  c10::intrusive_ptr<RecordingBackend> cuda_;
  c10::intrusive_ptr<ReftBackend> outer_;
  std::vector<at::Tensor> host_{at::ones({4})};
  std::vector<at::Tensor> device_{at::ones({4}, at::Device("meta"))};
};

TEST_F(TwoDevices, TheTensorChooses) {
  outer_->allreduce(host_, {});
  outer_->broadcast(device_, {});
  EXPECT_EQ(cpu_->calls(), std::vector<std::string>{"allreduce"});
  EXPECT_EQ(cuda_->calls(), std::vector<std::string>{"broadcast"});
}

TEST_F(TwoDevices, RegionIsOpenedByTheFirstDeviceOpOnly) {
  outer_->startCoalescing();
  EXPECT_EQ(outer_->send(host_, 1, 0), nullptr);
  EXPECT_TRUE(cuda_->calls().empty());
  outer_->send(device_, 1, 0);
  outer_->recv(device_, 1, 0);
  EXPECT_EQ(cuda_->calls(), (std::vector<std::string>{"startCoalescing", "send", "recv"}));
  const WorkPtr work = outer_->endCoalescing();
  ASSERT_NE(work, nullptr);
  EXPECT_TRUE(work->wait());
  EXPECT_EQ(cuda_->calls().back(), "endCoalescing");
}

TEST_F(TwoDevices, EmptyRegionTouchesNoInnerBackend) {
  outer_->startCoalescing();
  EXPECT_EQ(outer_->endCoalescing(), nullptr);
  EXPECT_TRUE(cuda_->calls().empty());
}

TEST_F(TwoDevices, RegionEndsWhenAnOpFails) {
  cpu_->fail_with("broken");
  outer_->startCoalescing();
  EXPECT_THROW(outer_->send(host_, 1, 0), c10::DistBackendError);
  cpu_->fail_with("");
  EXPECT_NE(outer_->allreduce(host_, {}), nullptr);
}

TEST_F(TwoDevices, BarrierGoesToTheDeviceOnlyIfOneIsNamed) {
  outer_->barrier({});
  EXPECT_EQ(cpu_->calls(), std::vector<std::string>{"barrier"});
  c10d::BarrierOptions options;
  options.device_ids = {0};
  outer_->barrier(options);
  EXPECT_EQ(cuda_->calls(), std::vector<std::string>{"barrier"});
}

TEST_F(TwoDevices, DescriptionAndDeviceReachTheInnerBackends) {
  c10d::Backend& backend = *outer_;
  backend.setGroupDesc("mine");
  backend.setBoundDeviceId(at::Device(at::kCUDA, 1));
  outer_->allreduce(device_, {});
  EXPECT_EQ(cuda_->getGroupDesc(), "mine");
  EXPECT_EQ(cuda_->getBoundDeviceId(), at::Device(at::kCUDA, 1));
}

TEST(CallSites, FirstTextStays) {
  EXPECT_FALSE(callSiteKnown(12345));
  nameCallSite(12345, "a.py:1 f");
  nameCallSite(12345, "b.py:1 f");
  EXPECT_TRUE(callSiteKnown(12345));
  EXPECT_EQ(OpLogReader(processOpLog().area(), processOpLog().areaBytes()).callSites().at(12345),
            "a.py:1 f");
}

}  // namespace backend_test
}  // namespace reft

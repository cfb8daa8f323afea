#include "intercept/nccl_profiler/progress_table.h"

#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "tests/fakes/nccl_script.h"

namespace reft {
namespace progress_table_test {

std::string errorsOf(const NcclCounts& counts) {
  std::string text;
  const auto say = [&](const char* name, uint64_t count) {
    if (count != 0) {
      text += std::string(text.empty() ? "" : " ") + name + "=" + std::to_string(count);
    }
  };
  say("full", counts.full);
  say("contended", counts.contended);
  say("stale", counts.stale);
  say("unknown", counts.unknown);
  say("malformed", counts.malformed);
  say("orphans", counts.orphans);
  say("foreign", counts.foreign);
  say("overrun", counts.overrun);
  say("unreadable", counts.unreadable);
  return text;
}

const NcclTask& taskAt(const NcclProgress& progress, size_t index, size_t comm = 0) {
  return progress.comms.at(comm).tasks.at(index);
}
const NcclProxyOp& opAt(const NcclProgress& progress, size_t index, size_t comm = 0) {
  return progress.comms.at(comm).open.at(index);
}

TEST(NcclProgressTable, ARingInsideANodeShowsItsCollectivesAlone) {
  NcclScript nccl;
  nccl.run(R"(
    comm tp hash=0x77 rank=3 ranks=8 nodes=1
    coll a tp AllReduce seq=5 count=1024 algo=RING proto=LL128 channels=16
    stop a
    coll b tp AllGather seq=9)");
  const NcclProgress progress = nccl.progress();
  EXPECT_TRUE(progress.complete);
  ASSERT_EQ(progress.comms.size(), 1u);
  const NcclComm& comm = progress.comms[0];
  EXPECT_EQ(comm.hash, 0x77u);
  EXPECT_EQ(comm.name, "tp");
  EXPECT_EQ(comm.rank, 3);
  EXPECT_EQ(comm.ranks, 8);
  EXPECT_EQ(comm.nodes, 1);
  ASSERT_EQ(comm.tasks.size(), 2u);
  EXPECT_EQ(comm.tasks[0].func, "AllReduce");
  EXPECT_EQ(comm.tasks[0].seq, 5u);
  EXPECT_EQ(comm.tasks[0].count, 1024u);
  EXPECT_EQ(comm.tasks[0].dtype, "ncclFloat32");
  EXPECT_EQ(comm.tasks[0].algo, "RING");
  EXPECT_EQ(comm.tasks[0].proto, "LL128");
  EXPECT_EQ(comm.tasks[0].channels, 16u);
  EXPECT_TRUE(comm.tasks[0].launched);
  EXPECT_EQ(comm.tasks[0].parts, 0u);
  EXPECT_FALSE(comm.tasks[1].launched);
  EXPECT_EQ(comm.tasks[1].parts_open, 0u);
  EXPECT_TRUE(comm.open.empty());
}

TEST(NcclProgressTable, ASendStepGoesFromTheGpuToThePeerToTheNetwork) {
  NcclScript nccl;
  nccl.run(R"(
    at 10
    comm dp rank=0 nodes=2
    coll c dp AllReduce seq=1
    stop c
    op o dp c send ch=2 peer=1 steps=16
    at 11
    progress o
    step o 0
    gpu o 0)");
  NcclProgress progress = nccl.progress();
  EXPECT_EQ(opAt(progress, 0).start_ns, 10 * kSecond);
  EXPECT_EQ(opAt(progress, 0).progress_ns, 11 * kSecond);
  EXPECT_EQ(opAt(progress, 0).peer, 1);
  EXPECT_EQ(opAt(progress, 0).channel, 2);
  EXPECT_TRUE(opAt(progress, 0).send);
  EXPECT_EQ(opAt(progress, 0).steps, 16u);
  EXPECT_EQ(opAt(progress, 0).task, taskAt(progress, 0).id);
  ASSERT_EQ(opAt(progress, 0).open.size(), 1u);
  EXPECT_EQ(opAt(progress, 0).open[0].state, NcclStep::kSendGpuWait);
  EXPECT_EQ(opAt(progress, 0).open[0].since_ns, 11 * kSecond);
  EXPECT_EQ(taskAt(progress, 0).sends_begun, 4u);
  EXPECT_EQ(taskAt(progress, 0).parts_open, 1u);

  // NCCL repeats this state at each poll while the receiver has no buffer posted.
  nccl.run(R"(
    at 12
    peer o 0
    at 13
    peer o 0
    at 14
    peer o 0)");
  progress = nccl.progress();
  EXPECT_EQ(opAt(progress, 0).open[0].state, NcclStep::kSendPeerWait);
  EXPECT_EQ(opAt(progress, 0).open[0].since_ns, 12 * kSecond);
  EXPECT_EQ(opAt(progress, 0).change_ns, 12 * kSecond);

  nccl.run(R"(
    at 15
    net o 0 bytes=4096
    step o 1
    gpu o 1 bytes=4096
    at 16
    done o 0)");
  progress = nccl.progress();
  EXPECT_EQ(opAt(progress, 0).begun, 2u);
  EXPECT_EQ(opAt(progress, 0).done, 1u);
  EXPECT_EQ(opAt(progress, 0).bytes, 4096u);
  ASSERT_EQ(opAt(progress, 0).open.size(), 1u);
  EXPECT_EQ(opAt(progress, 0).open[0].step, 1u);
  EXPECT_TRUE(progress.complete);
}

TEST(NcclProgressTable, AReceiveStepGoesFromTheNetworkToTheGpu) {
  NcclScript nccl;
  nccl.run(R"(
    comm dp nodes=2
    coll c dp AllReduce seq=1
    op o dp c ch=0 peer=1 steps=4
    step o 0
    recv o 0
    step o 1
    recv o 1
    flush o 0 bytes=100
    take o 0)");
  const NcclProgress progress = nccl.progress();
  EXPECT_FALSE(opAt(progress, 0).send);
  ASSERT_EQ(opAt(progress, 0).open.size(), 2u);
  EXPECT_EQ(opAt(progress, 0).open[0].state, NcclStep::kRecvGpuWait);
  EXPECT_EQ(opAt(progress, 0).open[1].state, NcclStep::kRecvWait);
  EXPECT_EQ(opAt(progress, 0).bytes, 100u);
  EXPECT_EQ(taskAt(progress, 0).recvs_begun, 1u);
}

// The network has no room: NCCL starts the same step again at the next poll, without a stop.
TEST(NcclProgressTable, AStepThatIsStartedAgainKeepsItsTime) {
  NcclScript nccl;
  nccl.run(R"(
    at 5
    comm dp nodes=2
    coll c dp AllReduce seq=1
    op o dp c ch=0 peer=1 steps=4
    step o 0
    at 9
    step o 0)");
  const NcclProgress progress = nccl.progress();
  EXPECT_EQ(opAt(progress, 0).begun, 1u);
  EXPECT_EQ(opAt(progress, 0).open.at(0).state, NcclStep::kPosted);
  EXPECT_EQ(opAt(progress, 0).open.at(0).since_ns, 5 * kSecond);
  EXPECT_EQ(opAt(progress, 0).change_ns, 5 * kSecond);
  EXPECT_EQ(errorsOf(progress.counts), "");
}

TEST(NcclProgressTable, ADoneOpLeavesTheTableAndItsChannelStays) {
  NcclScript nccl;
  nccl.run(R"(
    comm dp nodes=2
    coll c dp AllReduce seq=1 channels=2
    stop c
    op s dp c send ch=1 peer=1 steps=1
    op r dp c ch=1 peer=1 steps=1
    step s 0
    done s 0
    stop s)");
  NcclProgress progress = nccl.progress();
  ASSERT_EQ(progress.comms[0].open.size(), 1u);
  EXPECT_FALSE(opAt(progress, 0).send);
  EXPECT_EQ(taskAt(progress, 0).sends_done, 2u);
  EXPECT_EQ(taskAt(progress, 0).recvs_begun, 2u);
  EXPECT_EQ(taskAt(progress, 0).recvs_done, 0u);
  EXPECT_EQ(taskAt(progress, 0).parts, 2u);
  EXPECT_EQ(taskAt(progress, 0).parts_open, 1u);
  nccl.run("stop r");
  progress = nccl.progress();
  EXPECT_TRUE(progress.comms[0].open.empty());
  EXPECT_EQ(taskAt(progress, 0).parts_open, 0u);
  EXPECT_EQ(progress.counts.ops, 2u);
  EXPECT_EQ(progress.counts.ops_stopped, 2u);
}

TEST(NcclProgressTable, MessagesOfAGroupKeepTheirPeers) {
  NcclScript nccl;
  nccl.run(R"(
    comm pp rank=1 ranks=4 nodes=4
    p2p s pp Send peer=2 count=64
    p2p r pp Recv peer=0 count=32
    stop s
    stop r
    op so pp s send ch=0 peer=2 steps=1
    op ro pp r ch=1 peer=0 steps=1)");
  const NcclProgress progress = nccl.progress();
  EXPECT_TRUE(taskAt(progress, 0).p2p);
  EXPECT_EQ(taskAt(progress, 0).func, "Send");
  EXPECT_EQ(taskAt(progress, 0).peer, 2);
  EXPECT_EQ(taskAt(progress, 1).func, "Recv");
  EXPECT_EQ(taskAt(progress, 1).peer, 0);
  EXPECT_EQ(opAt(progress, 0).task, taskAt(progress, 0).id);
  EXPECT_EQ(opAt(progress, 1).task, taskAt(progress, 1).id);
}

TEST(NcclProgressTable, KernelsAreSeenPerChannel) {
  NcclScript nccl(true);
  nccl.run(R"(
    comm tp
    coll c tp AllReduce seq=1 channels=3
    stop c
    kernel k0 c ch=0
    kernel k2 c ch=2
    stop k0)");
  EXPECT_EQ(nccl.mask() & int{nccl_abi::kKernelCh}, int{nccl_abi::kKernelCh});
  const NcclProgress progress = nccl.progress();
  EXPECT_TRUE(progress.comms[0].kernels);
  EXPECT_EQ(taskAt(progress, 0).kernels_begun, 5u);
  EXPECT_EQ(taskAt(progress, 0).kernels_done, 1u);
  EXPECT_EQ(taskAt(progress, 0).parts_open, 1u);
  EXPECT_EQ(errorsOf(progress.counts), "");
}

TEST(NcclProgressTable, KernelsAreNotAskedForByDefault) {
  NcclScript nccl;
  nccl.run("comm tp");
  EXPECT_EQ(nccl.mask(), int{nccl_abi::kColl} | int{nccl_abi::kP2p} | int{nccl_abi::kProxyOp} |
                             int{nccl_abi::kProxyStep});
}

TEST(NcclProgressTable, CommunicatorsAreApart) {
  NcclScript nccl;
  nccl.run(R"(
    comm a hash=1
    comm b hash=2
    coll x a AllReduce seq=1
    coll y b Broadcast seq=1
    op p b y send peer=1
    end a
    comm c hash=3
    coll z c Reduce seq=1)");
  const NcclProgress progress = nccl.progress();
  ASSERT_EQ(progress.comms.size(), 2u);
  EXPECT_EQ(progress.comms[0].hash, 3u);  // in the slot of `a`, and nothing of it is left
  ASSERT_EQ(progress.comms[0].tasks.size(), 1u);
  EXPECT_EQ(taskAt(progress, 0).func, "Reduce");
  EXPECT_EQ(progress.comms[1].hash, 2u);
  EXPECT_EQ(progress.comms[1].open.size(), 1u);
  EXPECT_EQ(errorsOf(progress.counts), "");
}

struct Malformed {
  const char* name;
  const char* script;
  const char* errors;
};

class MalformedOrder : public ::testing::TestWithParam<Malformed> {};

TEST_P(MalformedOrder, IsCountedAndNotFollowed) {
  NcclScript nccl(true);
  nccl.run(R"(
    comm dp nodes=2
    coll c dp AllReduce seq=1
    stop c
    op o dp c send peer=1 steps=8
    step o 0
    gpu o 0)");
  nccl.run(GetParam().script);
  const NcclProgress progress = nccl.progress();
  EXPECT_EQ(errorsOf(progress.counts), GetParam().errors);
  EXPECT_FALSE(progress.complete);
  EXPECT_FALSE(progress.broken);
  const NcclCounts& counts = progress.counts;
  size_t open = 0;
  for (const NcclComm& comm : progress.comms) {
    open += comm.open.size();
  }
  EXPECT_EQ(counts.ops, counts.ops_stopped + counts.ops_ended + open);
}

INSTANTIATE_TEST_SUITE_P(
    Orders, MalformedOrder,
    ::testing::Values(
        Malformed{"DoubleStop", "done o 0\ndone o 0\nstop o\nstop o\nstop c", "stale=3"},
        Malformed{"StateAfterStop", "done o 0\nnet o 0\nstop o\ngpu o 0\nprogress o", "stale=3"},
        Malformed{"StepOfAStoppedOp", "stop o\nstep o 1", "stale=1"},
        Malformed{"OpWithoutParent", "op p dp - send peer=1", "orphans=1"},
        Malformed{"OpOfAnotherKindOfParent", "op p dp o send peer=1", "unknown=1 orphans=1"},
        Malformed{"OpWithoutCommunicator", "op p - c send peer=1", "unknown=1"},
        Malformed{"OpOfAnotherProcess", "op p dp c send peer=1 pid=99\nstep p 0\nstop p",
                  "foreign=1"},
        Malformed{"ChannelOutOfRange", "op p dp c send ch=64\nkernel k c ch=200", "malformed=2"},
        Malformed{"NegativeStep", "step o -1", "malformed=1"},
        Malformed{"StepInTheSlotOfAnOpenOne", "step o 8\ngpu o 0\ndone o 0", "stale=2 overrun=1"},
        Malformed{"CommunicatorEndsWithOpenEvents",
                  "kernel k c\nend dp\ngpu o 0\nnet o 0\ndone o 0\nstop o\nstop k\nend dp",
                  "stale=6"},
        Malformed{"TaskOfAnEndedCommunicator", "end dp\ncoll d dp Reduce\nop p dp d", "stale=2"},
        Malformed{"KernelStopsTwice", "kernel k c\nstop k\nstop k", "stale=1"},
        Malformed{"KernelBeginsTwice", "kernel k c\nkernel k c\nstop k", "overrun=1"},
        Malformed{"KernelOfAnOp", "kernel k o", "unknown=1"},
        Malformed{"ParentOfAnotherCommunicator", "comm e\nop p e c", "orphans=1"}),
    [](const auto& info) { return info.param.name; });

TEST(NcclProgressTable, HandlesOfAnotherProcessAreUnknown) {
  NcclProgressTable ours(1);
  NcclProgressTable theirs(2);
  const auto comm = theirs.startComm({}, 1);
  const auto task = theirs.startTask(comm, {}, 1);
  const auto op = theirs.startOp(comm, task, {}, 1);
  const auto own = ours.startComm({}, 1);
  EXPECT_EQ(ours.startTask(comm, {}, 1), 0u);
  EXPECT_EQ(ours.startStep(op, 0, 1), 0u);
  ours.stop(op, 1);
  ours.stop(0xdeadbeef, 1);
  EXPECT_NE(ours.startOp(own, task, {}, 1), 0u);
  EXPECT_EQ(errorsOf(ours.snapshot().counts), "unknown=5 orphans=1");
  // One that differs in a single bit, whichever, is none of ours, and nothing is filed under it.
  for (int bit = 0; bit < 64; ++bit) {
    EXPECT_EQ(ours.startOp(own ^ uint64_t{1} << bit, 0, {}, 1), 0u) << bit;
  }
}

TEST(NcclProgressTable, TheOldestTaskWithoutOpenPartsIsReused) {
  NcclScript nccl;
  nccl.run(R"(
    comm dp nodes=2
    coll stuck dp AllReduce seq=0
    stop stuck
    op o dp stuck send peer=1)");
  for (int i = 1; i <= 200; ++i) {
    nccl.run("coll c dp AllReduce seq=" + std::to_string(i) + "\nstop c");
  }
  const NcclProgress progress = nccl.progress();
  const auto& tasks = progress.comms[0].tasks;
  ASSERT_EQ(tasks.size(), NcclProgressTable::kTasks);
  EXPECT_EQ(tasks[0].seq, 0u);
  for (size_t i = 1; i < tasks.size(); ++i) {
    EXPECT_EQ(tasks[i].seq, 200 - (tasks.size() - 1) + i);
  }
  EXPECT_TRUE(progress.complete);
}

TEST(NcclProgressTable, AFullTableDropsAndRecovers) {
  NcclScript nccl;
  nccl.run("comm dp nodes=2\ncoll c dp AllReduce seq=1\nstop c");
  for (size_t i = 0; i < NcclProgressTable::kOps; ++i) {
    nccl.run("op o" + std::to_string(i) + " dp c send peer=1");
  }
  EXPECT_TRUE(nccl.progress().complete);
  nccl.run("op extra dp c send peer=1\nstep extra 0\nstop extra");
  EXPECT_EQ(nccl.handleOf("extra"), nullptr);
  NcclProgress progress = nccl.progress();
  EXPECT_EQ(errorsOf(progress.counts), "full=1");
  EXPECT_EQ(progress.comms[0].open.size(), NcclProgressTable::kOps);
  nccl.run("end dp\ncomm next\ncoll c next AllReduce\nop again next c send peer=1");
  progress = nccl.progress();
  EXPECT_EQ(progress.counts.ops_ended, NcclProgressTable::kOps);
  EXPECT_EQ(progress.comms.at(0).open.size(), 1u);
  EXPECT_EQ(errorsOf(progress.counts), "full=1");
}

TEST(NcclProgressTable, TooManyCommunicatorsAreNotRecorded) {
  NcclScript nccl;
  for (size_t i = 0; i <= NcclProgressTable::kComms; ++i) {
    nccl.run("comm c" + std::to_string(i) + " hash=" + std::to_string(i + 1));
  }
  EXPECT_EQ(nccl.handleOf("c" + std::to_string(NcclProgressTable::kComms)), nullptr);
  EXPECT_EQ(nccl.progress().comms.size(), NcclProgressTable::kComms);
  EXPECT_NE(nccl.mask(), 0);  // the others go on
  nccl.run("end c5\ncomm late hash=99");
  EXPECT_EQ(nccl.progress().comms.at(5).hash, 99u);
}

TEST(NcclProgressTable, LongNamesAreCut) {
  NcclScript nccl;
  nccl.run("comm " + std::string(200, 'n') + "\ncoll c " + std::string(200, 'n') + " " +
           std::string(99, 'f'));
  const NcclProgress progress = nccl.progress();
  EXPECT_EQ(progress.comms.at(0).name, std::string(31, 'n'));
  EXPECT_EQ(taskAt(progress, 0).func, std::string(15, 'f'));
}

// The launch thread and the proxy thread of two communicators write, a third thread reads. Each
// copy must be one that some moment had: the writers keep values that belong together.
TEST(NcclProgressTable, AReaderNeverSeesHalfAWrite) {
  const auto table = std::make_unique<NcclProgressTable>(uint8_t{9});
  std::atomic<bool> enough{false};
  std::atomic<uint64_t> rounds{0};
  const auto write = [&](int rank) {
    NcclProgressTable::CommStart start;
    start.rank = rank;
    start.hash = static_cast<uint64_t>(rank);
    const auto comm = table->startComm(start, 1);
    for (int round = 1; !enough; ++round, ++rounds) {
      const auto task = table->startTask(
          comm, {.func = "F", .seq = uint64_t(round), .count = uint64_t(round) * 3}, round);
      table->stop(task, round);
      const auto op = table->startOp(comm, task, {.peer = round, .steps = round}, round);
      for (int step = 0; step < 3; ++step) {
        const auto handle = table->startStep(op, step, round);
        table->moveStep(handle, NcclStep::kRecvFlushWait, 1000, [&] { return int64_t(round); });
        table->stop(handle, round);
      }
      table->stop(op, round);
    }
  };
  std::thread launch(write, 1);
  std::thread proxy(write, 2);
  for (uint64_t seen = 0; seen < 100;) {
    const NcclProgress progress = table->snapshot();
    for (const NcclComm& comm : progress.comms) {
      EXPECT_EQ(comm.hash, static_cast<uint64_t>(comm.rank));
      for (const NcclTask& task : comm.tasks) {
        EXPECT_EQ(task.count, task.seq * 3);
        EXPECT_EQ(task.start_ns, static_cast<int64_t>(task.seq));
      }
      for (const NcclProxyOp& op : comm.open) {
        ++seen;
        EXPECT_EQ(op.peer, static_cast<int>(op.steps));
        EXPECT_EQ(op.start_ns, op.peer);
        EXPECT_EQ(op.begun, op.done + op.open.size());
        const bool flushed = !op.open.empty() && op.open[0].state == NcclStep::kRecvFlushWait;
        EXPECT_EQ(op.bytes, (op.done + (flushed ? 1 : 0)) * 1000);
      }
    }
  }
  enough = true;
  launch.join();
  proxy.join();
  const NcclProgress progress = table->snapshot();
  EXPECT_EQ(progress.counts.ops_stopped, rounds);
  EXPECT_EQ(progress.counts.contended + progress.counts.stale + progress.counts.unknown +
                progress.counts.orphans + progress.counts.full,
            0u);
}

// What no NCCL does: two threads drive the same op and the same task.
TEST(NcclProgressTable, TwoWritersOfOneOpLoseEventsAndNothingElse) {
  constexpr int kRounds = 3000;
  const auto table = std::make_unique<NcclProgressTable>(uint8_t{9});
  const auto comm = table->startComm({}, 1);
  std::atomic<uint64_t> shared_op{0}, shared_task{0};
  const auto write = [&] {
    for (int round = 1; round <= kRounds; ++round) {
      shared_task = table->startTask(comm, {.func = "F"}, round);
      shared_op = table->startOp(comm, shared_task, {.steps = 4}, round);
      const auto step = table->startStep(shared_op, round % 4, round);
      table->moveStep(step, NcclStep::kSendWait, 1, [&] { return int64_t(round); });
      table->stop(step, round);
      const auto kernel = table->startKernel(shared_task, round % 64, round);
      table->stop(kernel, round);
      table->stop(shared_op, round);
      table->stop(shared_task, round);
    }
  };
  std::thread one(write);
  std::thread two(write);
  one.join();
  two.join();
  NcclProgress progress = table->snapshot();
  EXPECT_FALSE(progress.broken);
  const NcclCounts& counts = progress.counts;
  EXPECT_EQ(counts.ops, counts.ops_stopped + counts.ops_ended + progress.comms.at(0).open.size());
  table->endComm(comm);
  progress = table->snapshot();
  EXPECT_EQ(progress.counts.ops, progress.counts.ops_stopped + progress.counts.ops_ended);
}

}  // namespace progress_table_test
}  // namespace reft

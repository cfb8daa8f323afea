// Events in any order with any handles: live ones, ended ones, of the wrong kind, with flipped
// bits, of no event. Eight bytes an event. The table must keep its counts, and the verdict on what
// it shows must name no rank where it is undecidable.
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "hang_detect/evidence/nccl_progress.h"
#include "hang_detect/verdict/nccl_edges.h"
#include "intercept/nccl_profiler/listener.h"

namespace {

constexpr int kPid = 4711;
constexpr std::array<const char*, 6> kTexts = {
    nullptr, "", "AllReduce", "RING", "TREE", "a text that is longer than a slot"};
int64_t now_ns = 1;

int64_t clockNs() {
  return now_ns;
}

void require(bool condition) {
  if (!condition) {
    std::abort();
  }
}

void checkProgress(const reft::NcclProgress& progress) {
  require(!progress.broken);
  uint64_t open = 0;
  for (const reft::NcclComm& comm : progress.comms) {
    open += comm.open.size();
    uint64_t serial = 0;
    for (const reft::NcclTask& task : comm.tasks) {
      require(task.serial > serial && task.parts_open <= task.parts);
      require((task.sends_done & ~task.sends_begun) == 0);
      require((task.recvs_done & ~task.recvs_begun) == 0);
      require((task.kernels_done & ~task.kernels_begun) == 0);
      serial = task.serial;
    }
    for (const reft::NcclProxyOp& op : comm.open) {
      require(op.done <= op.begun && op.open.size() <= reft::NcclProgressTable::kWindow);
    }
  }
  const reft::NcclCounts& counts = progress.counts;
  require(counts.ops == counts.ops_stopped + counts.ops_ended + open);
  require(counts.kernels >= counts.kernels_stopped);
  require(counts.comms == counts.comms_ended + progress.comms.size());
  require(counts.contended == 0 && counts.unreadable == 0);  // one thread
}

void checkVerdict(const reft::NcclProgress& progress) {
  auto findings = reft::diagnoseNccl(progress, now_ns + 100, 50);
  for (size_t i = 0; i < findings.size(); ++i) {
    findings[i].proxy = static_cast<reft::NcclProxy>(i % 3);
  }
  const reft::NcclAnswer answer = reft::joinNccl(findings);
  using Kind = reft::NcclAnswer::Kind;
  const bool names = answer.kind == Kind::kGpu || answer.kind == Kind::kProxy;
  require(names || answer.rank == -1);
  require((answer.kind == Kind::kNetwork) == !answer.links.empty());
  require((answer.kind == Kind::kUndecidable) == !answer.candidates.empty());
  require((answer.kind == Kind::kUndecidable) == !answer.why.empty());
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  // Kept between inputs, because a table is large: each input ends its communicators, and what is
  // left of it are counts and generations.
  static const auto plain = std::make_unique<reft::NcclListener>(kPid, false, &clockNs);
  static const auto kernels = std::make_unique<reft::NcclListener>(kPid, true, &clockNs);
  const auto& listener = (size & 1) != 0 ? kernels : plain;
  int mask = 0;
  std::vector<void*> handles = {nullptr, &mask, reinterpret_cast<void*>(~uintptr_t{0})};
  std::vector<void*> comms;
  for (; size >= 8; data += 8, size -= 8) {
    void* one = handles[data[1] % handles.size()];
    void* const two = handles[data[2] % handles.size()];
    if ((data[0] & 0x80) != 0) {
      one = reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(one) ^
                                    (uintptr_t{1} << (data[3] & 63)));
    }
    now_ns += data[7];
    reft::nccl_abi::EventV5 event{};
    event.parent = two;
    void* handle = &mask;
    switch (data[0] & 0x0f) {
      case 0:
        listener->init(&handle, data[3], &mask, kTexts[data[4] % kTexts.size()], data[5], data[6],
                       static_cast<int8_t>(data[4]));
        handles.push_back(handle);
        comms.push_back(handle);
        continue;
      case 1: listener->finalize(one); continue;
      case 2:
      case 3: listener->stop(one); continue;
      case 4:
      case 5:
      case 6: {
        reft::nccl_abi::StateArgs args{};
        args.proxy_step.bytes = data[4];
        listener->record(one, data[5] & 31, (data[6] & 1) != 0 ? nullptr : &args);
        continue;
      }
      case 7:
      case 8:
        event.type = reft::nccl_abi::kColl;
        event.coll.func = kTexts[data[4] % kTexts.size()];
        event.coll.algo = kTexts[data[5] % kTexts.size()];
        event.coll.seq = data[6];
        break;
      case 9:
        event.type = reft::nccl_abi::kP2p;
        event.p2p.func = kTexts[data[4] % kTexts.size()];
        event.p2p.peer = static_cast<int8_t>(data[5]);
        break;
      case 10:
      case 11:
        event.type = reft::nccl_abi::kProxyOp;
        event.proxy_op.pid = data[3] == 255 ? 1 : kPid;
        event.proxy_op.channel = data[4];
        event.proxy_op.peer = static_cast<int8_t>(data[5]);
        event.proxy_op.steps = static_cast<int8_t>(data[6]);
        event.proxy_op.is_send = data[3] & 1;
        break;
      case 12:
      case 13:
        event.type = reft::nccl_abi::kProxyStep;
        event.proxy_step.step = static_cast<int8_t>(data[4]) * (1 << (data[5] % 25));
        break;
      case 14:
        event.type = reft::nccl_abi::kKernelCh;
        event.kernel_ch.channel = data[4];
        break;
      default:
        event.type = uint64_t{1} << (data[4] & 63);
        std::memset(&event.coll_api, data[5], sizeof(event.coll_api));
        if ((event.type & (reft::nccl_abi::kColl | reft::nccl_abi::kP2p)) != 0) {
          continue;  // NCCL's texts are texts
        }
    }
    listener->start(one, &handle, &event, event.type);
    require(handle != &mask);
    handles.push_back(handle);
  }
  const reft::NcclProgress progress = listener->table().snapshot();
  checkProgress(progress);
  checkVerdict(progress);
  for (void* const comm : comms) {
    listener->finalize(comm);
  }
  const reft::NcclProgress after = listener->table().snapshot();
  require(after.comms.empty() &&
          after.counts.ops == after.counts.ops_stopped + after.counts.ops_ended);
  return 0;
}

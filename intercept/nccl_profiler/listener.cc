#include "intercept/nccl_profiler/listener.h"

#include <sys/syscall.h>
#include <unistd.h>

#include "intercept/base/hash.h"

namespace reft {

namespace nccl_listener {

namespace {

using namespace nccl_abi;

constexpr int kMask = kColl | kP2p | kProxyOp | kProxyStep;

uint32_t threadId() {
  static thread_local const auto id = static_cast<uint32_t>(::syscall(SYS_gettid));
  return id;
}

uint64_t fromPointer(const void* pointer) {
  return reinterpret_cast<uintptr_t>(pointer);
}
void* toPointer(uint64_t handle) {
  return reinterpret_cast<void*>(static_cast<uintptr_t>(handle));
}

NcclStep stepOf(int state) {
  switch (state) {
    case kStepSendGpuWait: return NcclStep::kSendGpuWait;
    case kStepSendPeerWait: return NcclStep::kSendPeerWait;
    case kStepSendWait: return NcclStep::kSendWait;
    case kStepRecvWait: return NcclStep::kRecvWait;
    case kStepRecvFlushWait: return NcclStep::kRecvFlushWait;
    case kStepRecvGpuWait: return NcclStep::kRecvGpuWait;
    default: return NcclStep::kNone;
  }
}

}  // namespace

}  // namespace nccl_listener

using namespace nccl_listener;

NcclListener::NcclListener(int pid, bool kernels, Now now)
    : pid_(pid),
      kernels_(kernels),
      now_(now),
      table_(static_cast<uint8_t>(mixed(static_cast<uint64_t>(pid)))) {}

void NcclListener::init(void** context, uint64_t hash, int* mask, const char* name, int nodes,
                        int ranks, int rank) noexcept {
  if (context == nullptr || mask == nullptr) {
    return;
  }
  NcclProgressTable::CommStart start;
  start.hash = hash;
  start.name = name;
  start.nodes = nodes;
  start.ranks = ranks;
  start.rank = rank;
  start.kernels = kernels_;
  *context = toPointer(table_.startComm(start, now_()));
  mask_.store(mask, std::memory_order_relaxed);
  const int wanted = kMask | (kernels_ ? int{kKernelCh} : 0);
  __atomic_store_n(mask, table_.broken() ? 0 : wanted, __ATOMIC_RELAXED);
}

uint64_t NcclListener::startTask(void* context, const EventV5& event, bool p2p) noexcept {
  NcclProgressTable::TaskStart start;
  start.p2p = p2p;
  if (p2p) {
    start.func = event.p2p.func;
    start.count = event.p2p.count;
    start.dtype = event.p2p.dtype;
    start.peer = event.p2p.peer;
    start.channels = event.p2p.channels;
  } else {
    start.func = event.coll.func;
    start.seq = event.coll.seq;
    start.count = event.coll.count;
    start.dtype = event.coll.dtype;
    start.algo = event.coll.algo;
    start.proto = event.coll.proto;
    start.peer = event.coll.root;
    start.channels = event.coll.channels;
  }
  return table_.startTask(fromPointer(context), start, now_());
}

uint64_t NcclListener::startOp(void* context, const EventV5& event) noexcept {
  if (event.proxy_op.pid != pid_) {
    table_.countForeign();  // its context and parent are handles of that process, even if they fit
    return 0;
  }
  NcclProgressTable::OpStart start;
  start.channel = event.proxy_op.channel;
  start.peer = event.proxy_op.peer;
  start.steps = event.proxy_op.steps;
  start.send = event.proxy_op.is_send != 0;
  start.thread = threadId();
  return table_.startOp(fromPointer(context), fromPointer(event.parent), start, now_());
}

void NcclListener::start(void* context, void** handle, const EventV5* event,
                         uint64_t type) noexcept {
  if (handle == nullptr) {
    return;
  }
  *handle = nullptr;
  if (event == nullptr) {
    return;
  }
  if (table_.broken()) {
    int* const mask = mask_.load(std::memory_order_relaxed);
    if (mask != nullptr) {
      __atomic_store_n(mask, 0, __ATOMIC_RELAXED);
    }
    return;
  }
  uint64_t started = 0;
  switch (type) {
    case kProxyStep:
      if (event->parent != nullptr) {  // else of an op that was not recorded
        started = table_.startStep(fromPointer(event->parent), event->proxy_step.step, now_());
      }
      break;
    case kProxyOp: started = startOp(context, *event); break;
    case kColl: started = startTask(context, *event, false); break;
    case kP2p: started = startTask(context, *event, true); break;
    case kKernelCh:
      if (event->parent != nullptr) {
        started = table_.startKernel(fromPointer(event->parent), event->kernel_ch.channel, now_());
      }
      break;
    default: break;
  }
  *handle = toPointer(started);
}

void NcclListener::stop(void* handle) noexcept {
  if (handle != nullptr) {
    table_.stop(fromPointer(handle), now_());
  }
}

void NcclListener::record(void* handle, int state, const StateArgs* args) noexcept {
  if (handle == nullptr) {
    return;
  }
  const NcclStep step = stepOf(state);
  if (step != NcclStep::kNone) {
    table_.moveStep(fromPointer(handle), step, args != nullptr ? args->proxy_step.bytes : 0, now_);
  } else if (state == kOpInProgress) {
    table_.progressOp(fromPointer(handle), now_());
  }
}

void NcclListener::finalize(void* context) noexcept {
  if (context != nullptr) {
    table_.endComm(fromPointer(context));
  }
}

}  // namespace reft

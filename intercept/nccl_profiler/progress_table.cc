#include "intercept/nccl_profiler/progress_table.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace reft {

namespace nccl_table {

namespace {

// Handles: kind (4 bits), nonce (8), index (12), extra (16), generation (24). No kind is 0, so no
// handle is, and no handle looks like an address of user space.
constexpr int kKindShift = 60, kNonceShift = 52, kIndexShift = 40, kExtraShift = 24;
constexpr uint32_t kGenerations = uint32_t{1} << 24;
static_assert(NcclProgressTable::kOps <= 4096);
static_assert(NcclProgressTable::kComms * NcclProgressTable::kTasks <= 4096);
static_assert(NcclProgressTable::kChannels == 64, "one bit each in a word");

// Tags of communicators and ops: generation (24), version (38), open, busy.
constexpr uint64_t kBusy = 1, kOpen = 2, kVersion = 4;
constexpr int kGenerationShift = 40;

// Life of a task: generation (24), open parts (16), parts begun (21), launching, used, busy. While
// it is launching, it counts as one of its own open parts.
constexpr uint64_t kUsed = 2, kLaunching = 4, kPart = 8, kOpenPart = uint64_t{1} << 24;
constexpr uint64_t kMostParts = (uint64_t{1} << 21) - 1, kMostOpen = (uint64_t{1} << 16) - 1;

// Tries to take a slot. Another thread holds one for a few stores, or has been preempted there.
constexpr int kTries = 64;
constexpr size_t kProbes = 64;

constexpr uint32_t generationOf(uint64_t word) {
  return static_cast<uint32_t>(word >> kGenerationShift);
}
constexpr uint64_t atGeneration(uint32_t generation) {
  return uint64_t{generation} << kGenerationShift;
}
constexpr uint32_t nextGeneration(uint32_t generation) {
  return generation + 1 == kGenerations ? 1 : generation + 1;
}
constexpr uint64_t openParts(uint64_t life) {
  return life >> 24 & kMostOpen;
}
constexpr uint64_t partsBegun(uint64_t life) {
  return life >> 3 & kMostParts;
}
constexpr uint64_t bitOf(int channel) {
  return uint64_t{1} << channel;
}

// The tag after a write: same generation, next version.
constexpr uint64_t released(uint64_t tag) {
  return atGeneration(generationOf(tag)) |
         ((tag + kVersion) & (atGeneration(1) - 1) & ~(kBusy | kOpen));
}

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// Takes a slot that is not in use; returns its new tag, busy and not yet open, or 0.
uint64_t take(std::atomic<uint64_t>& tag) {
  uint64_t found = tag.load(std::memory_order_relaxed);
  if ((found & (kBusy | kOpen)) != 0) {
    return 0;
  }
  const uint64_t taken = atGeneration(nextGeneration(generationOf(found))) | kBusy;
  return tag.compare_exchange_strong(found, taken, std::memory_order_acq_rel) ? taken : 0;
}

}  // namespace

}  // namespace nccl_table

using namespace nccl_table;

template <size_t kWords>
void NcclProgressTable::Text<kWords>::set(const char* text) noexcept {
  std::array<uint64_t, kWords> words{};
  char* const bytes = reinterpret_cast<char*>(words.data());
  for (size_t i = 0; text != nullptr && i + 1 < sizeof(words) && text[i] != '\0'; ++i) {
    bytes[i] = text[i];
  }
  for (size_t i = 0; i < kWords; ++i) {
    words_[i].set(words[i]);
  }
}

template <size_t kWords>
std::string NcclProgressTable::Text<kWords>::get() const {
  std::array<uint64_t, kWords> words;
  for (size_t i = 0; i < kWords; ++i) {
    words[i] = words_[i].get();
  }
  const char* const bytes = reinterpret_cast<const char*>(words.data());
  return {bytes, ::strnlen(bytes, sizeof(words))};
}

NcclProgressTable::Handle NcclProgressTable::handle(Kind kind, size_t index, uint32_t extra,
                                                    uint32_t generation) const noexcept {
  return uint64_t{kind} << kKindShift | uint64_t{nonce_} << kNonceShift |
         uint64_t{index} << kIndexShift | uint64_t{extra & 0xffff} << kExtraShift | generation;
}

bool NcclProgressTable::parse(Handle handle, Kind kind, size_t slots, Parts& parts) noexcept {
  parts.kind = static_cast<uint8_t>(handle >> kKindShift);
  parts.nonce = static_cast<uint8_t>(handle >> kNonceShift);
  parts.index = static_cast<uint16_t>(handle >> kIndexShift & 0xfff);
  parts.extra = static_cast<uint16_t>(handle >> kExtraShift);
  parts.generation = static_cast<uint32_t>(handle & (kGenerations - 1));
  const bool has_extra = kind == kStep || kind == kKernel;
  if (parts.kind != kind || parts.nonce != nonce_ || parts.index >= slots ||
      (!has_extra && parts.extra != 0)) {
    add(unknown_);
    return false;
  }
  return true;
}

// Marks a slot busy. Counts why it cannot.
bool NcclProgressTable::lock(Tag& tag, uint32_t generation, uint64_t& locked) noexcept {
  for (int i = 0; i < kTries; ++i) {
    uint64_t found = tag.load(std::memory_order_relaxed);
    if (generationOf(found) != generation || (found & (kOpen | kBusy)) == 0) {
      add(stale_);
      return false;
    }
    if ((found & kBusy) != 0) {
      pause();
      continue;
    }
    if (tag.compare_exchange_weak(found, found | kBusy, std::memory_order_acq_rel)) {
      locked = found | kBusy;
      return true;
    }
  }
  add(contended_);
  return false;
}

bool NcclProgressTable::isLive(Handle comm) const noexcept {
  const uint64_t tag =
      comms_[comm >> kIndexShift & (kComms - 1)].tag.load(std::memory_order_acquire);
  return (tag & kOpen) != 0 && generationOf(tag) == (comm & (kGenerations - 1));
}

// The slot of a live communicator; counts what is none.
NcclProgressTable::Comm* NcclProgressTable::commOf(Handle comm) noexcept {
  Parts parts;
  if (!parse(comm, kComm, kComms, parts)) {
    return nullptr;
  }
  if (!isLive(comm)) {
    add(stale_);
    return nullptr;
  }
  return &comms_[parts.index];
}

void NcclProgressTable::touch(Handle comm, int64_t now_ns) noexcept {
  if (isLive(comm)) {
    comms_[comm >> kIndexShift & (kComms - 1)].change_ns.set(now_ns);
  }
}

// Keeps a task from being reused; `part`: for one more of its parts.
bool NcclProgressTable::pin(Task& task, uint32_t generation, bool part) noexcept {
  uint64_t life = task.life.load(std::memory_order_relaxed);
  for (int i = 0; i < kTries; ++i) {
    if (generationOf(life) != generation || (life & kUsed) == 0 || (life & kBusy) != 0 ||
        openParts(life) == kMostOpen) {
      return false;
    }
    const uint64_t more = part && partsBegun(life) != kMostParts ? kPart : 0;
    if (task.life.compare_exchange_weak(life, life + kOpenPart + more, std::memory_order_acq_rel)) {
      return true;
    }
  }
  add(contended_);
  return false;
}

void NcclProgressTable::unpin(Task& task, uint32_t generation) noexcept {
  uint64_t life = task.life.load(std::memory_order_relaxed);
  // Unbounded, but each failure is another thread's success: with a part that stays open for good,
  // the slot would be lost.
  do {
    if (generationOf(life) != generation) {
      return;  // its communicator has ended
    }
    if (openParts(life) == 0) {
      broken_.store(true, std::memory_order_relaxed);
      return;
    }
  } while (!task.life.compare_exchange_weak(life, life - kOpenPart, std::memory_order_acq_rel));
}

NcclProgressTable::Handle NcclProgressTable::startComm(const CommStart& start,
                                                       int64_t now_ns) noexcept {
  if (broken()) {
    return 0;
  }
  for (size_t i = 0; i < kComms; ++i) {
    Comm& slot = comms_[i];
    const uint64_t taken = take(slot.tag);
    if (taken == 0) {
      continue;
    }
    slot.next_serial.store(0, std::memory_order_relaxed);
    slot.change_ns.set(now_ns);
    slot.proxy_thread.set(0);
    slot.ops.store(0, std::memory_order_relaxed);
    slot.hash.set(start.hash);
    slot.rank.set(start.rank);
    slot.ranks.set(start.ranks);
    slot.nodes.set(start.nodes);
    slot.kernels.set(start.kernels);
    slot.name.set(start.name);
    slot.tag.store(released(taken) | kOpen, std::memory_order_release);
    add(comms_begun_);
    return handle(kComm, i, 0, generationOf(taken));
  }
  add(full_);
  return 0;
}

NcclProgressTable::Handle NcclProgressTable::startTask(Handle comm, const TaskStart& start,
                                                       int64_t now_ns) noexcept {
  Comm* const owner = broken() ? nullptr : commOf(comm);
  if (owner == nullptr) {
    return 0;
  }
  const size_t first = static_cast<size_t>(owner - comms_.data()) * kTasks;
  for (size_t i = 0; i < kTasks; ++i) {
    const size_t index = first + owner->next_slot.fetch_add(1, std::memory_order_relaxed) % kTasks;
    Task& slot = tasks_[index];
    uint64_t life = slot.life.load(std::memory_order_relaxed);
    if ((life & kBusy) != 0 || openParts(life) != 0) {
      continue;
    }
    const uint64_t taken = atGeneration(nextGeneration(generationOf(life)));
    if (!slot.life.compare_exchange_strong(life, taken | kBusy, std::memory_order_acq_rel)) {
      continue;
    }
    for (auto* mask : {&slot.sends_begun, &slot.sends_done, &slot.recvs_begun, &slot.recvs_done,
                       &slot.kernels_begun, &slot.kernels_done, &slot.kernels_open}) {
      mask->store(0, std::memory_order_release);
    }
    slot.comm.set(comm);
    slot.p2p.set(start.p2p);
    slot.peer.set(start.peer);
    slot.channels.set(start.channels);
    slot.serial.set(owner->next_serial.fetch_add(1, std::memory_order_relaxed) + 1);
    slot.seq.set(start.seq);
    slot.count.set(start.count);
    slot.start_ns.set(now_ns);
    slot.change_ns.set(now_ns);
    slot.func.set(start.func);
    slot.dtype.set(start.dtype);
    slot.algo.set(start.algo);
    slot.proto.set(start.proto);
    slot.life.store(taken | kUsed | kLaunching | kOpenPart, std::memory_order_release);
    owner->change_ns.set(now_ns);
    add(tasks_begun_);
    return handle(kTask, index, 0, generationOf(taken));
  }
  add(full_);
  return 0;
}

NcclProgressTable::Handle NcclProgressTable::startOp(Handle comm, Handle task, const OpStart& start,
                                                     int64_t now_ns) noexcept {
  Comm* const owner = broken() ? nullptr : commOf(comm);
  if (owner == nullptr) {
    return 0;
  }
  if (start.channel < 0 || start.channel >= static_cast<int>(kChannels) || start.steps < 0) {
    add(malformed_);
    return 0;
  }
  Parts parts;
  Task* parent = nullptr;
  if (task != 0 && parse(task, kTask, tasks_.size(), parts) &&
      parts.index / kTasks == static_cast<size_t>(owner - comms_.data()) &&
      pin(tasks_[parts.index], parts.generation, true)) {
    parent = &tasks_[parts.index];
  } else {
    add(orphans_);
  }
  for (size_t i = 0; i < kProbes; ++i) {
    const size_t index = next_op_.fetch_add(1, std::memory_order_relaxed) % kOps;
    Op& slot = ops_[index];
    const uint64_t taken = take(slot.tag);
    if (taken == 0) {
      reclaim(slot);  // for a later start
      continue;
    }
    slot.comm.set(comm);
    slot.task.set(parent != nullptr ? task : 0);
    slot.peer.set(start.peer);
    slot.channel.set(static_cast<uint8_t>(start.channel));
    slot.send.set(start.send);
    slot.steps.set(static_cast<uint32_t>(start.steps));
    slot.begun.set(0);
    slot.done.set(0);
    slot.bytes.set(0);
    slot.start_ns.set(now_ns);
    slot.progress_ns.set(0);
    slot.change_ns.set(now_ns);
    for (OpenStep& step : slot.window) {
      step.step_and_state.set(0);
    }
    if (parent != nullptr) {
      (start.send ? parent->sends_begun : parent->recvs_begun).fetch_or(bitOf(start.channel));
      parent->change_ns.set(now_ns);
    }
    slot.tag.store(released(taken) | kOpen, std::memory_order_release);
    owner->change_ns.set(now_ns);
    owner->proxy_thread.set(start.thread);
    add(owner->ops);
    add(ops_begun_);
    return handle(kOp, index, 0, generationOf(taken));
  }
  if (parent != nullptr) {
    unpin(*parent, parts.generation);
  }
  add(full_);
  return 0;
}

NcclProgressTable::Handle NcclProgressTable::startStep(Handle op, int step,
                                                       int64_t now_ns) noexcept {
  Parts parts;
  uint64_t tag = 0;
  if (broken() || !parse(op, kOp, kOps, parts)) {
    return 0;
  }
  if (step < 0) {
    add(malformed_);
    return 0;
  }
  Op& slot = ops_[parts.index];
  if (!lock(slot.tag, parts.generation, tag)) {
    return 0;
  }
  const auto number = static_cast<uint32_t>(step);
  OpenStep& open = slot.window[number % kWindow];
  const uint64_t found = open.step_and_state.get();
  if (found == 0 || found >> 8 != number) {
    if (found != 0) {
      add(overrun_);
    }
    open.step_and_state.set(uint64_t{number} << 8 | static_cast<uint8_t>(NcclStep::kPosted));
    open.since_ns.set(now_ns);
    slot.begun.set(slot.begun.get() + 1);
    slot.change_ns.set(now_ns);
  }
  slot.tag.store(released(tag) | kOpen, std::memory_order_release);
  return handle(kStep, parts.index, number, parts.generation);
}

NcclProgressTable::Handle NcclProgressTable::startKernel(Handle task, int channel,
                                                         int64_t now_ns) noexcept {
  Parts parts;
  if (broken() || !parse(task, kTask, tasks_.size(), parts)) {
    return 0;
  }
  if (channel < 0 || channel >= static_cast<int>(kChannels)) {
    add(malformed_);
    return 0;
  }
  Task& slot = tasks_[parts.index];
  if (!pin(slot, parts.generation, true)) {
    add(orphans_);
    return 0;
  }
  const uint64_t bit = bitOf(channel);
  if ((slot.kernels_open.fetch_or(bit) & bit) != 0) {
    unpin(slot, parts.generation);  // begun twice
    add(overrun_);
  } else {
    slot.kernels_begun.fetch_or(bit);
    slot.change_ns.set(now_ns);
    touch(slot.comm.get(), now_ns);
    add(kernels_begun_);
  }
  return handle(kKernel, parts.index, static_cast<uint32_t>(channel), parts.generation);
}

void NcclProgressTable::progressOp(Handle op, int64_t now_ns) noexcept {
  Parts parts;
  uint64_t tag = 0;
  if (broken() || !parse(op, kOp, kOps, parts) ||
      !lock(ops_[parts.index].tag, parts.generation, tag)) {
    return;
  }
  Op& slot = ops_[parts.index];
  if (slot.progress_ns.get() == 0) {
    slot.progress_ns.set(now_ns);
    slot.change_ns.set(now_ns);
  }
  slot.tag.store(released(tag) | kOpen, std::memory_order_release);
}

bool NcclProgressTable::isInState(Handle step, NcclStep state) noexcept {
  Parts parts;
  if (broken() || !parse(step, kStep, kOps, parts)) {
    return true;
  }
  const Op& slot = ops_[parts.index];
  const uint64_t tag = slot.tag.load(std::memory_order_acquire);
  const uint64_t found = slot.window[parts.extra % kWindow].step_and_state.get();
  if (generationOf(tag) != parts.generation || (tag & (kOpen | kBusy)) == 0 || found == 0 ||
      (found >> 8 & 0xffff) != parts.extra) {
    add(stale_);
    return true;
  }
  return static_cast<NcclStep>(found & 0xff) == state;
}

void NcclProgressTable::moveStepTo(Handle step, NcclStep state, uint64_t bytes,
                                   int64_t now_ns) noexcept {
  Parts parts;
  uint64_t tag = 0;
  if (!parse(step, kStep, kOps, parts) || !lock(ops_[parts.index].tag, parts.generation, tag)) {
    return;
  }
  Op& slot = ops_[parts.index];
  OpenStep& open = slot.window[parts.extra % kWindow];
  const uint64_t found = open.step_and_state.get();
  if (found == 0 || (found >> 8 & 0xffff) != parts.extra) {
    add(stale_);
  } else {
    open.step_and_state.set((found & ~uint64_t{0xff}) | static_cast<uint8_t>(state));
    open.since_ns.set(now_ns);
    slot.change_ns.set(now_ns);
    // NCCL passes the size of the previous transfer along with the other states.
    if (state == NcclStep::kSendWait || state == NcclStep::kRecvFlushWait) {
      slot.bytes.set(slot.bytes.get() + bytes);
    }
  }
  slot.tag.store(released(tag) | kOpen, std::memory_order_release);
}

void NcclProgressTable::stop(Handle event, int64_t now_ns) noexcept {
  if (broken()) {
    return;
  }
  Parts parts;
  switch (event >> kKindShift) {
    case kStep:
      if (parse(event, kStep, kOps, parts)) {
        stopStep(parts, now_ns);
      }
      return;
    case kOp:
      if (parse(event, kOp, kOps, parts)) {
        stopOp(parts, now_ns);
      }
      return;
    case kTask:
      if (parse(event, kTask, tasks_.size(), parts)) {
        stopTask(parts, now_ns);
      }
      return;
    case kKernel:
      if (parse(event, kKernel, tasks_.size(), parts)) {
        stopKernel(parts, now_ns);
      }
      return;
    default: add(unknown_);
  }
}

void NcclProgressTable::stopStep(const Parts& parts, int64_t now_ns) noexcept {
  Op& slot = ops_[parts.index];
  uint64_t tag = 0;
  if (!lock(slot.tag, parts.generation, tag)) {
    return;
  }
  OpenStep& open = slot.window[parts.extra % kWindow];
  const uint64_t found = open.step_and_state.get();
  if (found == 0 || (found >> 8 & 0xffff) != parts.extra) {
    add(stale_);
  } else {
    open.step_and_state.set(0);
    slot.done.set(slot.done.get() + 1);
    slot.change_ns.set(now_ns);
  }
  slot.tag.store(released(tag) | kOpen, std::memory_order_release);
}

void NcclProgressTable::stopOp(const Parts& parts, int64_t now_ns) noexcept {
  Op& slot = ops_[parts.index];
  uint64_t tag = 0;
  if (lock(slot.tag, parts.generation, tag)) {
    endOp(slot, tag, now_ns);
    add(ops_stopped_);
  }
}

// Frees a locked slot.
void NcclProgressTable::endOp(Op& slot, uint64_t tag, int64_t now_ns) noexcept {
  const Handle comm = slot.comm.get();
  const Handle task = slot.task.get();
  if (task != 0) {
    Task& parent = tasks_[task >> kIndexShift & 0xfff];
    const auto generation = static_cast<uint32_t>(task & (kGenerations - 1));
    if (generationOf(parent.life.load(std::memory_order_relaxed)) == generation) {
      (slot.send.get() ? parent.sends_done : parent.recvs_done).fetch_or(bitOf(slot.channel.get()));
      parent.change_ns.set(now_ns);
    }
    unpin(parent, generation);
  }
  slot.tag.store(released(tag), std::memory_order_release);
  touch(comm, now_ns);
}

void NcclProgressTable::stopTask(const Parts& parts, int64_t now_ns) noexcept {
  Task& slot = tasks_[parts.index];
  uint64_t life = slot.life.load(std::memory_order_relaxed);
  do {  // each failure is another thread's success
    if (generationOf(life) != parts.generation || (life & kLaunching) == 0) {
      add(stale_);
      return;
    }
    if (openParts(life) == 0) {
      broken_.store(true, std::memory_order_relaxed);
      return;
    }
  } while (!slot.life.compare_exchange_weak(life, (life - kOpenPart) & ~kLaunching,
                                            std::memory_order_acq_rel));
  slot.change_ns.set(now_ns);
}

void NcclProgressTable::stopKernel(const Parts& parts, int64_t now_ns) noexcept {
  Task& slot = tasks_[parts.index];
  if (!pin(slot, parts.generation, false)) {  // so that the bits stay this task's
    add(stale_);
    return;
  }
  const uint64_t bit = bitOf(parts.extra & (kChannels - 1));
  if ((slot.kernels_open.fetch_and(~bit) & bit) == 0) {
    add(stale_);
  } else {
    slot.kernels_done.fetch_or(bit);
    slot.change_ns.set(now_ns);
    touch(slot.comm.get(), now_ns);
    add(kernels_stopped_);
    unpin(slot, parts.generation);
  }
  unpin(slot, parts.generation);
}

void NcclProgressTable::endComm(Handle comm) noexcept {
  Parts parts;
  uint64_t tag = 0;
  if (broken() || !parse(comm, kComm, kComms, parts) ||
      !lock(comms_[parts.index].tag, parts.generation, tag)) {
    return;
  }
  // From here on, nothing new begins in it: busy is not live. Only then may its slot be taken
  // again.
  comms_[parts.index].tag.store(released(tag) | kBusy, std::memory_order_release);
  for (Op& slot : ops_) {
    reclaim(slot);
  }
  for (size_t i = 0; i < kTasks; ++i) {
    std::atomic<uint64_t>& life = tasks_[parts.index * kTasks + i].life;
    uint64_t found = life.load(std::memory_order_relaxed);
    while ((found & kBusy) == 0 &&  // busy: being made, with a generation that no handle has yet
           !life.compare_exchange_weak(found, atGeneration(nextGeneration(generationOf(found))),
                                       std::memory_order_acq_rel)) {
    }
  }
  comms_[parts.index].tag.store(released(tag), std::memory_order_release);
  add(comms_ended_);
}

// Frees an op whose communicator has ended.
void NcclProgressTable::reclaim(Op& slot) noexcept {
  uint64_t tag = slot.tag.load(std::memory_order_acquire);
  if ((tag & (kOpen | kBusy)) == kOpen && !isLive(slot.comm.get()) &&
      slot.tag.compare_exchange_strong(tag, tag | kBusy, std::memory_order_acq_rel)) {
    endOp(slot, tag | kBusy, 0);
    add(ops_ended_);
  }
}

bool NcclProgressTable::readTask(const Task& slot, Handle comm, size_t index,
                                 NcclTask& task) const {
  const uint64_t life = slot.life.load(std::memory_order_acquire);
  if ((life & kUsed) == 0 || (life & kBusy) != 0 || slot.comm.get() != comm) {
    return false;
  }
  task.id = handle(kTask, index, 0, generationOf(life));
  task.serial = slot.serial.get();
  task.p2p = slot.p2p.get();
  task.func = slot.func.get();
  task.seq = slot.seq.get();
  task.count = slot.count.get();
  task.dtype = slot.dtype.get();
  task.algo = slot.algo.get();
  task.proto = slot.proto.get();
  task.peer = slot.peer.get();
  task.channels = slot.channels.get();
  task.start_ns = slot.start_ns.get();
  task.change_ns = slot.change_ns.get();
  task.launched = (life & kLaunching) == 0;
  task.parts = static_cast<uint32_t>(partsBegun(life));
  task.parts_open = static_cast<uint32_t>(openParts(life) - (task.launched ? 0 : 1));
  task.sends_begun = slot.sends_begun.load(std::memory_order_acquire);
  task.sends_done = slot.sends_done.load(std::memory_order_acquire);
  task.recvs_begun = slot.recvs_begun.load(std::memory_order_acquire);
  task.recvs_done = slot.recvs_done.load(std::memory_order_acquire);
  task.kernels_begun = slot.kernels_begun.load(std::memory_order_acquire);
  task.kernels_done = slot.kernels_done.load(std::memory_order_acquire);
  const uint64_t after = slot.life.load(std::memory_order_relaxed);
  return generationOf(after) == generationOf(life) && (after & kBusy) == 0;
}

NcclProgressTable::Read NcclProgressTable::readOp(const Op& slot, NcclProxyOp& op,
                                                  Handle& comm) const {
  for (int i = 0; i < kTries; ++i) {
    const uint64_t tag = slot.tag.load(std::memory_order_acquire);
    if ((tag & (kOpen | kBusy)) == 0) {
      return Read::kFree;
    }
    if ((tag & kBusy) != 0) {
      pause();
      continue;
    }
    comm = slot.comm.get();
    op.task = slot.task.get();
    op.peer = slot.peer.get();
    op.channel = slot.channel.get();
    op.send = slot.send.get();
    op.steps = slot.steps.get();
    op.begun = slot.begun.get();
    op.done = slot.done.get();
    op.bytes = slot.bytes.get();
    op.start_ns = slot.start_ns.get();
    op.progress_ns = slot.progress_ns.get();
    op.change_ns = slot.change_ns.get();
    op.open.clear();
    for (const OpenStep& step : slot.window) {
      const uint64_t found = step.step_and_state.get();
      if (found != 0) {
        op.open.push_back({static_cast<uint32_t>(found >> 8), static_cast<NcclStep>(found & 0xff),
                           step.since_ns.get()});
      }
    }
    if (slot.tag.load(std::memory_order_relaxed) == tag) {
      std::sort(op.open.begin(), op.open.end(),
                [](const auto& a, const auto& b) { return a.step < b.step; });
      return Read::kRead;
    }
  }
  return Read::kChanging;
}

NcclProgress NcclProgressTable::snapshot() const {
  NcclProgress progress;
  std::array<size_t, kComms> place;
  std::array<Handle, kComms> handles{};
  for (size_t i = 0; i < kComms; ++i) {
    const Comm& slot = comms_[i];
    const uint64_t tag = slot.tag.load(std::memory_order_acquire);
    if ((tag & (kOpen | kBusy)) != kOpen) {
      continue;
    }
    NcclComm comm;
    comm.hash = slot.hash.get();
    comm.name = slot.name.get();
    comm.rank = slot.rank.get();
    comm.ranks = slot.ranks.get();
    comm.nodes = slot.nodes.get();
    comm.kernels = slot.kernels.get();
    comm.proxy_thread = slot.proxy_thread.get();
    comm.proxy_ops = slot.ops.load(std::memory_order_acquire);
    comm.change_ns = slot.change_ns.get();
    if (slot.tag.load(std::memory_order_relaxed) != tag) {
      continue;  // it has just ended
    }
    handles[i] = handle(kComm, i, 0, generationOf(tag));
    place[i] = progress.comms.size();
    progress.comms.push_back(std::move(comm));
  }
  // Ops first: a task that begins meanwhile is then not taken for one without any.
  for (const Op& slot : ops_) {
    NcclProxyOp op;
    Handle owner = 0;
    const Read read = readOp(slot, op, owner);
    if (read == Read::kChanging) {
      add(unreadable_);
    }
    const size_t index = owner >> kIndexShift & (kComms - 1);
    if (read == Read::kRead && owner != 0 && handles[index] == owner) {
      progress.comms[place[index]].open.push_back(std::move(op));
    }
  }
  for (size_t i = 0; i < kComms; ++i) {
    if (handles[i] == 0) {
      continue;
    }
    auto& tasks = progress.comms[place[i]].tasks;
    for (size_t t = i * kTasks; t < (i + 1) * kTasks; ++t) {
      NcclTask task;
      if (readTask(tasks_[t], handles[i], t, task)) {
        tasks.push_back(std::move(task));
      }
    }
    std::sort(tasks.begin(), tasks.end(),
              [](const auto& a, const auto& b) { return a.serial < b.serial; });
  }
  const auto read = [](const Count& count) { return count.load(std::memory_order_relaxed); };
  NcclCounts& counts = progress.counts;
  counts.comms = read(comms_begun_);
  counts.comms_ended = read(comms_ended_);
  counts.tasks = read(tasks_begun_);
  counts.ops = read(ops_begun_);
  counts.ops_stopped = read(ops_stopped_);
  counts.ops_ended = read(ops_ended_);
  counts.kernels = read(kernels_begun_);
  counts.kernels_stopped = read(kernels_stopped_);
  counts.full = read(full_);
  counts.contended = read(contended_);
  counts.stale = read(stale_);
  counts.unknown = read(unknown_);
  counts.malformed = read(malformed_);
  counts.orphans = read(orphans_);
  counts.foreign = read(foreign_);
  counts.overrun = read(overrun_);
  counts.unreadable = read(unreadable_);
  progress.broken = broken();
  progress.complete = !progress.broken && counts.full + counts.contended + counts.stale +
                                                  counts.unknown + counts.malformed +
                                                  counts.orphans + counts.foreign + counts.overrun +
                                                  counts.unreadable ==
                                              0;
  return progress;
}

}  // namespace reft

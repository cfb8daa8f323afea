#include "intercept/record/op_log.h"

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <cstring>
#include <new>

#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "intercept/base/error.h"
#include "intercept/record/device_ops.h"
#include "intercept/record/op_events.h"

namespace reft {

namespace {

constexpr uint32_t kVersion = 3;
constexpr size_t kFixedBytes = sizeof(OpLogHeader) + OpLogHeader::kMaxGroups * sizeof(OpGroup) +
                               OpLogHeader::kMaxCallSites * sizeof(OpCallSite);

OpGroup* groupsOf(OpLogHeader* header) {
  return reinterpret_cast<OpGroup*>(header + 1);
}
OpCallSite* callSitesOf(OpLogHeader* header) {
  return reinterpret_cast<OpCallSite*>(groupsOf(header) + OpLogHeader::kMaxGroups);
}
OpRecord* recordsOf(OpLogHeader* header) {
  return reinterpret_cast<OpRecord*>(callSitesOf(header) + OpLogHeader::kMaxCallSites);
}

}  // namespace

const char* opKindName(OpKind kind) {
  switch (kind) {
    case OpKind::kUnknown: return "unknown";
    case OpKind::kBroadcast: return "broadcast";
    case OpKind::kAllreduce: return "all_reduce";
    case OpKind::kAllreduceCoalesced: return "all_reduce_coalesced";
    case OpKind::kReduce: return "reduce";
    case OpKind::kAllgather: return "all_gather";
    case OpKind::kAllgatherBase: return "all_gather_into_tensor";
    case OpKind::kAllgatherCoalesced: return "all_gather_coalesced";
    case OpKind::kGather: return "gather";
    case OpKind::kScatter: return "scatter";
    case OpKind::kReduceScatter: return "reduce_scatter";
    case OpKind::kReduceScatterBase: return "reduce_scatter_tensor";
    case OpKind::kReduceScatterCoalesced: return "reduce_scatter_tensor_coalesced";
    case OpKind::kAlltoallBase: return "all_to_all_single";
    case OpKind::kAlltoall: return "all_to_all";
    case OpKind::kSend: return "send";
    case OpKind::kRecv: return "recv";
    case OpKind::kRecvAnysource: return "recv_anysource";
    case OpKind::kBarrier: return "barrier";
    case OpKind::kMonitoredBarrier: return "monitored_barrier";
    case OpKind::kCoalesced: return "coalesced";
    case OpKind::kAllreduceSparse: return "all_reduce_sparse";
    case OpKind::kGatherSingle: return "gather_single";
    case OpKind::kStep: return "step";
  }
  return "unknown";
}

uint64_t OpThread::current() noexcept {
  // Asked once a thread, as gettid() is a system call. In a forked child, the thread that forked
  // keeps the number of its parent: a reader finds no such thread.
  static thread_local const uint64_t thread =
      of(static_cast<uint64_t>(::pthread_self()), static_cast<uint64_t>(::syscall(SYS_gettid)));
  return thread;
}

size_t OpLog::areaBytes(uint32_t capacity) {
  return kFixedBytes + size_t{std::bit_ceil(capacity)} * sizeof(OpRecord);
}

OpLog::OpLog(void* area, uint32_t capacity, const Clock& clock) : clock_(clock) {
  if (area == nullptr) {
    const size_t bytes = areaBytes(capacity);
    own_area_ = std::aligned_alloc(64, (bytes + 63) & ~size_t{63});
    if (own_area_ == nullptr) {
      throw std::bad_alloc();
    }
    area = own_area_;
  }
  std::memset(area, 0, areaBytes(capacity));
  auto* header = static_cast<OpLogHeader*>(area);
  header->version = kVersion;
  header->capacity = std::bit_ceil(capacity);
  header->pid = static_cast<uint32_t>(::getpid());
  header->magic = OpLogHeader::kMagic;
  header_.store(header, std::memory_order_release);
}

OpLog::~OpLog() {
  std::free(own_area_);
}

void OpLog::moveTo(void* area, uint32_t capacity) {
  const MutexLock lock(moving_);
  OpLogHeader* from = header_.load();
  if (area == nullptr) {
    area = own_area_;
    capacity = static_cast<OpLogHeader*>(own_area_)->capacity;
  }
  if (area == static_cast<void*>(from)) {
    return;
  }
  std::memset(area, 0, areaBytes(capacity));
  auto* to = static_cast<OpLogHeader*>(area);
  to->version = kVersion;
  to->capacity = std::bit_ceil(capacity);
  // This process may be a fork of the one that constructed the log.
  to->pid = static_cast<uint32_t>(::getpid());
  // Groups are registered by index, so the table moves, too.
  to->groups.store(from->groups.load());
  std::memcpy(static_cast<void*>(groupsOf(to)), groupsOf(from),
              OpLogHeader::kMaxGroups * sizeof(OpGroup));
  to->call_sites.store(from->call_sites.load());
  std::memcpy(static_cast<void*>(callSitesOf(to)), static_cast<const void*>(callSitesOf(from)),
              OpLogHeader::kMaxCallSites * sizeof(OpCallSite));
  const uint64_t next = from->next_ticket.load();
  const uint64_t keep = std::min<uint64_t>({next, from->capacity, to->capacity});
  for (uint64_t index = next - keep; index < next; ++index) {
    std::memcpy(static_cast<void*>(&recordsOf(to)[index & (to->capacity - 1)]),
                static_cast<const void*>(&recordsOf(from)[index & (from->capacity - 1)]),
                sizeof(OpRecord));
  }
  to->next_ticket.store(next);
  to->heartbeat_ns.store(from->heartbeat_ns.load());
  to->magic = OpLogHeader::kMagic;
  // The private area is kept until the destructor: a mark that races with this call still writes to
  // live memory.
  header_.store(to, std::memory_order_release);
}

uint32_t OpLog::addGroup(const std::string& name, int rank, int size) {
  OpLogHeader* header = header_.load(std::memory_order_acquire);
  const MutexLock lock(adding_group_);
  const uint32_t index = std::min(header->groups.load(), OpLogHeader::kMaxGroups - 1);
  OpGroup& group = groupsOf(header)[index];
  std::memset(group.name, 0, OpGroup::kNameBytes);
  std::memcpy(group.name, name.data(), std::min(name.size(), OpGroup::kNameBytes - 1));
  group.rank = rank;
  group.size = size;
  // Last, so that a reader that sees the count finds the group.
  header->groups.store(index + 1, std::memory_order_release);
  return index;
}

void OpLog::nameCallSite(uint32_t id, std::string_view text) noexcept {
  OpLogHeader* header = header_.load(std::memory_order_acquire);
  const uint32_t index =
      header->call_sites.load(std::memory_order_relaxed) < OpLogHeader::kMaxCallSites
          ? header->call_sites.fetch_add(1)
          : OpLogHeader::kMaxCallSites;
  if (index >= OpLogHeader::kMaxCallSites) {
    return;
  }
  OpCallSite& site = callSitesOf(header)[index];
  size_t length = std::min(text.size(), OpCallSite::kTextBytes - 1);
  while (length < text.size() && length > 0 &&
         (static_cast<unsigned char>(text[text.size() - length]) & 0xC0) == 0x80) {
    --length;  // do not split a UTF-8 character
  }
  std::memcpy(site.text, text.data() + (text.size() - length), length);
  site.text[length] = '\0';
  site.id.store(id, std::memory_order_release);
}

uint64_t OpLog::begin(const Op& op) noexcept {
  OpLogHeader* header = header_.load(std::memory_order_acquire);
  const uint64_t index = header->next_ticket.fetch_add(1, std::memory_order_relaxed);
  OpRecord& record = recordsOf(header)[index & (header->capacity - 1)];
  const auto now = static_cast<uint64_t>(clock_.nowNs());
  record.ticket.store(0, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_release);
  record.begin_ns = now;
  record.enqueued_ns.store(0, std::memory_order_relaxed);
  record.wait_begin_ns.store(0, std::memory_order_relaxed);
  record.wait_end_ns.store(0, std::memory_order_relaxed);
  record.done_ns.store(0, std::memory_order_relaxed);
  record.bytes = op.bytes;
  record.signature = op.signature;
  record.group = op.group;
  record.seq = op.seq;
  record.peer = op.peer;
  record.call_site = op.call_site;
  record.kind = op.kind;
  record.dtype = op.dtype;
  record.reduce_op = op.reduce_op;
  record.flags.store(0, std::memory_order_relaxed);
  record.tag = op.tag;
  record.thread = OpThread::current();
  record.ticket.store(index + 1, std::memory_order_release);
  header->heartbeat_ns.store(now, std::memory_order_relaxed);
  if (OpEvents* events = events_.load(std::memory_order_acquire)) {
    events->push({.what = OpEvent::kBegin,
                  .kind = op.kind,
                  .group = op.group,
                  .peer = op.peer,
                  .tag = op.tag,
                  .ticket = index + 1,
                  .at_ns = static_cast<int64_t>(now),
                  .bytes = op.bytes,
                  .signature = op.signature});
  }
  return index + 1;
}

OpRecord* OpLog::recordOf(uint64_t ticket) const noexcept {
  if (ticket == 0) {
    return nullptr;
  }
  OpLogHeader* header = header_.load(std::memory_order_acquire);
  OpRecord& record = recordsOf(header)[(ticket - 1) & (header->capacity - 1)];
  return record.ticket.load(std::memory_order_relaxed) == ticket ? &record : nullptr;
}

bool OpLog::describe(uint64_t ticket, OpEvent& event) const noexcept {
  const OpRecord* const record = recordOf(ticket);
  if (record == nullptr) {
    return false;
  }
  event.kind = record->kind;
  event.group = record->group;
  event.peer = record->peer;
  event.tag = record->tag;
  event.ticket = ticket;
  event.bytes = record->bytes;
  event.signature = record->signature;
  return true;
}

void OpLog::mark(uint64_t ticket, std::atomic<uint64_t> OpRecord::*phase, int64_t now_ns) noexcept {
  if (OpRecord* record = recordOf(ticket)) {
    const auto now = static_cast<uint64_t>(now_ns);
    (record->*phase).store(now, std::memory_order_relaxed);
    header_.load(std::memory_order_relaxed)->heartbeat_ns.store(now, std::memory_order_relaxed);
  }
}

// Called even if the record has been overwritten: a listener that saw a wait begin must see it end.
void OpLog::tellMark(int what, uint64_t ticket, int64_t now_ns) noexcept {
  if (OpEvents* events = events_.load(std::memory_order_acquire)) {
    events->push({.what = static_cast<OpEvent::What>(what), .ticket = ticket, .at_ns = now_ns});
  }
}

void OpLog::markEnqueued(uint64_t ticket) noexcept {
  mark(ticket, &OpRecord::enqueued_ns, clock_.nowNs());
}
void OpLog::markWaitBegin(uint64_t ticket) noexcept {
  const int64_t now = clock_.nowNs();
  mark(ticket, &OpRecord::wait_begin_ns, now);
  tellMark(OpEvent::kWaitBegin, ticket, now);
}
void OpLog::markWaitEnd(uint64_t ticket) noexcept {
  const int64_t now = clock_.nowNs();
  mark(ticket, &OpRecord::wait_end_ns, now);
  tellMark(OpEvent::kWaitEnd, ticket, now);
}

void OpLog::markDone(uint64_t ticket, bool failed) noexcept {
  const int64_t now = clock_.nowNs();
  if (OpRecord* record = recordOf(ticket)) {
    if (failed) {
      record->flags.fetch_or(OpFlag::kFailed, std::memory_order_relaxed);
    }
    mark(ticket, &OpRecord::done_ns, now);
  }
  tellMark(OpEvent::kDone, ticket, now);
}

void OpLog::flag(uint64_t ticket, uint8_t flags) noexcept {
  if (OpRecord* record = recordOf(ticket)) {
    record->flags.fetch_or(flags, std::memory_order_relaxed);
  }
}

void OpLog::refresh(const DeviceOps& device, uint64_t count) noexcept {
  const MutexLock lock(moving_);
  const OpLogHeader* const header = header_.load(std::memory_order_acquire);
  const uint64_t newest = header->next_ticket.load(std::memory_order_acquire);
  // Older words in `device` may be of other ops.
  const uint64_t keep = std::min<uint64_t>({newest, count, header->capacity, DeviceOps::kOps / 2});
  for (uint64_t ticket = newest - keep + 1; ticket <= newest; ++ticket) {
    OpRecord* const record = recordOf(ticket);
    const uint8_t flags = record == nullptr ? 0 : record->flags.load(std::memory_order_relaxed);
    const bool reached = (flags & OpFlag::kReachAsked) != 0 && device.reached(ticket);
    const bool passed = (flags & OpFlag::kPassAsked) != 0 && device.passed(ticket);
    flag(ticket,
         static_cast<uint8_t>((reached ? OpFlag::kReached : 0) | (passed ? OpFlag::kPassed : 0)));
  }
}

uint8_t OpFlag::within(double sec) noexcept {
  for (size_t i = 1; i < kWithinSec.size(); ++i) {
    if (sec <= kWithinSec[i]) {
      return static_cast<uint8_t>(i << kWithinShift);
    }
  }
  return 0;
}

void OpLog::settle(const DeviceOps& device) noexcept {
  // Ops whose streams are not asked yet may be waited for later, and are left for a while.
  constexpr uint64_t kPatience = 32;
  constexpr uint64_t kReach = 128;
  if (!moving_.try_lock()) {
    return;  // another thread does it
  }
  const uint64_t newest =
      header_.load(std::memory_order_acquire)->next_ticket.load(std::memory_order_acquire);
  const auto now = static_cast<uint64_t>(clock_.nowNs());
  uint64_t ticket = std::max(settled_, newest > kReach ? newest - kReach : 0) + 1;
  for (; ticket < newest; ++ticket) {  // nothing was asked for the newest yet
    const OpRecord* const record = recordOf(ticket);
    const uint8_t flags = record == nullptr ? 0 : record->flags.load(std::memory_order_relaxed);
    if ((flags & OpFlag::kPassAsked) != 0 && (flags & OpFlag::kPassed) == 0) {
      if (!device.passed(ticket)) {
        break;
      }
      flag(ticket, OpFlag::kReached | OpFlag::kPassed |
                       OpFlag::within(static_cast<double>(now - record->begin_ns) * 1e-9));
    } else if ((flags & OpFlag::kReachAsked) != 0 && (flags & OpFlag::kPassAsked) == 0 &&
               ticket + kPatience > newest) {
      break;
    }
  }
  settled_ = ticket - 1;
  moving_.unlock();
}

OpLog& processOpLog() {
  constexpr uint32_t kPrivateRecords = 4096;
  static auto* log = new OpLog(nullptr, kPrivateRecords);
  return *log;
}

OpLogReader::OpLogReader(const void* area, size_t bytes)
    : header_(static_cast<const OpLogHeader*>(area)) {
  if (bytes < kFixedBytes || header_->magic != OpLogHeader::kMagic) {
    throw Corruption("op log: not an op log (magic or size)");
  }
  if (header_->version != kVersion) {
    throw Corruption("op log: version " + std::to_string(header_->version) + ", this build reads " +
                     std::to_string(kVersion));
  }
  capacity_ = header_->capacity;  // read once: the writer may be hostile
  if (!std::has_single_bit(capacity_) || (bytes - kFixedBytes) / sizeof(OpRecord) < capacity_) {
    throw Corruption("op log: capacity " + std::to_string(capacity_) + " does not fit " +
                     std::to_string(bytes) + " bytes");
  }
  groups_ = reinterpret_cast<const OpGroup*>(header_ + 1);
  call_sites_ = reinterpret_cast<const OpCallSite*>(groups_ + OpLogHeader::kMaxGroups);
  records_ = reinterpret_cast<const OpRecord*>(call_sites_ + OpLogHeader::kMaxCallSites);
}

uint64_t OpLogReader::opsBegun() const {
  return header_->next_ticket.load(std::memory_order_acquire);
}
uint64_t OpLogReader::heartbeatNs() const {
  return header_->heartbeat_ns.load(std::memory_order_relaxed);
}
uint32_t OpLogReader::writerPid() const {
  return header_->pid;
}

std::vector<OpGroup> OpLogReader::groups() const {
  std::vector<OpGroup> result(groups_,
                              groups_ + std::min(header_->groups.load(), OpLogHeader::kMaxGroups));
  for (OpGroup& group : result) {
    group.name[OpGroup::kNameBytes - 1] = '\0';
  }
  return result;
}

std::map<uint32_t, std::string> OpLogReader::callSites() const {
  std::map<uint32_t, std::string> result;
  const uint32_t count =
      std::min(header_->call_sites.load(std::memory_order_acquire), OpLogHeader::kMaxCallSites);
  for (uint32_t i = 0; i < count; ++i) {
    if (const uint32_t id = call_sites_[i].id.load(std::memory_order_acquire); id != 0) {
      result.emplace(id, std::string(call_sites_[i].text,
                                     ::strnlen(call_sites_[i].text, OpCallSite::kTextBytes)));
    }
  }
  return result;
}

std::vector<OpEntry> OpLogReader::tail(size_t count) const {
  const uint64_t next = opsBegun();
  const uint64_t keep = std::min<uint64_t>({next, count, capacity_});
  std::vector<OpEntry> result;
  result.reserve(keep);
  for (uint64_t index = next - keep; index < next; ++index) {
    const OpRecord& record = records_[index & (capacity_ - 1)];
    OpEntry entry;
    entry.ticket = record.ticket.load(std::memory_order_acquire);
    entry.begin_ns = record.begin_ns;
    entry.enqueued_ns = record.enqueued_ns.load(std::memory_order_relaxed);
    entry.wait_begin_ns = record.wait_begin_ns.load(std::memory_order_relaxed);
    entry.wait_end_ns = record.wait_end_ns.load(std::memory_order_relaxed);
    entry.done_ns = record.done_ns.load(std::memory_order_relaxed);
    entry.bytes = record.bytes;
    entry.signature = record.signature;
    entry.group = record.group;
    entry.seq = record.seq;
    entry.peer = record.peer;
    entry.call_site = record.call_site;
    entry.kind = record.kind;
    entry.dtype = record.dtype;
    entry.reduce_op = record.reduce_op;
    const uint8_t flags = record.flags.load(std::memory_order_relaxed);
    entry.failed = (flags & OpFlag::kFailed) != 0;
    entry.reach_asked = (flags & OpFlag::kReachAsked) != 0;
    entry.reached = (flags & OpFlag::kReached) != 0;
    entry.pass_asked = (flags & OpFlag::kPassAsked) != 0;
    entry.passed = (flags & OpFlag::kPassed) != 0;
    entry.end_seen = (flags & OpFlag::kEndSeen) != 0;
    entry.passed_within_sec = OpFlag::kWithinSec[flags >> OpFlag::kWithinShift];
    entry.tag = record.tag;
    entry.thread = record.thread;
    std::atomic_thread_fence(std::memory_order_acquire);
    if (entry.ticket == index + 1 && record.ticket.load(std::memory_order_relaxed) == index + 1) {
      result.push_back(entry);
    }
  }
  return result;
}

}  // namespace reft

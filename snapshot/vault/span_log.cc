#include "snapshot/vault/span_log.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <string>

#include "intercept/base/error.h"

namespace reft {

const char* spanKindName(SpanKind kind) {
  switch (kind) {
    case SpanKind::kUnknown: return "unknown";
    case SpanKind::kCapture: return "capture";
    case SpanKind::kCopy: return "copy";
    case SpanKind::kGate: return "gate";
    case SpanKind::kSeal: return "seal";
    case SpanKind::kDeviceStep: return "device step";
    case SpanKind::kDeviceWait: return "device wait";
    case SpanKind::kDeviceGate: return "device gate";
  }
  return "unknown";
}

SpanLog::SpanLog(void* area, uint32_t capacity)
    : header_(static_cast<SpanLogHeader*>(area)),
      records_(reinterpret_cast<SpanRecord*>(header_ + 1)) {
  header_->magic =
      0;  // a reader of what the earlier incarnation left finds nothing, not half of both
  std::memset(area, 0, areaBytes(capacity));
  header_->version = SpanLogHeader::kVersion;
  header_->capacity = capacity;
  std::atomic_thread_fence(std::memory_order_release);
  header_->magic = SpanLogHeader::kMagic;
}

uint64_t SpanLog::begin(SpanKind kind, int64_t step, int64_t begin_ns, uint8_t tier,
                        uint8_t op) noexcept {
  const uint64_t index = header_->next_ticket.fetch_add(1, std::memory_order_relaxed);
  SpanRecord& record = records_[index & (header_->capacity - 1)];
  record.ticket.store(0, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_release);
  record.step.store(step, std::memory_order_relaxed);
  record.begin_ns.store(begin_ns, std::memory_order_relaxed);
  record.end_ns.store(0, std::memory_order_relaxed);
  record.bytes.store(0, std::memory_order_relaxed);
  record.kind.store(kind, std::memory_order_relaxed);
  record.tier.store(tier, std::memory_order_relaxed);
  record.op.store(op, std::memory_order_relaxed);
  record.ticket.store(index + 1, std::memory_order_release);
  return index + 1;
}

void SpanLog::extend(uint64_t ticket, int64_t end_ns, uint64_t more_bytes) noexcept {
  SpanRecord& record = records_[(ticket - 1) & (header_->capacity - 1)];
  if (record.ticket.load(std::memory_order_relaxed) != ticket) {
    return;  // overwritten meanwhile
  }
  record.bytes.fetch_add(more_bytes, std::memory_order_relaxed);
  record.end_ns.store(end_ns, std::memory_order_release);
}

SpanLogReader::SpanLogReader(const void* area, size_t bytes)
    : header_(static_cast<const SpanLogHeader*>(area)),
      records_(reinterpret_cast<const SpanRecord*>(header_ + 1)),
      capacity_(0) {
  if (bytes < sizeof(SpanLogHeader) || header_->magic != SpanLogHeader::kMagic) {
    throw Corruption("span log: no span log (magic)");
  }
  if (header_->version != SpanLogHeader::kVersion) {
    throw Corruption("span log: version " + std::to_string(header_->version) +
                     ", this build reads version " + std::to_string(SpanLogHeader::kVersion));
  }
  capacity_ = header_->capacity;
  if (!std::has_single_bit(capacity_) || SpanLog::areaBytes(capacity_) > bytes) {
    throw Corruption("span log: " + std::to_string(capacity_) + " records in " +
                     std::to_string(bytes) + " bytes");
  }
}

std::vector<Span> SpanLogReader::tail(size_t count) const {
  const uint64_t next = header_->next_ticket.load(std::memory_order_acquire);
  const uint64_t keep = std::min<uint64_t>({next, capacity_, count});
  std::vector<Span> spans;
  spans.reserve(keep);
  for (uint64_t index = next - keep; index < next; ++index) {
    const SpanRecord& record = records_[index & (capacity_ - 1)];
    Span span;
    span.ticket = record.ticket.load(std::memory_order_acquire);
    span.step = record.step.load(std::memory_order_relaxed);
    span.begin_ns = record.begin_ns.load(std::memory_order_relaxed);
    span.end_ns = record.end_ns.load(std::memory_order_acquire);
    span.bytes = record.bytes.load(std::memory_order_relaxed);
    span.kind = record.kind.load(std::memory_order_relaxed);
    span.tier = record.tier.load(std::memory_order_relaxed);
    span.op = record.op.load(std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_acquire);
    if (span.ticket == index + 1 && record.ticket.load(std::memory_order_relaxed) == span.ticket) {
      spans.push_back(span);
    }
  }
  return spans;
}

}  // namespace reft

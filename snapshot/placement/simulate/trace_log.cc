#include "snapshot/placement/simulate/trace_log.h"

#include <algorithm>

namespace reft::simulate {

namespace {

// 0 in a record means that the event has not happened.
uint64_t stamp(int64_t now_ns) {
  return static_cast<uint64_t>(now_ns) + 1;
}

}  // namespace

void TraceLog::step(uint32_t number, int64_t now_ns) {
  OpEntry entry;
  entry.kind = OpKind::kStep;
  entry.begin_ns = stamp(now_ns);
  entry.seq = number;
  entries_.push_back(entry);
}

void TraceLog::begin(OpEntry entry, uint32_t number, int64_t now_ns) {
  entry.seq = number;
  entry.begin_ns = entry.enqueued_ns = stamp(now_ns);
  entries_.push_back(entry);
}

void TraceLog::waited(OpKind kind, uint32_t number, int64_t begin_ns, int64_t end_ns) {
  const auto entry = std::find_if(entries_.rbegin(), entries_.rend(), [&](const OpEntry& one) {
    return one.kind == kind && one.seq == number;
  });
  if (entry != entries_.rend()) {
    entry->wait_begin_ns = stamp(begin_ns);
    entry->wait_end_ns = entry->done_ns = stamp(end_ns);
  }
}

}  // namespace reft::simulate

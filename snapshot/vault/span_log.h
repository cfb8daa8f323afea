// The span log: a ring of fixed-size records in the vault that shows when the engine captured,
// copied, waited at the gate and sealed, and when a device worked and waited. With the op log
// beside it, other processes can draw the timeline of a rank while it runs or after its death.
//
// Consecutive chunks that one thread copies are one span that grows, so the ring holds hundreds of
// steps of a small state and still several of a large one. Cost: no lock, no allocation, no system
// call.
//
// Threads: SpanLog: begin() from any thread, extend() from the thread that began the span.
//          SpanLogReader may run in any process at any time; it skips a record that was overwritten
//          while it was read.
// Errors:  the writer cannot fail. SpanLogReader throws Corruption if the area is not a span log.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace reft {

// Values reach shared memory: append only, do not change.
enum class SpanKind : uint8_t {
  kUnknown = 0,
  kCapture = 1,  // the training thread at the program point; bytes: of the small state
  kCopy = 2,     // one thread, chunk after chunk
  kGate = 3,     // the training thread waits before the optimizer
  kSeal = 4,     // verification of the copy, and the seal; bytes: 1 = sealed, 0 = dropped
  // By the device's own clock, written after its step ended; so are copies from the device.
  kDeviceStep = 5,  // from program point to program point
  // The stream that trains waits for `op`; tier: that of a concurrent copy; bytes: those of the op.
  kDeviceWait = 6,
  kDeviceGate = 7,  // the stream waits for copies before the optimizer
};
const char* spanKindName(SpanKind kind);

// 64 bytes. Times are CLOCK_MONOTONIC nanoseconds.
struct SpanRecord {
  std::atomic<uint64_t> ticket;  // 1 + index of the span in this log; 0 while it is rewritten
  std::atomic<int64_t> step;
  std::atomic<int64_t> begin_ns;
  std::atomic<int64_t> end_ns;  // 0: not ended
  std::atomic<uint64_t> bytes;
  std::atomic<SpanKind> kind;
  std::atomic<uint8_t> tier;  // tier of the copy, or of a concurrent copy
  std::atomic<uint8_t> op;    // OpKind
  uint8_t reserved[21];
};
static_assert(sizeof(SpanRecord) == 64);

// Lies at the start of the area; then `capacity` SpanRecord.
struct SpanLogHeader {
  static constexpr uint64_t kMagic = 0x314E505354464552;  // "REFTSPN1"
  static constexpr uint32_t kVersion = 2;
  uint64_t magic;
  uint32_t version;   // kVersion
  uint32_t capacity;  // records; a power of two
  std::atomic<uint64_t> next_ticket;
  uint8_t reserved[40];
};
static_assert(sizeof(SpanLogHeader) == 64);

class SpanLog {
 public:
  static constexpr size_t areaBytes(uint32_t capacity) {  // of a power of two
    return sizeof(SpanLogHeader) + size_t{capacity} * sizeof(SpanRecord);
  }

  // Formats `area` (≥ areaBytes(capacity), 64-byte aligned, must outlive the log).
  SpanLog(void* area, uint32_t capacity);

  // Returns the handle of the span.
  uint64_t begin(SpanKind kind, int64_t step, int64_t begin_ns, uint8_t tier = 0,
                 uint8_t op = 0) noexcept;
  // The span continued until `end_ns`, with `more_bytes` more.
  void extend(uint64_t ticket, int64_t end_ns, uint64_t more_bytes) noexcept;

 private:
  SpanLogHeader* header_;
  SpanRecord* records_;
};

// A copy of one record, as plain values.
struct Span {
  uint64_t ticket = 0;
  int64_t step = 0;
  int64_t begin_ns = 0, end_ns = 0;
  uint64_t bytes = 0;
  SpanKind kind = SpanKind::kUnknown;
  uint8_t tier = 0;
  uint8_t op = 0;
};

class SpanLogReader {
 public:
  // `bytes` of a mapped area, possibly of a foreign, dying or malicious writer. Throws Corruption.
  SpanLogReader(const void* area, size_t bytes);

  // The newest `count` records, in the order of their begin.
  std::vector<Span> tail(size_t count) const;

 private:
  const SpanLogHeader* header_;
  const SpanRecord* records_;
  uint32_t capacity_;
};

}  // namespace reft

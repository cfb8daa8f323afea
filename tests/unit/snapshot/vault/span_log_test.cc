#include "snapshot/vault/span_log.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "intercept/base/error.h"

namespace reft {
namespace span_log_test {

constexpr uint32_t kCapacity = 8;

class SpanLogTest : public testing::Test {
 protected:
  struct Free {
    void operator()(void* area) const { std::free(area); }
  };
  size_t bytes_ = SpanLog::areaBytes(kCapacity);
  std::unique_ptr<void, Free> area_{std::aligned_alloc(64, bytes_)};
  SpanLog log_{area_.get(), kCapacity};
  std::vector<Span> read() { return SpanLogReader(area_.get(), bytes_).tail(100); }
};

TEST_F(SpanLogTest, ASpanGrowsUntilItEnds) {
  EXPECT_TRUE(read().empty());
  const uint64_t span = log_.begin(SpanKind::kCopy, 7, 1000, 2);
  ASSERT_EQ(read().size(), 1u);
  EXPECT_EQ(read()[0].end_ns, 0) << "under way";
  log_.extend(span, 1500, 4096);
  log_.extend(span, 2500, 100);
  const Span found = read()[0];
  EXPECT_EQ(found.kind, SpanKind::kCopy);
  EXPECT_EQ(found.step, 7);
  EXPECT_EQ(found.begin_ns, 1000);
  EXPECT_EQ(found.end_ns, 2500);
  EXPECT_EQ(found.bytes, 4196u);
  EXPECT_EQ(found.tier, 2);
}

TEST_F(SpanLogTest, TheNewestStayAndOlderHandlesDoNothing) {
  const uint64_t oldest = log_.begin(SpanKind::kGate, 0, 1);
  for (int64_t step = 1; step <= 20; ++step) {
    log_.extend(log_.begin(SpanKind::kCapture, step, 10 * step), 10 * step + 5, 1);
  }
  log_.extend(oldest, 99, 99);
  const auto spans = read();
  ASSERT_EQ(spans.size(), kCapacity);
  for (size_t i = 0; i < spans.size(); ++i) {
    EXPECT_EQ(spans[i].step, static_cast<int64_t>(13 + i));
    EXPECT_EQ(spans[i].end_ns, spans[i].begin_ns + 5);
    EXPECT_EQ(spans[i].bytes, 1u);
  }
  EXPECT_EQ(SpanLogReader(area_.get(), bytes_).tail(3).size(), 3u);
  EXPECT_EQ(SpanLogReader(area_.get(), bytes_).tail(3)[0].step, 18);
}

TEST_F(SpanLogTest, ANewLogInAnOldAreaIsEmpty) {
  log_.begin(SpanKind::kGate, 3, 5);
  const SpanLog again(area_.get(), kCapacity);
  EXPECT_TRUE(read().empty());
}

TEST_F(SpanLogTest, ReadersSeeWholeRecordsWhileThreadsWrite) {
  std::vector<std::thread> writers;
  writers.reserve(3);
  for (int64_t writer = 1; writer <= 3; ++writer) {
    writers.emplace_back([this, writer] {
      for (int64_t i = 1; i <= 5000; ++i) {
        const auto tier = static_cast<uint8_t>(writer);
        log_.extend(log_.begin(SpanKind::kCopy, writer, writer * 1000, tier), writer * 1000 + 1, 0);
      }
    });
  }
  for (int i = 0; i < 200; ++i) {
    for (const Span& span : read()) {
      EXPECT_EQ(span.begin_ns, span.step * 1000);
      EXPECT_EQ(span.tier, span.step);
    }
  }
  for (std::thread& writer : writers) {
    writer.join();
  }
}

TEST_F(SpanLogTest, WhatIsNoSpanLogIsRefused) {
  auto* header = static_cast<SpanLogHeader*>(area_.get());
  EXPECT_THROW(SpanLogReader(area_.get(), sizeof(SpanLogHeader) - 1), Corruption);
  EXPECT_THROW(SpanLogReader(area_.get(), bytes_ - 1), Corruption) << "fewer records than it says";
  for (const uint32_t capacity : {0u, 3u, 1u << 31}) {
    header->capacity = capacity;
    EXPECT_THROW(SpanLogReader(area_.get(), bytes_), Corruption) << capacity;
  }
  header->capacity = kCapacity;
  header->next_ticket.store(UINT64_MAX);
  EXPECT_TRUE(read().empty()) << "no record has such a ticket";
  header->version = SpanLogHeader::kVersion + 1;
  EXPECT_THROW(SpanLogReader(area_.get(), bytes_), Corruption);
  header->version = SpanLogHeader::kVersion;
  header->magic = 3;
  EXPECT_THROW(SpanLogReader(area_.get(), bytes_), Corruption);
}

}  // namespace span_log_test
}  // namespace reft

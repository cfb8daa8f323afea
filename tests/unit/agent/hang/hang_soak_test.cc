// Days of healthy training without a verdict of state hang, each with a real hang at its end that
// has to be found.
//
// The short form plays three minutes for each kind of hang. HANG_SOAK_DAYS=N plays N whole days for
// each setting
// (`tools/dev soak --hang`), and prints what there was in them.
#include <cstdio>
#include <cstdlib>
#include <map>

#include <gtest/gtest.h>

#include "hang_detect/report/report.h"
#include "hang_detect/report/verdict_text.h"
#include "tests/unit/agent/hang/simulated_day.h"

namespace reft::agent {
namespace hang_soak_test {

constexpr int64_t kHour = 3600 * kSec;
constexpr int kKinds = static_cast<int>(RealHang::kCount);

struct Total {
  int days = 0, looks = 0, played = 0, found = 0, named = 0, not_shown = 0;
  uint64_t steps = 0;
  double slowest = 0;  // detection, as a part of the bar
};

// Ends at the first false verdict, as what follows it means little.
void playDay(uint64_t seed, int64_t suspect_ns, int64_t ns, RealHang kind, Total& total) {
  SimulatedDay day(seed, suspect_ns);
  constexpr int64_t kPart = 10 * kSec;
  for (int64_t played = 0; played < ns && day.hangs().empty(); played += kPart) {
    day.train(std::min(kPart, ns - played));
  }
  SCOPED_TRACE(testing::Message() << "seed " << seed << ", suspicious after "
                                  << suspect_ns / 1000000 << " ms, " << nameOf(kind) << "; "
                                  << day.describe());
  ++total.days;
  total.looks += day.looks();
  total.steps += day.steps();
  for (const auto& [what, times] : day.played()) {
    total.played += times;
  }
  ASSERT_TRUE(day.hangs().empty())
      << "a false verdict at " << day.hangs()[0].at_ns / kSec - 1000 << " s\n"
      << hangReportText(day.hangs()[0].evidence, day.hangs()[0].verdict);
  const auto outcome = day.hang(kind);
  SCOPED_TRACE(testing::Message() << "at the end: " << day.describe());
  if (!outcome.can_show) {
    ++total.not_shown;
    return;
  }
  ASSERT_TRUE(outcome.found) << "not found within " << 2 * outcome.within_sec << " s; it was rank "
                             << outcome.victim << "; REFT_LOG=info prints the verdict of each look";
  const SimulatedNode::Hang& found = day.hangs()[0];
  EXPECT_LE(outcome.after_sec, outcome.within_sec) << verdictText(found.evidence, found.verdict);
  EXPECT_TRUE(outcome.named_right) << "it was rank " << outcome.victim << "\n"
                                   << verdictText(found.evidence, found.verdict);
  ++total.found;
  total.named += found.verdict.culprits.empty() ? 0 : 1;
  total.slowest = std::max(total.slowest, outcome.after_sec / outcome.within_sec);
}

void print(const Total& total, double suspect_sec) {
  std::printf(
      "  suspicious after %4.1f s: %d days, %llu steps, %d look-alikes, %d looks; %d hangs found, "
      "%d named, "
      "%d that no log shows; slowest: %.0f %% of the bar\n",
      suspect_sec, total.days, static_cast<unsigned long long>(total.steps), total.played,
      total.looks, total.found, total.named, total.not_shown, total.slowest * 100);
}

int days() {
  const char* text = std::getenv("HANG_SOAK_DAYS");
  return text == nullptr ? 0 : std::atoi(text);
}

class HangSoak : public testing::TestWithParam<double> {};

TEST_P(HangSoak, NoFalseVerdictAndEveryHangIsFound) {
  const auto suspect_ns = static_cast<int64_t>(GetParam() * 1e9);
  const int count = days() > 0 ? days() : kKinds;
  const int64_t length = days() > 0 ? 24 * kHour : kHour / 20;
  Total total;
  for (int day = 0; day < count && !HasFatalFailure(); ++day) {
    playDay(static_cast<uint64_t>(day), suspect_ns, length, static_cast<RealHang>(day % kKinds),
            total);
  }
  print(total, GetParam());
}

INSTANTIATE_TEST_SUITE_P(Settings, HangSoak, testing::Values(20.0, 2.5), [](const auto& info) {
  return info.param > 10 ? "AtDefault" : "AtItsShortest";
});

}  // namespace hang_soak_test
}  // namespace reft::agent

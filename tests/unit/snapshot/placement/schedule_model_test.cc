#include "snapshot/placement/schedule_model.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <tuple>
#include <vector>

#include "snapshot/placement/simulate/simulator.h"

namespace reft {
namespace schedule_model_test {

constexpr int64_t kMs = 1'000'000;

// Feeds a model with steps that are written down as (op, work before the wait, length of the wait).
class Script {
 public:
  struct Wait {
    ScheduleOp op;
    int64_t work_ns, wait_ns;
  };
  using Step = std::vector<Wait>;

  static ScheduleOp receive(int32_t peer, uint64_t bytes = 1000) {
    return scheduleOp(OpKind::kRecv, 0, peer, 0, bytes);
  }
  static ScheduleOp allReduce(uint64_t bytes = 1 << 20) {
    return scheduleOp(OpKind::kAllreduce, 1, -1, 0, bytes);
  }

  // Runs one step and ends it; returns what was foretold for each wait, -1 if nothing.
  std::vector<int64_t> run(const Step& step, int64_t tail_ns = 5 * kMs) {
    std::vector<int64_t> foretold;
    for (const Wait& wait : step) {
      now_ns_ += wait.work_ns;
      model_.opBegin(wait.op, now_ns_);
      const ForecastSpan* span = model_.waitBegin(wait.op, now_ns_);
      foretold.push_back(span == nullptr ? -1 : span->wait_ns);
      now_ns_ += wait.wait_ns;
      model_.waitEnd(now_ns_);
      model_.opDone(wait.op, now_ns_);
    }
    now_ns_ += tail_ns;
    model_.beginStep(now_ns_);
    return foretold;
  }
  StepClass classOf(const Step& step, int64_t tail_ns = 5 * kMs) {
    run(step, tail_ns);
    return model_.errors().last_class;
  }

  ScheduleModel model_;
  int64_t now_ns_ = 1'000'000'000;
  Script() { model_.beginStep(now_ns_); }
};

Script::Step trainingStep(int64_t scale = 1, uint64_t bytes = 1 << 20) {
  return {{Script::receive(0, bytes), 2 * kMs * scale, 6 * kMs * scale},
          {Script::receive(2, bytes), 4 * kMs * scale, 9 * kMs * scale},
          {Script::allReduce(bytes), 4 * kMs * scale, 3 * kMs * scale}};
}

TEST(ScheduleModel, ASmallCollectiveFillsNoLink) {
  EXPECT_FALSE(
      scheduleOp(OpKind::kAllreduce, 1, -1, 0, 4).fills_link);  // the norm of all gradients
  EXPECT_FALSE(scheduleOp(OpKind::kBarrier, 1, -1, 0, 0).fills_link);
  EXPECT_TRUE(scheduleOp(OpKind::kAllreduce, 1, -1, 0, kLatencyBytes + 1).fills_link);
  EXPECT_FALSE(scheduleOp(OpKind::kRecv, 0, 1, 0, 1 << 30).fills_link);
  Script script;
  for (int i = 0; i < 3; ++i) {
    script.run({{Script::allReduce(4), 4 * kMs, 9 * kMs}});
  }
  ASSERT_NE(script.model_.forecast(), nullptr);
  EXPECT_TRUE(script.model_.forecast()->spans[0].bubble);
  EXPECT_TRUE(script.model_.forecast()->spans[0].gap);
}

TEST(ScheduleModel, KnowsNothingAtFirstAndTheStepAfterOne) {
  Script script;
  EXPECT_EQ(script.model_.forecast(), nullptr);
  EXPECT_EQ(script.run(trainingStep()), (std::vector<int64_t>{-1, -1, -1}));
  EXPECT_EQ(script.model_.errors().last_class, StepClass::kFirst);
  EXPECT_EQ(script.run(trainingStep()), (std::vector<int64_t>{6 * kMs, 9 * kMs, 3 * kMs}));
  const Forecast* forecast = script.model_.forecast();
  ASSERT_NE(forecast, nullptr);
  EXPECT_EQ(forecast->period_ns, 33 * kMs);
  ASSERT_EQ(forecast->spans.size(), 4u);
  EXPECT_TRUE(forecast->spans[0].bubble);
  EXPECT_FALSE(forecast->spans[2].bubble);
  EXPECT_EQ(forecast->spans[1].compute_ns, 4 * kMs);
  EXPECT_EQ(forecast->spans[3].compute_ns, 5 * kMs);
  EXPECT_EQ(script.model_.errors().last_median, 0);
}

TEST(ScheduleModel, TellsCommunicationBesideComputeFromCompute) {
  Script script;
  const ScheduleOp reduce = Script::allReduce();
  for (int step = 0; step < 4; ++step) {
    int64_t& now = script.now_ns_;
    now += 10 * kMs;
    script.model_.opBegin(reduce, now);
    now += 4 * kMs;  // compute goes on meanwhile
    script.model_.waitBegin(reduce, now);
    now += 1 * kMs;
    script.model_.waitEnd(now);
    script.model_.opDone(reduce, now);
    now += 2 * kMs;
    script.model_.gate(now, 500'000);
    now += 3 * kMs;  // the optimizer: no room for copies
    script.model_.beginStep(now);
  }
  const Forecast& forecast = *script.model_.forecast();
  EXPECT_EQ(forecast.spans[0].compute_ns, 10 * kMs);
  EXPECT_EQ(forecast.spans[0].communication_ns, 4 * kMs);
  EXPECT_EQ(forecast.spans[1].compute_ns, 2 * kMs - 500'000);  // without the stall at the gate
  EXPECT_EQ(forecast.until_gate_ns, 17 * kMs - 500'000);
  EXPECT_EQ(forecast.period_ns, 20 * kMs - 500'000);
}

TEST(ScheduleModel, RelearnsWithinThreeStepsWhenTimesChange) {
  Script script;
  for (int i = 0; i < 10; ++i) {
    script.run(trainingStep());
  }
  script.run(trainingStep(2));
  EXPECT_GT(script.model_.errors().last_median, 0.3);
  script.run(trainingStep(2));
  script.run(trainingStep(2));
  EXPECT_EQ(script.run(trainingStep(2)), (std::vector<int64_t>{12 * kMs, 18 * kMs, 6 * kMs}));
}

TEST(ScheduleModel, OneSlowStepChangesNothing) {
  Script script;
  for (int i = 0; i < 6; ++i) {
    script.run(trainingStep());
  }
  EXPECT_EQ(script.classOf(trainingStep(3)), StepClass::kSlow);
  EXPECT_EQ(script.run(trainingStep()), (std::vector<int64_t>{6 * kMs, 9 * kMs, 3 * kMs}));
  EXPECT_EQ(script.model_.errors().last_class, StepClass::kKnown);
}

TEST(ScheduleModel, RecognisesAnEvaluationAndComesBack) {
  Script script;
  for (int i = 0; i < 5; ++i) {
    script.run(trainingStep());
  }
  Script::Step with_evaluation;
  for (int i = 0; i < 4; ++i) {
    with_evaluation.push_back({Script::receive(7), 1 * kMs, 2 * kMs});
  }
  const Script::Step usual = trainingStep();
  with_evaluation.insert(with_evaluation.end(), usual.begin(), usual.end());
  const std::vector<int64_t> foretold = script.run(with_evaluation);
  EXPECT_EQ(script.model_.errors().last_class, StepClass::kExtended);
  EXPECT_EQ(foretold[0], -1);  // it is no step that is known: nothing is promised
  EXPECT_EQ(script.run(usual), (std::vector<int64_t>{6 * kMs, 9 * kMs, 3 * kMs}));
  // The next one is known, from its first wait on.
  script.run(with_evaluation);
  script.run(usual);
  EXPECT_EQ(script.run(with_evaluation)[1], 2 * kMs);
  EXPECT_EQ(script.model_.errors().last_class, StepClass::kKnown);
}

TEST(ScheduleModel, RecognisesLastBatchesByTheirSizes) {
  Script script;
  std::vector<int64_t> foretold;
  for (int epoch = 0; epoch < 4; ++epoch) {
    for (int i = 0; i < 6; ++i) {
      foretold = script.run(trainingStep());
    }
    EXPECT_EQ(foretold, (std::vector<int64_t>{6 * kMs, 9 * kMs, 3 * kMs})) << epoch;
    const Script::Step last = {{Script::receive(0, 300), 1 * kMs, 2 * kMs},
                               {Script::receive(2, 300), 1 * kMs, 3 * kMs},
                               {Script::allReduce(1000), 1 * kMs, 3 * kMs}};
    foretold = script.run(last);
    EXPECT_EQ(script.model_.errors().last_class,
              epoch == 0 ? StepClass::kReshaped : StepClass::kKnown);
  }
  EXPECT_EQ(foretold, (std::vector<int64_t>{2 * kMs, 3 * kMs, 3 * kMs}));
}

TEST(ScheduleModel, SizesThatAlwaysChangeAreIgnored) {
  Script script;
  std::vector<int64_t> foretold;
  for (uint64_t i = 0; i < 20; ++i) {
    foretold = script.run(trainingStep(1, 1000 + i));
  }
  EXPECT_EQ(foretold, (std::vector<int64_t>{6 * kMs, 9 * kMs, 3 * kMs}));
  EXPECT_EQ(script.model_.errors().last_class, StepClass::kKnown);
}

TEST(ScheduleModel, RecognisesAStepThatWasCutShort) {
  Script script;
  for (int i = 0; i < 3; ++i) {
    script.run(trainingStep());
  }
  Script::Step cut = trainingStep();
  cut.resize(2);
  EXPECT_EQ(script.classOf(cut), StepClass::kShort);
  EXPECT_EQ(script.classOf({{Script::receive(9), kMs, kMs}}), StepClass::kNew);
}

TEST(ScheduleModel, WaitsOfSeveralThreadsAreOneGap) {
  Script script;
  for (int step = 0; step < 3; ++step) {
    int64_t& now = script.now_ns_;
    now += kMs;
    script.model_.waitBegin(Script::receive(0), now);
    script.model_.waitBegin(Script::allReduce(), now + kMs);
    script.model_.waitEnd(now + 2 * kMs);
    now += 5 * kMs;
    script.model_.waitEnd(now);
    now += kMs;
    script.model_.beginStep(now);
  }
  ASSERT_EQ(script.model_.forecast()->spans.size(), 2u);
  EXPECT_EQ(script.model_.forecast()->spans[0].wait_ns, 5 * kMs);
}

TEST(ScheduleModel, StepsWithMoreWaitsThanItKeepsAreNotLearnt) {
  Script script;
  const Script::Step endless(ScheduleModel::kMaxWaits + 10, {Script::receive(0), 10, 10});
  script.run(endless);
  EXPECT_EQ(script.model_.forecast(), nullptr);
  script.run(trainingStep());
  script.run(trainingStep());
  EXPECT_NE(script.model_.forecast(), nullptr);
}

TEST(RecentSamples, MedianAndSpreadIgnoreOneOutlier) {
  RecentSamples samples;
  for (const int64_t value : {1000, 1010, 990, 1000, 5000, 1005}) {
    samples.add(value);
  }
  EXPECT_NEAR(static_cast<double>(samples.expected()), 1000, 6);
  EXPECT_LT(samples.jitter(), 30);
  samples.add(5000);
  EXPECT_LT(samples.expected(), 1100);
  samples.add(5010);  // the second in a row
  EXPECT_EQ(samples.count(), 2u);
  EXPECT_EQ(samples.expected(), 5010);
}

TEST(RecentSamples, OfTwoTheNewerIsExpectedAndTheFirstWidensTheSpread) {
  RecentSamples samples;
  samples.add(300);  // the first step of a sequence warms up
  EXPECT_EQ(samples.expected(), 300);
  samples.add(200);
  EXPECT_EQ(samples.expected(), 200);
  EXPECT_GE(samples.jitter(), 50);
  samples.add(202);
  EXPECT_EQ(samples.expected(), 202);
}

// Whatever its length: a sequence is foretold from the first step that had it.
TEST(ScheduleModel, OneStepIsEnough) {
  for (int64_t wait = 1'000'000; wait < 1'000'008; ++wait) {
    Script script;
    script.run({{Script::receive(0), 10'000, wait}}, 10'000);
    ASSERT_NE(script.model_.forecast(), nullptr);
    EXPECT_TRUE(script.model_.forecast()->spans[0].gap) << wait;
  }
}

// Fewer micro-batches, say: the first waits are the same messages, and whether the change is for
// good is not known yet.
TEST(ScheduleModel, AfterAnUnknownStepTheShorterOfTwoPossibleWaitsIsForetold) {
  Script script;
  for (int i = 0; i < 4; ++i) {
    script.run(trainingStep());
  }
  Script::Step shorter = trainingStep();
  shorter.pop_back();
  shorter[1].wait_ns = 4 * kMs;
  script.run(shorter);
  EXPECT_EQ(script.run(shorter), (std::vector<int64_t>{6 * kMs, 4 * kMs}));
  script.run(trainingStep());
  EXPECT_EQ(script.run(trainingStep()), (std::vector<int64_t>{6 * kMs, 9 * kMs, 3 * kMs}));
}

TEST(ScheduleModel, TheWarmUpOfASequenceIsForgotten) {
  Script script;
  script.run(trainingStep(3));
  script.run(trainingStep());
  EXPECT_EQ(script.run(trainingStep()), (std::vector<int64_t>{6 * kMs, 9 * kMs, 3 * kMs}));
  ASSERT_NE(script.model_.forecast(), nullptr);
  EXPECT_EQ(script.model_.forecast()->period_ns, 33 * kMs);
  EXPECT_EQ(script.model_.forecast()->steps_seen, 3u);
}

// --- op logs of every kind of schedule, with 2 % jitter in all work

class Schedules : public testing::TestWithParam<std::tuple<simulate::ScheduleKind, int>> {
 protected:
  static simulate::SimulationOptions options() {
    simulate::SimulationOptions options;
    options.schedule.kind = std::get<0>(GetParam());
    options.schedule.replicas = std::get<1>(GetParam());
    const bool pipeline = options.schedule.kind != simulate::ScheduleKind::kDdp &&
                          options.schedule.kind != simulate::ScheduleKind::kFsdp;
    options.schedule.stages = pipeline ? 4 : 1;
    options.snapshot_bytes = 0;
    options.jitter = 0.02;
    options.steps = 60;
    return options;
  }
};

std::string scheduleTestName(const testing::TestParamInfo<Schedules::ParamType>& info) {
  std::string name = simulate::scheduleName(std::get<0>(info.param));
  std::erase(name, '-');
  return name + "_x" + std::to_string(std::get<1>(info.param));
}

TEST_P(Schedules, ReplayedLogsGiveAForecastErrorOfAtMostTenPercent) {
  simulate::SimulationOptions options = Schedules::options();
  std::vector<double> medians;
  for (int stage = 0; stage < options.schedule.stages; ++stage) {
    options.trace_rank = stage;
    const std::vector<OpEntry> trace = simulate::runSimulation(options).trace;
    ScheduleModel whole;
    whole.replay(trace);
    ASSERT_EQ(whole.errors().steps, 59u);
    if (whole.errors().foretold_gaps > 0) {
      medians.push_back(whole.errors().recent_median);
    }
    // The same in pieces that end with a step.
    ScheduleModel pieces;
    size_t from = 0;
    for (size_t i = 1; i <= trace.size(); ++i) {
      if (i == trace.size() || trace[i].kind == OpKind::kStep) {
        pieces.replay(std::span(trace).subspan(from, i - from));
        from = i;
      }
    }
    EXPECT_EQ(pieces.errors().recent_median, whole.errors().recent_median);
    EXPECT_EQ(pieces.errors().foretold_gaps, whole.errors().foretold_gaps);
  }
  ASSERT_FALSE(medians.empty());
  std::sort(medians.begin(), medians.end());
  EXPECT_LE(medians[medians.size() / 2], 0.10);
}

TEST_P(Schedules, RelearnsWithinThreeStepsAfterAChange) {
  simulate::SimulationOptions options = Schedules::options();
  options.change_at_step = 30;
  options.change_factor = 1.6;
  options.jitter = 0.01;
  for (int stage = 0; stage < options.schedule.stages; ++stage) {
    options.trace_rank = stage;
    const simulate::SimulationResult result = simulate::runSimulation(options);
    for (size_t step = 33; step + 1 < 40; ++step) {
      // Gaps that are not foretold have no error; a rank with gaps must foretell some again.
      EXPECT_LE(result.step_errors[step], 0.2) << "stage " << stage << " step " << step;
    }
    if (result.step_errors[28] >= 0) {
      EXPECT_GE(result.step_errors[36], 0) << "stage " << stage;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, Schedules,
                         testing::Values(std::tuple{simulate::ScheduleKind::kGpipe, 1},
                                         std::tuple{simulate::ScheduleKind::kGpipe, 4},
                                         std::tuple{simulate::ScheduleKind::kOneFOneB, 1},
                                         std::tuple{simulate::ScheduleKind::kOneFOneB, 4},
                                         std::tuple{simulate::ScheduleKind::kInterleaved, 1},
                                         std::tuple{simulate::ScheduleKind::kInterleaved, 4},
                                         std::tuple{simulate::ScheduleKind::kZeroBubble, 1},
                                         std::tuple{simulate::ScheduleKind::kZeroBubble, 4},
                                         std::tuple{simulate::ScheduleKind::kDdp, 4},
                                         std::tuple{simulate::ScheduleKind::kFsdp, 4}),
                         scheduleTestName);

}  // namespace schedule_model_test
}  // namespace reft

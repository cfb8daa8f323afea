#include "snapshot/engine/telemetry.h"

#include <cstdio>

#include "intercept/base/log.h"

namespace reft {

namespace {

constexpr const char* kLogger = "snapshot";
constexpr int64_t kSameSpanNs = 100'000;   // chunks with a shorter pause between them are one span
constexpr int64_t kShortestGateNs = 1000;  // in the span log
constexpr int64_t kShortestDeviceGateNs = 5000;  // two events in a row are some microseconds apart

uint64_t ppmOf(double share) {
  return static_cast<uint64_t>(share * 1e6);
}

}  // namespace

Telemetry::Telemetry(Vault& vault, uint64_t incarnation) : vault_(vault), stats_(vault.stats()) {
  stats_.incarnation.store(incarnation);
  stats_.committed_step.store(static_cast<uint64_t>(-1));
  stats_.sealed_step.store(static_cast<uint64_t>(-1));
}

void Telemetry::planned(const SnapshotPlan& plan, uint64_t slot_bytes) {
  stats_.state_bytes.store(plan.state_bytes);
  stats_.payload_bytes.store(plan.table.payload_bytes);
  stats_.early_bytes.store(plan.table.early_bytes);
  stats_.slot_bytes.store(slot_bytes);
  stats_.plans.fetch_add(1);
  logDebug(kLogger, "new table: ", plan.table.regions.size(), " regions, payload of ",
           plan.table.payload_bytes, " bytes in ", plan.chunk_count, " chunks");
}

void Telemetry::point(int64_t step, int64_t since_ns, int64_t now_ns) {
  stats_.steps.store(static_cast<uint64_t>(step));
  stats_.step_ns.store(static_cast<uint64_t>(since_ns));
  stats_.step_end_ns.store(static_cast<uint64_t>(now_ns));
}

void Telemetry::cost(const Cost::Figures& figures) {
  constexpr uint64_t kUnknown = ~uint64_t{0};
  stats_.every.store(figures.every);
  // UINT64_MAX means unknown, so -1 ppm is stored as 0.
  const int64_t ppm = figures.overhead_ppm == -1 ? 0 : figures.overhead_ppm;
  stats_.overhead_ppm.store(figures.known ? static_cast<uint64_t>(ppm) : kUnknown);
  stats_.overhead_noise_ppm.store(figures.known ? static_cast<uint64_t>(figures.noise_ppm)
                                                : kUnknown);
}

void Telemetry::note(const std::string& text) {
  const MutexLock lock(note_mutex_);
  std::snprintf(stats_.note, sizeof(stats_.note), "%s", text.c_str());
}

void Telemetry::skipped(int64_t step, const std::string& why) {
  stats_.skipped.fetch_add(1);
  note("step " + std::to_string(step) + " skipped: " + why);
  logDebug(kLogger, "step ", step, " skipped: ", why);
}

void Telemetry::failed(const std::string& what) {
  stats_.errors.fetch_add(1);
  note(what);
  logDebug(kLogger, what);
}

void Telemetry::began(int64_t step, uint64_t object_bytes) {
  stats_.captured.fetch_add(1);
  stats_.object_bytes.store(object_bytes);
  logDebug(kLogger, "step ", step, " captured, small state of ", object_bytes, " bytes");
}

void Telemetry::captured(int64_t step, int64_t begin_ns, int64_t end_ns, uint64_t object_bytes) {
  const uint64_t span = vault_.spans().begin(SpanKind::kCapture, step, begin_ns);
  vault_.spans().extend(span, end_ns, object_bytes);
  const auto spent = static_cast<uint64_t>(end_ns - begin_ns);
  stats_.capture_ns.fetch_add(spent);
  stats_.capture_last_ns.store(spent);
}

void Telemetry::copied(int64_t step, Tier tier, int64_t begin_ns, int64_t end_ns, uint64_t bytes) {
  extendCopySpan(step, tier, begin_ns, end_ns, bytes);
  copiedUntimed(bytes);
  countTier(tier, bytes);
}

void Telemetry::copiedUntimed(uint64_t bytes) {
  stats_.bytes_copied.fetch_add(bytes, std::memory_order_relaxed);
}

void Telemetry::countTier(Tier tier, uint64_t bytes) {
  std::atomic<uint64_t>* const by_tier[kTiers] = {
      &stats_.at_once_copied_bytes, &stats_.gap_copied_bytes, &stats_.compute_copied_bytes,
      &stats_.communication_copied_bytes, &stats_.gate_copied_bytes};
  by_tier[static_cast<size_t>(tier)]->fetch_add(bytes, std::memory_order_relaxed);
}

void Telemetry::extendCopySpan(int64_t step, Tier tier, int64_t begin_ns, int64_t end_ns,
                               uint64_t bytes) {
  thread_local struct {
    const SpanLog* log = nullptr;
    uint64_t span = 0;
    int64_t step = 0;
    Tier tier{};
    int64_t end_ns = 0;
  } newest;
  SpanLog& log = vault_.spans();
  if (newest.log != &log || newest.step != step || newest.tier != tier ||
      begin_ns - newest.end_ns > kSameSpanNs) {
    newest = {&log, log.begin(SpanKind::kCopy, step, begin_ns, static_cast<uint8_t>(tier)), step,
              tier, end_ns};
  }
  newest.end_ns = end_ns;
  log.extend(newest.span, end_ns, bytes);
}

void Telemetry::gated(int64_t step, int64_t begin_ns, int64_t waited_ns) {
  stats_.gate_ns.fetch_add(static_cast<uint64_t>(waited_ns));
  stats_.gate_last_ns.store(static_cast<uint64_t>(waited_ns));
  if (waited_ns > kShortestGateNs) {
    const uint64_t span = vault_.spans().begin(SpanKind::kGate, step, begin_ns);
    vault_.spans().extend(span, begin_ns + waited_ns, 0);
  }
}

void Telemetry::sealed(int64_t step) {
  stats_.sealed.fetch_add(1);
  stats_.sealed_step.store(static_cast<uint64_t>(step));
  logDebug(kLogger, "step ", step, " sealed");
}

void Telemetry::dropped(int64_t step, const std::string& why) {
  stats_.dropped.fetch_add(1);
  if (!why.empty()) {
    note("step " + std::to_string(step) + " dropped: " + why);
  }
  logDebug(kLogger, "step ", step, " dropped", why.empty() ? "" : ": ", why);
}

void Telemetry::moved() {
  stats_.moved.fetch_add(1);
}

uint64_t Telemetry::finishing(int64_t step, int64_t now_ns) {
  return vault_.spans().begin(SpanKind::kSeal, step, now_ns);
}

void Telemetry::finished(uint64_t finishing, int64_t now_ns, bool sealed, int64_t copy_ns) {
  stats_.copy_ns.fetch_add(static_cast<uint64_t>(copy_ns));
  vault_.spans().extend(finishing, now_ns, sealed ? 1 : 0);
}

void Telemetry::committed(int64_t step, int64_t now_ns) {
  stats_.committed_step.store(static_cast<uint64_t>(step));
  stats_.commit_ns.store(static_cast<uint64_t>(now_ns));
  logDebug(kLogger, "step ", step, " committed");
}

void Telemetry::notCommitted(int64_t step, bool cut_at_fault, bool replicas_at_fault) {
  logDebug(kLogger, "step ", step, " not committed");
  if (cut_at_fault) {
    note("step " + std::to_string(step) +
         " not committed: the ranks were at different points of the program when their optimizers"
         " returned (a message was under way, or they do not count the same steps)");
  } else if (replicas_at_fault) {
    note("step " + std::to_string(step) +
         " not committed: ranks that share state hold different values; all ranks plan again");
  }
}

void Telemetry::forecast(const ScheduleModel::Errors& errors) {
  stats_.forecast_error_ppm.store(ppmOf(errors.recent_median));
  stats_.forecast_last_ppm.store(ppmOf(errors.last_weighted));
  stats_.foretold_gap_ns.store(static_cast<uint64_t>(errors.foretold_ns));
  stats_.unforetold_gap_ns.store(static_cast<uint64_t>(errors.unforetold_ns));
  stats_.forecast_steps.store(errors.steps);
}

void Telemetry::device(const DeviceTracker::Learned& learned) {
  for (size_t tier = 0; tier < kTiers; ++tier) {
    countTier(static_cast<Tier>(tier), learned.untimed[tier]);
  }
  for (const DeviceStep& step : learned.steps) {
    deviceStep(step);
  }
  if (!learned.steps.empty()) {
    forecast(learned.errors);
  }
}

void Telemetry::deviceStep(const DeviceStep& step) {
  SpanLog& log = vault_.spans();
  const auto add = [&](SpanKind kind, int64_t begin_ns, int64_t end_ns, uint64_t bytes, Tier tier,
                       OpKind op) {
    const uint64_t span =
        log.begin(kind, step.step, begin_ns, static_cast<uint8_t>(tier), static_cast<uint8_t>(op));
    log.extend(span, end_ns, bytes);
  };
  for (const DeviceWait& wait : step.waits) {
    add(SpanKind::kDeviceWait, wait.begin_ns, wait.end_ns, wait.bytes,
        wait.bubble ? Tier::kGap : Tier::kCommunication, wait.op);
  }
  for (const DeviceCopies& part : partsOf(step)) {
    add(SpanKind::kCopy, part.begin_ns, part.end_ns, part.bytes, part.tier, OpKind::kUnknown);
    countTier(part.tier, part.bytes);
  }
  const int64_t gate_ns = step.gate_end_ns - step.gate_begin_ns;
  if (gate_ns > kShortestDeviceGateNs) {
    add(SpanKind::kDeviceGate, step.gate_begin_ns, step.gate_end_ns, 0, Tier::kGate,
        OpKind::kUnknown);
  }
  stats_.device_gate_ns.fetch_add(static_cast<uint64_t>(gate_ns));
  stats_.device_gate_last_ns.store(static_cast<uint64_t>(gate_ns));
  add(SpanKind::kDeviceStep, step.begin_ns, step.end_ns, 0, Tier::kAtOnce, OpKind::kUnknown);
}

}  // namespace reft

// The schedule model on arbitrary op logs, and the Placer on arbitrary orders of its calls.
// Whatever comes: no crash, memory in bounds, no more granted than there is, and no gap planned
// past its foretold end.
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "snapshot/placement/placer.h"

namespace {

void demand(bool condition) {
  if (!condition) {
    std::abort();
  }
}

// Nine bytes a record: kind, group and peer, sizes, then differences of times, which may be huge.
std::vector<reft::OpEntry> logOf(const uint8_t* data, size_t bytes) {
  std::vector<reft::OpEntry> log;
  uint64_t now_ns = 1;
  for (; bytes >= 9; data += 9, bytes -= 9) {
    reft::OpEntry entry;
    entry.kind = static_cast<reft::OpKind>(data[0] & 31);
    entry.group = data[1] & 3;
    entry.peer = data[1] >> 2;
    entry.bytes = data[2];
    const auto time = [&](uint8_t code) -> uint64_t {
      return code == 0     ? 0
             : code == 255 ? ~uint64_t{0}
                           : now_ns + (uint64_t{code} << (data[8] & 31));
    };
    entry.begin_ns = time(data[3]);
    entry.wait_begin_ns = time(data[4]);
    entry.wait_end_ns = time(data[5]);
    entry.done_ns = time(data[6]);
    now_ns += uint64_t{data[7]} << (data[8] & 31);
    log.push_back(entry);
  }
  return log;
}

void checkForecast(const reft::ScheduleModel& model) {
  if (const reft::Forecast* forecast = model.forecast()) {
    demand(!forecast->spans.empty() &&
           forecast->spans.size() <= reft::ScheduleModel::kMaxWaits + 1);
    for (const reft::ForecastSpan& span : forecast->spans) {
      demand(span.compute_ns >= 0 && span.communication_ns >= 0 && span.wait_ns >= 0 &&
             span.jitter_ns >= 0);
    }
  }
  demand(model.errors().recent_median >= 0);
}

void place(const uint8_t* data, size_t bytes) {
  reft::PlacerOptions options;
  options.policy = static_cast<reft::PlacementPolicy>(data[0] & 3);
  options.chunk_bytes = uint64_t{1} << (data[0] >> 4);
  options.shared_link = (data[0] & 4) != 0;
  reft::Placer placer(options);
  int64_t now_ns = 0;
  for (size_t i = 1; i + 2 < bytes; i += 3) {
    const int64_t span_ns = int64_t{data[i + 1]} << (data[i + 2] & 31);
    const reft::ScheduleOp op = reft::scheduleOp(static_cast<reft::OpKind>(data[i + 2] & 31), 0,
                                                 data[i + 2] >> 5, 0, data[i + 1]);
    const uint64_t left = placer.bytesLeft();
    now_ns += (data[i] & 0x80) != 0 ? -span_ns : span_ns;
    switch (data[i] & 7) {
      case 0: {
        const uint64_t snapshot = uint64_t{data[i + 1]} << 8;
        placer.beginStep(now_ns, snapshot, data[i + 2]);
        demand(placer.bytesLeft() <= snapshot);
        uint64_t planned = 0;
        for (const uint64_t tier : placer.plan().bytes) {
          planned += tier;
        }
        demand(planned == snapshot);
        if (const reft::Forecast* forecast = placer.model().forecast()) {
          for (size_t gap = 0; gap < placer.plan().gap_bytes.size(); ++gap) {
            const auto room = static_cast<double>(forecast->spans[gap].wait_ns) *
                              placer.bytesPerSec(reft::Tier::kGap);
            demand(static_cast<double>(placer.plan().gap_bytes[gap]) <= room / 1e9 + 1);
          }
        }
        break;
      }
      case 1: placer.opBegin(op, now_ns); break;
      case 2: placer.opDone(op, now_ns); break;
      case 3: placer.waitBegin(op, now_ns); break;
      case 4: placer.waitEnd(now_ns); break;
      case 5:
      case 6: {
        const reft::Grant grant = placer.ask(now_ns);
        demand(grant.bytes <= left);
        placer.copied(grant.bytes, grant.tier, now_ns, now_ns + span_ns);
        demand(placer.bytesLeft() == left - grant.bytes);
        break;
      }
      default:
        placer.gate(now_ns);
        placer.gateDone(now_ns, now_ns + span_ns);
        demand(placer.bytesLeft() == 0);
    }
    demand(placer.guardJitters() >= 1);
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t bytes) {
  reft::ScheduleModel model;
  const std::vector<reft::OpEntry> log = logOf(data, bytes);
  model.replay(log);
  checkForecast(model);
  model.replay(log);  // once more: times run backwards
  checkForecast(model);
  if (bytes > 0) {
    place(data, bytes);
  }
  return 0;
}

#include "python/bindings/timeline.h"

#include <pybind11/stl.h>

#include <map>
#include <string>
#include <vector>

#include "intercept/base/error.h"
#include "intercept/record/op_log.h"
#include "python/bindings/backend.h"
#include "python/bindings/base.h"
#include "snapshot/placement/placer.h"
#include "snapshot/vault/reader.h"
#include "snapshot/vault/span_log.h"

namespace py = pybind11;

namespace reft {

namespace {

py::dict spanDict(const Span& span) {
  py::dict row;
  row["what"] = spanKindName(span.kind);
  row["step"] = span.step;
  row["begin_ns"] = span.begin_ns;
  row["end_ns"] = span.end_ns;
  row["bytes"] = span.bytes;
  const bool tiered =
      (span.kind == SpanKind::kCopy || span.kind == SpanKind::kDeviceWait) && span.tier < kTiers;
  row["tier"] = tiered ? py::object(py::str(tierName(static_cast<Tier>(span.tier)))) : py::none();
  row["op"] = span.kind == SpanKind::kDeviceWait
                  ? py::object(py::str(opKindName(static_cast<OpKind>(span.op))))
                  : py::none();
  return row;
}

py::dict timelineOf(int fd, size_t ops, size_t spans) {
  std::vector<OpEntry> op_entries;
  std::vector<OpGroup> groups;
  std::map<uint32_t, std::string> call_sites;
  std::vector<Span> span_entries;
  VaultIdentity identity;
  uint64_t payload_bytes = 0;
  uint64_t every = 1;
  int64_t overhead_ppm = -1;
  int64_t overhead_noise_ppm = -1;  // < 0: not known
  {
    const py::gil_scoped_release release;
    const VaultReader reader(fd);
    identity = reader.identity();
    const RankStats& stats = reader.stats();
    payload_bytes = stats.payload_bytes.load();
    every = stats.every.load();
    overhead_ppm = static_cast<int64_t>(stats.overhead_ppm.load());
    overhead_noise_ppm = static_cast<int64_t>(stats.overhead_noise_ppm.load());
    // Spans first: what they lie beside has begun before.
    span_entries = SpanLogReader(reader.spanLogArea(), reader.spanLogBytes()).tail(spans);
    const OpLogReader log(reader.opLogArea(), reader.opLogBytes());
    op_entries = log.tail(ops);
    groups = log.groups();
    call_sites = log.callSites();
  }
  py::dict result;
  result["job"] = textOf(identity.job);
  result["rank"] = identity.rank;
  result["world"] = identity.world;
  result["payload_bytes"] = payload_bytes;
  py::dict cost;
  cost["every"] = every;
  cost["overhead_ppm"] = overhead_ppm;
  cost["overhead_noise_ppm"] = overhead_noise_ppm;
  result["cost"] = cost;
  py::list group_rows;
  for (const OpGroup& group : groups) {
    group_rows.append(py::make_tuple(textOf(group.name), group.rank, group.size));
  }
  result["groups"] = group_rows;
  py::dict sites;
  for (const auto& [id, text] : call_sites) {
    sites[py::int_(id)] = textOf(text);
  }
  result["call_sites"] = sites;
  py::list op_rows;
  for (const OpEntry& entry : op_entries) {
    op_rows.append(entryDict(entry));
  }
  result["ops"] = op_rows;
  py::list span_rows;
  for (const Span& span : span_entries) {
    span_rows.append(spanDict(span));
  }
  result["spans"] = span_rows;
  const bool overwritten = !span_entries.empty() && span_entries.front().ticket > 1;
  result["spans_from_ns"] = overwritten ? span_entries.front().begin_ns : 0;
  result["spans_from_step"] = overwritten ? span_entries.front().step : -1;
  return result;
}

}  // namespace

void bindTimeline(py::module_& module) {
  module.def("timeline_of", &timelineOf, py::arg("fd"), py::arg("ops") = 1 << 16,
             py::arg("spans") = 1 << 16,
             "The newest ops and the newest spans of the vault behind `fd`, oldest first; times "
             "are CLOCK_MONOTONIC "
             "nanoseconds of its host, 0 = not yet. Spans of a device are told when its step has "
             "ended. `spans_from_ns`, "
             "`spans_from_step`: older spans were overwritten (0, -1: none were).");
}

}  // namespace reft

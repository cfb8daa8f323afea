// The verdicts on hangs and on crashes, on hostile evidence, as `reft replay` may be given it. If
// the bytes are JSON, they are read as a report; anyhow they also become small op logs of up to 8
// ranks, which reach deeper into the wait-for graph. Whatever they say, the verdict is the same
// when its own report is replayed, and it names nobody if it is undecidable.
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string_view>

#include "hang_detect/evidence/evidence.h"
#include "hang_detect/evidence/evidence_json.h"
#include "hang_detect/report/report.h"
#include "hang_detect/report/verdict_text.h"
#include "hang_detect/verdict/crash.h"
#include "hang_detect/verdict/verdict.h"

namespace {

void check(const reft::HangEvidence& evidence, reft::Verdict (*decide)(const reft::HangEvidence&)) {
  const reft::Verdict verdict = decide(evidence);
  const bool undecidable = verdict.confidence == reft::Confidence::kUndecidable;
  const std::string report = reft::hangReportJson(evidence, verdict);
  const auto again = reft::evidenceFromJson(report);
  if ((undecidable && !verdict.culprits.empty()) || (!undecidable && !verdict.candidates.empty()) ||
      !again || decide(*again).what != verdict.what ||
      reft::verdictText(evidence, verdict).empty()) {
    std::abort();
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t bytes) {
  if (const auto evidence = reft::evidenceFromJson({reinterpret_cast<const char*>(data), bytes})) {
    check(*evidence, &reft::decide);
    check(*evidence, &reft::decideCrash);
  }
  reft::HangEvidence evidence;
  evidence.now_ns = 100'000'000'000;
  evidence.suspect_sec = 1;
  for (int r = 0; r < 8; ++r) {
    auto& rank = evidence.ranks.emplace_back();
    rank.rank = r;
    rank.pid = 100 + r;
    rank.alive = true;
    for (int g = 0; g < 2; ++g) {
      reft::OpGroup group{};
      group.name[0] = g == 0 ? 'w' : static_cast<char>('a' + r / 4);
      group.rank = g == 0 ? r : r % 4;
      group.size = g == 0 ? 8 : 4;
      rank.groups.push_back(group);
    }
  }
  // Three bytes an op: rank and group, kind and phase, number or peer.
  for (size_t i = 0; i + 3 <= bytes; i += 3) {
    auto& rank = evidence.ranks[data[i] & 7];
    if ((data[i] & 0xf0) == 0xf0) {
      rank.alive = (data[i + 1] & 1) != 0;
      rank.said_bye = (data[i + 1] & 2) != 0;
      rank.proc_state = (data[i + 1] & 4) != 0 ? "T" : "S";
      rank.gone_ns = data[i + 2];
      if ((data[i + 1] & 8) != 0) {
        rank.ending.exit_code = data[i + 1] >> 4;
      } else if ((data[i + 1] & 16) != 0) {
        rank.ending.signal = data[i + 1] >> 5;
      }
      continue;
    }
    reft::OpEntry op;
    op.group = (data[i] >> 3) & 1;
    op.kind = static_cast<reft::OpKind>(data[i + 1] & 31);
    op.seq = data[i + 2] & 15;
    op.peer = (data[i + 2] >> 4) & 7;
    op.begin_ns = 1'000'000'000 + i;
    op.enqueued_ns = op.begin_ns + 1;
    op.wait_begin_ns = (data[i + 1] & 32) != 0 ? op.begin_ns + 2 : 0;
    op.done_ns = (data[i + 1] & 64) != 0 ? op.begin_ns + 3 : 0;
    op.failed = (data[i + 1] & 128) != 0;
    rank.tail.push_back(op);
    ++rank.ops_begun;
  }
  check(evidence, &reft::decide);
  check(evidence, &reft::decideCrash);
  return 0;
}

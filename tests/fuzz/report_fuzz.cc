// Feeds a hostile op log area and a hostile stack text to the hang report. Bytes: u16 length of the
// stack text, the text, then the op log area.
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "hang_detect/evidence/evidence.h"
#include "hang_detect/report/report.h"
#include "hang_detect/verdict/verdict.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t bytes) {
  if (bytes < 2) {
    return 0;
  }
  uint16_t text_bytes = 0;
  std::memcpy(&text_bytes, data, 2);
  const size_t text_end = std::min(bytes, size_t{2} + text_bytes);
  const std::string text(reinterpret_cast<const char*>(data) + 2, text_end - 2);
  // An area as a writer would have made it, then overwritten with what was given: most inputs get
  // past the magic.
  static constexpr uint32_t kCapacity = 256;
  const size_t area_bytes = reft::OpLog::areaBytes(kCapacity);
  std::vector<uint64_t> area((area_bytes + 63) / 8);
  { reft::OpLog(nullptr, kCapacity).moveTo(area.data(), kCapacity); }
  auto* raw = reinterpret_cast<uint8_t*>(area.data());
  const size_t rest = bytes - text_end;
  // First half of the rest: header and groups, from byte 16. Second half: records.
  const size_t head = std::min(rest / 2, area_bytes - 16);
  std::memcpy(raw + 16, data + text_end, head);
  const size_t records =
      sizeof(reft::OpLogHeader) + reft::OpLogHeader::kMaxGroups * sizeof(reft::OpGroup);
  std::memcpy(raw + records, data + text_end + head, std::min(rest - head, area_bytes - records));

  reft::HangEvidence evidence;
  evidence.job = text.substr(0, 40);
  evidence.now_ns = 1'000'000'000'000;
  for (int i = 0; i < 2; ++i) {
    reft::RankEvidence rank;
    rank.rank = i;
    rank.alive = true;
    reft::addStackReply(rank, text);
    rank.stacks = text;
    rank.call_sites[1] = text;
    reft::addOpLog(rank, raw, area_bytes, evidence.now_ns);
    evidence.ranks.push_back(rank);
  }
  const reft::Verdict verdict = reft::decide(evidence);
  if (reft::hangReportText(evidence, verdict).empty() ||
      reft::hangReportJson(evidence, verdict).empty()) {
    std::abort();
  }
  return 0;
}

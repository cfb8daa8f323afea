// The comparison of ops on op logs that say anything at all, while they are written. The first byte
// chooses: ops of four ranks that are well-formed, or bytes written over a rank's log. Nothing is
// told that was not counted, and nobody is in the minority of a disagreement but one of its ranks.
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "hang_detect/verdict/agreement_watch.h"
#include "intercept/base/error.h"

namespace {

constexpr size_t kRanks = 4;

void look(reft::AgreementWatch& watch, int64_t now_ns) {
  while (const auto found = watch.next(now_ns)) {
    const bool known = std::all_of(found->minority.begin(), found->minority.end(), [&](int rank) {
      return std::find(found->ranks.begin(), found->ranks.end(), rank) != found->ranks.end();
    });
    if (watch.count() == 0 || !known || found->minority.size() > found->ranks.size() / 2) {
      std::abort();
    }
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t bytes) {
  if (bytes < 2) {
    return 0;
  }
  const bool raw = (data[0] & 1) != 0;
  std::vector<std::unique_ptr<reft::OpLog>> logs;
  for (size_t rank = 0; rank < kRanks; ++rank) {
    logs.push_back(std::make_unique<reft::OpLog>(nullptr, 256));
    logs.back()->addGroup("world", static_cast<int>(rank), kRanks);
    logs.back()->addGroup("pair", static_cast<int>(rank % 2), 2);
  }
  reft::AgreementWatch watch;
  int64_t now_ns = 0;
  for (size_t at = 1; at + 4 <= bytes; at += 4) {
    const uint8_t* const word = data + at;
    const size_t rank = word[0] % kRanks;
    if (raw) {
      // The magic, version and capacity stay: what else they may be is the reader's own test.
      auto* area = static_cast<uint8_t*>(const_cast<void*>(logs[rank]->area()));
      const size_t where =
          16 + ((size_t{word[1]} << 8 | word[2]) * 7) % (logs[rank]->areaBytes() - 16);
      area[where] = word[3];
    } else {
      logs[rank]->begin({.kind = static_cast<reft::OpKind>(word[1] & 31),
                         .group = static_cast<uint32_t>(word[1] >> 5),
                         .seq = word[2],
                         .peer = word[3] & 3,
                         .signature = word[3]});
    }
    if ((word[0] & 0x80) != 0) {
      now_ns += int64_t{word[0]} << 22;
      for (size_t i = 0; i < kRanks; ++i) {
        try {
          watch.read(static_cast<int>(i), reft::OpLogReader(logs[i]->area(), logs[i]->areaBytes()),
                     now_ns);
        } catch (const reft::Error&) {  // as the agent: no op log
        }
      }
      look(watch, now_ns);
    }
    if (word[0] == 0xff) {
      watch.reset();
    }
  }
  look(watch, INT64_MAX);
  return 0;
}

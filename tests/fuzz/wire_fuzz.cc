// Bytes as a peer of the agent may send them: frames, and the JSON in them.
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "agent/peers/messages.h"
#include "hang_detect/evidence/evidence.h"
#include "hang_detect/rank/verdict_notice.h"
#include "hang_detect/report/report.h"
#include "hang_detect/stacks/stacks.h"
#include "intercept/base/error.h"
#include "intercept/link/wire.h"

namespace {

template <typename Parse>
void tryParse(Parse parse) {
  try {
    parse();
  } catch (const reft::InvalidArgument&) {
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view whole(reinterpret_cast<const char*>(data), size);
  tryParse([&] { reft::agent::parseHello(whole); });
  tryParse([&] { reft::agent::parseVaultPut(whole); });
  tryParse([&] { reft::agent::parseVaultGet(whole); });
  tryParse([&] { reft::agent::parseStacksRequest(whole); });
  tryParse([&] { reft::agent::parseStackReplyId(whole); });
  tryParse([&] { reft::agent::parseNotes(whole); });
  if (reft::verdictNoticeText(whole).size() > 4096) {
    __builtin_trap();
  }
  reft::RankEvidence evidence;
  reft::addStackReply(evidence, whole);

  reft::wire::FrameDecoder decoder;
  try {
    // In pieces of changing size, as a socket gives them.
    for (size_t at = 0, piece = 1; at < size; at += piece, piece = piece % 13 + 1) {
      decoder.feed(data + at, piece < size - at ? piece : size - at);
      while (const auto frame = decoder.next()) {
        if (const auto ballot = reft::wire::decodeBallot(frame->payload)) {
          if (frame->payload.size() != sizeof(*ballot)) {
            __builtin_trap();
          }
        }
      }
    }
  } catch (const reft::Corruption&) {
  }
  return 0;
}

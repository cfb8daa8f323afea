// Values that somebody has written to the job's store, and JSON. No value opens but one that was
// sealed, after any change to it, and JSON that is read is as shallow as required.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>

#include "intercept/base/json.h"
#include "intercept/link/value_seal.h"

namespace {

void require(bool condition) {
  if (!condition) {
    std::abort();
  }
}

int depthOf(const nlohmann::json& value) {
  int deepest = 0;
  if (value.is_structured()) {
    for (const auto& item : value) {
      deepest = std::max(deepest, depthOf(item));
    }
    return deepest + 1;
  }
  return 0;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using reft::ValueKind;
  static const reft::ValueSeal seal(std::string(32, 's'), "attempt", 2);
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  for (const auto kind : {ValueKind::kRound, ValueKind::kVote, ValueKind::kAnswer}) {
    require(!seal.open(kind, "key", 0, text));
    require(!seal.open(kind, "key", reft::ValueSeal::kAnyRank, text));
  }
  const std::string sealed = seal.seal(ValueKind::kRound, "key", 1, text);
  const auto opened = seal.open(ValueKind::kRound, "key", 1, sealed);
  require(opened && opened->payload == text);
  if (size > 2) {  // one byte of it changed
    std::string changed = sealed;
    changed[(size_t{data[0]} << 8 | data[1]) % changed.size()] ^= static_cast<char>(data[2] | 1);
    require(!seal.open(ValueKind::kRound, "key", 1, changed));
  }
  const nlohmann::json value = reft::parseJson(text);
  if (!value.is_discarded()) {
    require(depthOf(value) <= reft::kDeepestJson);
    const nlohmann::json copy = value;
    require(copy == value);
    static_cast<void>(copy.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace));
  }
  return 0;
}

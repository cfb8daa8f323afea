// Is there a CUPTI, and which one. The tracing functions join this table together with the code that calls them.
//
// Threads: cuptiApi() fills once; then read-only. Errors: none.
#pragma once

#include <cstdint>
#include <string>

namespace reft {

namespace cupti {
using Result = int;  // CUptiResult; 0 = success
}  // namespace cupti

// X(member, symbol, arguments)
#define REFT_CUPTI_FUNCTIONS(X)                                  \
  X(getVersion, "cuptiGetVersion", (uint32_t * version))         \
  X(getTimestamp, "cuptiGetTimestamp", (uint64_t * nanoseconds)) \
  X(getResultString, "cuptiGetResultString", (cupti::Result result, const char** text))

struct CuptiApi {
#define REFT_CUPTI_MEMBER(member, symbol, arguments) cupti::Result(*member) arguments = nullptr;
  REFT_CUPTI_FUNCTIONS(REFT_CUPTI_MEMBER)
#undef REFT_CUPTI_MEMBER

  uint32_t version = 0;  // CUPTI_API_VERSION; 0 = no CUPTI
  std::string why;       // why version is 0

  bool available() const {
    return version > 0;
  }
};

const CuptiApi& cuptiApi();

}  // namespace reft

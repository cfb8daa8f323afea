// The op log of one simulated rank, as a real rank would have written it.
//
// Threads: one. Errors: none.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "intercept/record/op_log.h"

namespace reft::simulate {

class TraceLog {
 public:
  void step(uint32_t number, int64_t now_ns);
  // `entry`: kind, group, peer and bytes.
  void begin(OpEntry entry, uint32_t number, int64_t now_ns);
  // The newest op of that kind and number has been waited for, and is done.
  void waited(OpKind kind, uint32_t number, int64_t begin_ns, int64_t end_ns);
  std::vector<OpEntry> take() { return std::move(entries_); }

 private:
  std::vector<OpEntry> entries_;
};

}  // namespace reft::simulate

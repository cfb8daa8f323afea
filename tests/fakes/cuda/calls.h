// Counts calls of the stand-in's functions, and makes those fail that a test wants to.
//
// Threads: any. Errors: none.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>

#include "tests/fakes/cuda/results.h"

namespace reft::fake {

class Calls {
 public:
  // One call of `function`. What it has to return at once, kSuccess if it shall do its work.
  // `in_context`: it fails for good when the context has.
  Result enter(const char* function, bool in_context = true);
  void fail(const std::string& function, uint64_t after, Result result, bool sticky);
  void heal();
  // Whether a call has failed that a test made fail, in this process: from then on streams are no
  // longer ordered as the program asked.
  bool haveFailed() const { return failed_.load(); }
  // From now on each call fails: what a kernel has done wrong.
  void stick(Result result) { stuck_.store(result); }
  Result stuck() const { return stuck_.load(); }
  uint64_t count(const std::string& function) const;

 private:
  struct Failure {
    uint64_t after;
    Result result;
    bool sticky;
  };
  mutable std::mutex mutex_;
  std::map<std::string, uint64_t, std::less<>> counts_;
  std::map<std::string, Failure, std::less<>> failures_;
  std::atomic<Result> stuck_{kSuccess};
  std::atomic<bool> failed_{false};
};

Calls& calls();  // of this process; never destroyed

}  // namespace reft::fake

// Ops that have been issued and may still write memory. A snapshot that copies such memory would
// hold half of the result, and no check of it would show that: the op writes behind the version
// counters, and a region that is copied before the optimizer step returns is not compared again.
//
// An op on the host is pending until its Work is complete. One on a device is pending until a
// stream waits for it, because copies run behind that stream.
//
// Threads: any. Errors: none besides std::bad_alloc.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <ATen/ATen.h>

#include "c10d_backend/compat.h"
#include "intercept/base/mutex.h"
#include "intercept/record/op_log.h"

namespace reft {

class PendingWrites {
 public:
  struct Range {
    uintptr_t begin = 0, end = 0;
    static Range of(const at::Tensor& tensor);
  };
  // What an op writes: a tensor, a list, or a list of lists.
  static std::vector<Range> rangesOf(const at::Tensor& tensor);
  static std::vector<Range> rangesOf(const std::vector<at::Tensor>& tensors);
  static std::vector<Range> rangesOf(const std::vector<std::vector<at::Tensor>>& lists);

  // `work`: the inner one.
  void add(uint64_t ticket, OpKind kind, const c10::intrusive_ptr<c10d::Work>& work,
           std::vector<Range> ranges) EXCLUDES(mutex_);
  void remove(uint64_t ticket) EXCLUDES(mutex_);

  struct Hit {
    size_t index = 0;  // of `memory`
    OpKind kind{};
  };
  // The first of `memory` that a pending op may write. Asks only Works that touch it whether they
  // are complete.
  std::optional<Hit> find(std::span<const Range> memory) EXCLUDES(mutex_);

 private:
  struct Entry {
    uint64_t ticket;
    OpKind kind;
    c10::weak_intrusive_ptr<c10d::Work> work;
    std::vector<Range> ranges;
  };
  Mutex mutex_;
  static bool isDone(c10d::Work& work);
  std::vector<Entry> entries_ GUARDED_BY(mutex_);
};

// Those of this process.
PendingWrites& processPendingWrites();

}  // namespace reft

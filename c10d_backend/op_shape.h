// What the op log records of an op, from its tensors and options.
//
// Inline, without allocation: it runs on the path of every op.
//
// Threads: re-entrant. Errors: firstOf() throws ValueError if there is no tensor.
#pragma once

#include <cstdint>
#include <vector>

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include "intercept/record/op_log.h"

namespace reft {

using TensorList = std::vector<at::Tensor>;
using TensorLists = std::vector<std::vector<at::Tensor>>;

inline int64_t elements(const at::Tensor& tensor) {
  return tensor.numel();
}
inline int64_t elements(const TensorList& tensors) {
  int64_t sum = 0;
  for (const at::Tensor& tensor : tensors) {
    sum += tensor.numel();
  }
  return sum;
}

inline uint64_t byteCount(const at::Tensor& tensor) {
  return static_cast<uint64_t>(tensor.numel()) * tensor.element_size();
}
inline uint64_t byteCount(const TensorList& tensors) {
  uint64_t sum = 0;
  for (const at::Tensor& tensor : tensors) {
    sum += byteCount(tensor);
  }
  return sum;
}

// OpRecord::dtype; kNoType for mixed or no tensors.
constexpr uint8_t kNoType = 255;
inline uint8_t dtypeOf(const at::Tensor& tensor) {
  return static_cast<uint8_t>(tensor.scalar_type());
}
inline uint8_t dtypeOf(const TensorList& tensors) {
  const uint8_t type = tensors.empty() ? kNoType : dtypeOf(tensors[0]);
  for (const at::Tensor& tensor : tensors) {
    if (dtypeOf(tensor) != type) {
      return kNoType;
    }
  }
  return type;
}

inline const at::Tensor& firstOf(const at::Tensor& tensor) {
  return tensor;
}
inline const at::Tensor& firstOf(const TensorList& tensors) {
  TORCH_CHECK_VALUE(!tensors.empty(), "a collective needs at least one tensor");
  return tensors[0];
}
// The first tensor of the first list that has one, else of `otherwise`.
inline const at::Tensor& firstOf(const TensorLists& lists, const TensorList& otherwise) {
  for (const TensorList& list : lists) {
    if (!list.empty()) {
      return list[0];
    }
  }
  return firstOf(otherwise);
}

struct OpShape {
  OpKind kind;
  uint64_t bytes = 0;
  int64_t agreed = 0;  // number that all ranks of a correct program agree on; 0: none
  uint8_t dtype = kNoType;
  uint8_t reduce_op = kNoType;
  int32_t peer = -1;
  uint32_t tag = 0;
  // On a device, NCCL puts such an op on the stream that trains, which stalls in it; no Work is
  // waited for later.
  bool on_current_stream = false;

  OpShape withBytes(uint64_t count) const {
    OpShape shape = *this;
    shape.bytes = count;
    return shape;
  }
  OpShape agreedOn(int64_t count) const {
    OpShape shape = *this;
    shape.agreed = count;
    return shape;
  }
};

// A collective on `tensors` (one or a list): the ranks agree on their elements unless agreedOn()
// says otherwise. Root and reduce op are those of `opts`, if it has them.
template <typename Tensors, typename Options>
OpShape shapeOf(OpKind kind, const Tensors& tensors, const Options& opts) {
  OpShape shape{.kind = kind,
                .bytes = byteCount(tensors),
                .agreed = elements(tensors),
                .dtype = dtypeOf(tensors),
                .on_current_stream = !opts.asyncOp};
  if constexpr (requires { opts.reduceOp; }) {
    shape.reduce_op = opts.reduceOp.op_;
  }
  if constexpr (requires { opts.rootRank; }) {
    shape.peer = static_cast<int32_t>(opts.rootRank);
  }
  return shape;
}

// A message.
inline OpShape messageOf(OpKind kind, const TensorList& tensors, int peer, int tag) {
  return {.kind = kind,
          .bytes = byteCount(tensors),
          .agreed = elements(tensors),
          .dtype = dtypeOf(tensors),
          .peer = peer,
          .tag = static_cast<uint32_t>(tag)};
}

}  // namespace reft

#include "snapshot/state/split.h"

#include <algorithm>

#include "intercept/base/hash.h"
#include "intercept/record/cut.h"

namespace reft {

RowRange rowsOf(int64_t rows, int world, int rank) {
  const int64_t each = rows / world + (rows % world > 0 ? 1 : 0);
  const int64_t full = each == 0 ? 0 : rows / each;  // ranks that have as many
  const int64_t begin = rank <= full ? rank * each : rows;
  const int64_t end = rank < full ? begin + each : rows;
  return {std::min(begin, rows), end};
}

uint64_t SplitTensor::bytesOf(int world, int rank) const {
  const RowRange own = rowsOf(shape.at(0), world, rank);
  return static_cast<uint64_t>(own.end - own.begin) * row_bytes;
}

std::vector<int64_t> SplitTensor::shapeOf(int world, int rank) const {
  const RowRange own = rowsOf(shape.at(0), world, rank);
  std::vector<int64_t> found = shape;
  found[0] = own.end - own.begin;
  return found;
}

uint64_t rowBytes(const std::vector<int64_t>& shape, uint64_t item_bytes) {
  uint64_t bytes = item_bytes;
  for (size_t i = 1; i < shape.size(); ++i) {
    if (shape[i] < 1 || __builtin_mul_overflow(bytes, static_cast<uint64_t>(shape[i]), &bytes)) {
      return 0;
    }
  }
  return shape.empty() ? 0 : bytes;
}

uint64_t digestOf(const std::vector<SplitTensor>& splits) {
  if (splits.empty()) {
    return 0;
  }
  uint64_t hash = hashCombine(0, splits.size());
  for (const SplitTensor& split : splits) {
    for (const std::string* text : {&split.name, &split.dtype}) {
      hash = hashCombine(hashCombine(hash, text->size()), CutCounter::groupKey(*text));
    }
    hash = hashCombine(hash, split.shape.size());
    for (const int64_t extent : split.shape) {
      hash = hashCombine(hash, static_cast<uint64_t>(extent));
    }
    hash = hashCombine(hash, split.row_bytes);
  }
  return hash == 0 ? 1 : hash;
}

}  // namespace reft

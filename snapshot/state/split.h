// Tensors that the ranks of a job have in parts: of dim 0, each rank has some rows, which follow
// those of the rank before (FSDP2, and any DTensor with Shard(0) over all ranks). What rows a rank
// has follows from the number of ranks, so another number of ranks knows where its rows lie.
//
// Threads: values. Errors: none.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace reft {

struct RowRange {
  int64_t begin = 0, end = 0;
};

// The rows that rank `rank` of `world` has, dealt as torch.chunk does: the first ranks have equally
// many, one may have fewer, and those after it none.
RowRange rowsOf(int64_t rows, int world, int rank);

// Equal on all ranks. A rank that has rows of it has a private region of the same name.
struct SplitTensor {
  std::string name;
  std::string dtype;
  std::vector<int64_t> shape;  // of all ranks together
  uint64_t row_bytes = 0;

  // Bytes of the region that a rank has of it; its shape.
  uint64_t bytesOf(int world, int rank) const;
  std::vector<int64_t> shapeOf(int world, int rank) const;
};

// Of a tensor of this shape; 0 if it has no dimension, an empty one, or more bytes than there are.
uint64_t rowBytes(const std::vector<int64_t>& shape, uint64_t item_bytes);

// Equal if all of them are, in their order; 0: there are none.
uint64_t digestOf(const std::vector<SplitTensor>& splits);

}  // namespace reft

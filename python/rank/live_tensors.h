// Live tensors as regions: what the engine and the restore need to know of them.
//
// Threads: one at a time; TensorVersions is read by the copy thread as well. Errors:
// InvalidArgument for tensors that are not one span of memory.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "snapshot/engine/engine.h"
#include "snapshot/restore/restorer.h"
#include "snapshot/state/table.h"

namespace reft {

// Tensors of one capture. Holds the storages, because user code may drop a tensor before the copy
// is done, and the version counters, which outlive the tensors. The memory inside a storage it
// cannot hold (share_memory_, resize_), so it notes where that is. Destroy it with the GIL held:
// the last reference to a storage may free Python objects.
class TensorVersions final : public VersionReader {
 public:
  // Returns the address of its first element; nullptr if its storage has not all of its memory.
  const void* add(const at::Tensor& tensor);
  // Keeps its memory as well.
  void keep(const at::Tensor& tensor) { parts_.push_back(tensor.storage()); }
  uint64_t version(size_t region) const noexcept override;
  bool stands(size_t region) const noexcept override;

 private:
  struct Memory {
    c10::Storage storage;
    const void* begin = nullptr;
    uint64_t bytes = 0;  // up to the end of the tensor
  };
  std::vector<Memory> memory_;
  std::vector<c10::Storage> parts_;
  std::vector<c10::VariableVersion> counters_;
};

using NamedTensor = std::pair<std::string, at::Tensor>;

// Whether the tensor's elements fill one span of memory: only such a span can be copied as bytes.
bool isDense(const at::Tensor& tensor);
// Name of the element type, as the tensor table has it.
std::string dtypeName(const at::Tensor& tensor);
// The device of a CUDA tensor, -1 on the host.
int deviceOf(const at::Tensor& tensor);
// The stream that the calling thread works on now, of each device in `devices`.
std::vector<DeviceStream> currentStreams(const std::vector<int>& devices);

// A region of the tensor table without its group.
RegionInfo regionInfo(const std::string& name, const at::Tensor& tensor);
// Whether a tensor still has the type, shape and layout of its region.
bool fitsRegion(const at::Tensor& tensor, const RegionInfo& region);
// Whether the memory of a tensor is there: its storage may have been given back.
bool fitsStorage(const at::Tensor& tensor);
// Where a restore writes.
std::vector<LiveRegion> liveRegions(const std::vector<NamedTensor>& tensors);
// Writes to `begin` of a tensor's bytes on a device before it returns.
void uploadTo(const at::Tensor& tensor, uint64_t begin, std::span<const std::byte> bytes);

// Reads from `begin` of a tensor's bytes on a device.
void downloadFrom(const at::Tensor& tensor, uint64_t begin, std::span<std::byte> bytes);

}  // namespace reft

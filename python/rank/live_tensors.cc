#include "python/rank/live_tensors.h"

#include <algorithm>

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include "c10d_backend/current_stream.h"
#include "intercept/base/error.h"

namespace reft {

const void* TensorVersions::add(const at::Tensor& tensor) {
  const c10::Storage& storage = tensor.storage();
  const auto offset = static_cast<uint64_t>(tensor.storage_offset()) * tensor.itemsize();
  memory_.push_back({storage, storage.data(), offset + tensor.nbytes()});
  // Inference tensors keep no versions; writes to them are found by samples alone.
  counters_.push_back(tensor.is_inference() ? c10::VariableVersion(c10::VariableVersion::DISABLED)
                                            : tensor.unsafeGetTensorImpl()->version_counter());
  const Memory& memory = memory_.back();
  return memory.begin != nullptr && memory.bytes <= storage.nbytes()
             ? static_cast<const std::byte*>(memory.begin) + offset
             : nullptr;
}

bool TensorVersions::stands(size_t region) const noexcept {
  const Memory& memory = memory_[region];
  return memory.storage.data() == memory.begin && memory.bytes <= memory.storage.nbytes();
}

uint64_t TensorVersions::version(size_t region) const noexcept {
  const c10::VariableVersion& counter = counters_[region];
  return counter.enabled() ? counter.current_version() : 0;
}

bool isDense(const at::Tensor& tensor) {
  return tensor.layout() == c10::kStrided && tensor.is_non_overlapping_and_dense() &&
         !tensor.is_neg() && !tensor.is_conj();
}

std::string dtypeName(const at::Tensor& tensor) {
  return c10::toString(tensor.scalar_type());
}

bool fitsRegion(const at::Tensor& tensor, const RegionInfo& region) {
  if (tensor.nbytes() != region.bytes || tensor.sizes() != region.shape ||
      dtypeName(tensor) != region.dtype || !isDense(tensor)) {
    return false;
  }
  return region.strides.empty() ? tensor.is_contiguous() : tensor.strides() == region.strides;
}

bool fitsStorage(const at::Tensor& tensor) {
  const auto offset = static_cast<uint64_t>(tensor.storage_offset()) * tensor.itemsize();
  const uint64_t all = tensor.storage().nbytes();
  return offset <= all && tensor.nbytes() <= all - offset;
}

int deviceOf(const at::Tensor& tensor) {
  return tensor.is_cuda() ? static_cast<int>(tensor.get_device()) : -1;
}

std::vector<DeviceStream> currentStreams(const std::vector<int>& devices) {
  std::vector<DeviceStream> streams;
  for (const int index : devices) {
    if (index >= 0 && std::none_of(streams.begin(), streams.end(),
                                   [&](const DeviceStream& s) { return s.device == index; })) {
      streams.push_back(
          currentStream({c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(index)}));
    }
  }
  return streams;
}

RegionInfo regionInfo(const std::string& name, const at::Tensor& tensor) {
  if (!isDense(tensor)) {
    throw InvalidArgument("region " + name, "not dense",
                          "tensors whose elements fill one span of memory");
  }
  RegionInfo info;
  info.name = name;
  info.dtype = dtypeName(tensor);
  info.shape = tensor.sizes().vec();
  info.bytes = tensor.nbytes();
  // Rows of dim 0 are contiguous only in the default layout; other dense layouts are not cut.
  info.row_bytes = tensor.is_contiguous() && tensor.dim() > 0 && tensor.size(0) > 0
                       ? info.bytes / static_cast<uint64_t>(tensor.size(0))
                       : info.bytes;
  if (!tensor.is_contiguous()) {
    info.strides = tensor.strides().vec();
  }
  return info;
}

std::vector<LiveRegion> liveRegions(const std::vector<NamedTensor>& tensors) {
  std::vector<LiveRegion> regions;
  regions.reserve(tensors.size());
  for (const auto& [name, tensor] : tensors) {
    if (!isDense(tensor)) {
      throw InvalidArgument("region " + name, "not dense",
                            "tensors whose elements fill one span of memory");
    }
    if (!fitsStorage(tensor)) {
      throw InvalidArgument("region " + name, "without memory", "tensors that have theirs");
    }
    LiveRegion region{name, dtypeName(tensor), tensor.sizes().vec(), tensor.nbytes(), nullptr};
    if (!tensor.is_cuda()) {
      region.memory = static_cast<std::byte*>(tensor.data_ptr());
    }
    regions.push_back(std::move(region));
  }
  return regions;
}

namespace {

// `count` bytes of a tensor's memory, from `begin` on, as a tensor of bytes.
at::Tensor bytesOf(const at::Tensor& tensor, uint64_t begin, size_t count) {
  const at::Tensor all = at::empty({0}, tensor.options().dtype(at::kByte)).set_(tensor.storage());
  const auto at = tensor.storage_offset() * static_cast<int64_t>(tensor.itemsize()) +
                  static_cast<int64_t>(begin);
  return all.narrow(0, at, static_cast<int64_t>(count));
}

}  // namespace

void uploadTo(const at::Tensor& tensor, uint64_t begin, std::span<const std::byte> bytes) {
  // From pageable memory: read before copy_() returns.
  bytesOf(tensor, begin, bytes.size())
      .copy_(at::from_blob(const_cast<std::byte*>(bytes.data()),
                           {static_cast<int64_t>(bytes.size())}, at::kByte));
}

void downloadFrom(const at::Tensor& tensor, uint64_t begin, std::span<std::byte> bytes) {
  // Into pageable memory: written before copy_() returns.
  at::from_blob(bytes.data(), {static_cast<int64_t>(bytes.size())}, at::kByte)
      .copy_(bytesOf(tensor, begin, bytes.size()));
}

}  // namespace reft

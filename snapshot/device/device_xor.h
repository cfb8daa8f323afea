// The XOR of ranges of a CUDA device's memory, for parities of what lies there: ranges are added to
// a sum on the device, and what comes out is copied to the host once, as an mth part of the bytes
// for a set of m members (REFT, "aec").
//
// The kernel is PTX, which the driver compiles when it loads it: reft is built without CUDA's
// compiler, and runs on devices that are newer than it. What it computes on a device is compared
// with what the host computes before it is used there.
//
// Threads: hindrance() any; the rest one at a time, with the device's context current. Errors: none
// are thrown; the driver's result codes.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>

#include "intercept/driver/cuda_api.h"

namespace reft {

class DeviceXor {
 public:
  static constexpr size_t kSumBytes = size_t{4} << 20;
  static const char* const kPtx;

  // Why no parities can be made of memory on these devices; empty: they can. -1: the host. Tries it
  // on a device once in the life of the process.
  static std::string hindrance(const CudaApi& api, std::span<const int> devices);

  // On the device whose context is current; nullptr: hindrance() says why from now on.
  static std::unique_ptr<DeviceXor> on(const CudaApi& api, int device);
  ~DeviceXor();
  DeviceXor(const DeviceXor&) = delete;
  DeviceXor& operator=(const DeviceXor&) = delete;

  // All are enqueued on `stream`, the same one for one sum, which is the last that is taken before
  // the next clear(). `bytes` of the sum become zeros.
  cuda::Result clear(size_t bytes, cuda::Stream stream);
  // The sum from `at` on ^= the bytes at `from`.
  cuda::Result add(size_t at, cuda::Pointer from, size_t bytes, cuda::Stream stream);
  // `to` lies in pinned memory.
  cuda::Result take(std::byte* to, size_t bytes, cuda::Stream stream);

 private:
  explicit DeviceXor(const CudaApi& api) : api_(api) {}
  std::string load();
  // What is wrong with sums of a few bytes; empty: nothing.
  std::string tryOut();
  cuda::Result launch(cuda::Pointer into, cuda::Pointer with, size_t bytes, cuda::Stream stream);

  const CudaApi& api_;
  cuda::Module module_ = nullptr;
  cuda::Function kernel_ = nullptr;
  cuda::Pointer sum_ = 0;
};

}  // namespace reft

// The XOR of cells in a CUDA device's memory, for parities of what lies there: cells are added to a
// sum on the device, and what comes out is copied to the host once, as one m - 1th of the bytes for
// a set of m members (REFT, "aec").
//
// The kernel is PTX, which the driver compiles when it loads it: reft is built without CUDA's
// compiler, and runs on devices that are newer than it. What it computes on a device is compared
// with what the host computes before it is used there. It reads and writes memory of this class
// alone, into which the bytes of a cell are copied first: a copy from memory that is gone is
// refused, while a kernel that read it would end all work of the process on the device.
//
// The memory (8 MiB) is kept for the next user, to the end of the process: to free it would wait
// for all work of the device.
//
// Threads: hindrance(), on() and giveBack() any; the rest one at a time. The device's context is
// current, except for hindrance(). Errors: none are thrown; the driver's result codes.
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
  // Nothing of it is under way.
  static void giveBack(std::unique_ptr<DeviceXor> unused);
  DeviceXor(const DeviceXor&) = delete;
  DeviceXor& operator=(const DeviceXor&) = delete;

  // All are enqueued on `stream`, the same one for one sum, which is taken before the next clear().
  // `bytes` of the sum become zeros.
  cuda::Result clear(size_t bytes, cuda::Stream stream);
  // The bytes of a cell that lie `at` bytes into it.
  cuda::Result put(size_t at, cuda::Pointer from, size_t bytes, cuda::Stream stream);
  // The sum from `at` on ^= what was put there.
  cuda::Result add(size_t at, size_t bytes, cuda::Stream stream);
  // `to` lies in pinned memory.
  cuda::Result take(std::byte* to, size_t bytes, cuda::Stream stream);

 private:
  DeviceXor(const CudaApi& api, int device) : api_(api), device_(device) {}
  std::string load();
  // What is wrong with sums of a few bytes; empty: nothing.
  std::string tryOut();
  void unload();
  cuda::Result launch(size_t at, size_t bytes, cuda::Stream stream);

  const CudaApi& api_;
  const int device_;
  cuda::Module module_ = nullptr;
  cuda::Function kernel_ = nullptr;
  cuda::Pointer sum_ = 0;
  cuda::Pointer cell_ = 0;  // behind the sum
};

}  // namespace reft

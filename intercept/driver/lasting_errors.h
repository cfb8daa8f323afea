// The results of CUDA's driver after which a device is lost to the process.
//
// Threads: constants. Errors: none. No part of this header needs code of the C++ library.
#pragma once

namespace reft::cuda {

struct LastingError {
  int code;  // as CUresult in cuda.h
  const char* meaning;
};

// Those after which a process has to end to use the device again, and 999 (unknown), which a GPU
// gives that fell off its bus. Not 709: that is a context that was given back.
inline constexpr LastingError kLastingErrors[] = {
    {46, "a device that is not available"},
    {214, "an uncorrectable ECC error"},
    {220, "an uncorrectable NVLink error"},
    {700, "an illegal memory access"},
    {702, "a kernel that ran longer than the driver allows"},
    {710, "a failed assertion in a kernel"},
    {714, "a hardware stack error"},
    {715, "an illegal instruction"},
    {716, "a misaligned address"},
    {717, "an instruction on the wrong address space"},
    {718, "an invalid program counter"},
    {719, "a kernel that failed"},
    {721, "a contained memory error"},
    {999, "an unknown error of the driver"},
};

// nullptr for success, and for an error of one call.
constexpr const LastingError* lastingError(int code) noexcept {
  for (const LastingError& one : kLastingErrors) {
    if (one.code == code) {
      return &one;
    }
  }
  return nullptr;
}

}  // namespace reft::cuda

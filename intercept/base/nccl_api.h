// The NCCL functions that reft calls, filled from the libnccl.so.2 that torch has loaded, else from the system's.
//
// Threads: ncclApi() fills once; then read-only. Errors: none; a function that this NCCL lacks is nullptr.
#pragma once

#include <string>

namespace reft {

namespace nccl {
using Result = int;  // ncclResult_t; 0 = success
using Comm = void*;  // ncclComm_t
}  // namespace nccl

// X(member, symbol, result, arguments)
#define REFT_NCCL_FUNCTIONS(X)                                                \
  X(getVersion, "ncclGetVersion", nccl::Result, (int* version))               \
  X(getErrorString, "ncclGetErrorString", const char*, (nccl::Result result)) \
  X(getLastError, "ncclGetLastError", const char*, (nccl::Comm comm))         \
  X(commGetAsyncError, "ncclCommGetAsyncError", nccl::Result, (nccl::Comm comm, nccl::Result * error))

struct NcclApi {
#define REFT_NCCL_MEMBER(member, symbol, result, arguments) result(*member) arguments = nullptr;
  REFT_NCCL_FUNCTIONS(REFT_NCCL_MEMBER)
#undef REFT_NCCL_MEMBER

  int version = 0;  // 22809 = 2.28.9; 0 = no NCCL
  std::string why;  // why version is 0

  bool available() const {
    return version > 0;
  }
};

const NcclApi& ncclApi();

}  // namespace reft

// Driver functions under their own names, for programs that link libcuda: the loader binds these
// calls to the first library that has the name, and a preloaded one comes first.
//
// The names exist in processes without CUDA, too. lookup.cc hides them there from dlsym(). If a
// program calls one all the same (through a weak reference), the result is
// CUDA_ERROR_SHARED_OBJECT_INIT_FAILED.
//
// Threads: any. Errors: as above; every other result is that of the real function.
#pragma once

namespace reft::hooks {

// Whether a function is one of these.
bool isExport(const void* function);

}  // namespace reft::hooks

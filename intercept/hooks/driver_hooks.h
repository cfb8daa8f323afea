// Hooks of driver functions, and the choice of the one for a function that a program has looked up.
//
// A hook belongs to one ABI (a row of driver_calls.h) and to one real function, which it calls with
// the caller's arguments and whose result it returns. A row has several hooks, as a process may get
// several real functions for it: those for legacy and for per-thread default streams, those of
// another library that wraps the driver. Without a free one, the program gets the real function.
//
// Threads: any. Errors: none; every function returns what the program would have got, or a hook of
// it.
#pragma once

#include <cstdint>

namespace reft::hooks {

// Whether an exported symbol of the driver has hooks; false for nullptr.
bool isHooked(const char* symbol);
// A hook for what dlsym() found under this symbol.
void* hookOfSymbol(const char* symbol, void* real);
// A hook for what cuGetProcAddress() has returned for this name and CUDA version.
void* hookOfName(const char* name, int version, void* real);
// Ends a call of cuGetProcAddress(): puts a hook in the place of the real function, if it has one.
// Returns `result`.
int handOut(const char* name, int version, int result, void** function);
// Whether a function is one of this library's (a hook, or an export of driver_exports.cc).
bool isOurs(const void* function);

}  // namespace reft::hooks

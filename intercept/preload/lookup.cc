// dlsym() and dlvsym() of the process.
//
// A lookup that does not concern CUDA goes to the real function by a jump. The stack is then that
// of the caller, by whose return address the real function finds out whose RTLD_NEXT, RTLD_DEFAULT
// or namespace is meant. RTLD_NEXT always goes that way: who asks for it replaces functions, too,
// and chains to the next one.
//
// Without the library, a process that has not loaded CUDA finds no driver function. So our own
// exports do not count: a lookup that finds one is done again behind this library.
//
// Threads: any. Errors: those of the real functions; dlerror() tells about the last real lookup.
#include <dlfcn.h>
#include <link.h>

#include <atomic>

#include "intercept/hooks/driver_exports.h"
#include "intercept/hooks/driver_hooks.h"
#include "intercept/hooks/loaded_objects.h"
#include "intercept/hooks/observer.h"

#if !defined(__x86_64__)
#error "the entries below are written for x86-64"
#endif

// Of the oldest version, and weak: a child may run with another C library than the one that this
// was built with, and a symbol that is missing would end it.
asm(".symver dladdr1, dladdr1@GLIBC_2.3.3");
#pragma weak dladdr1

namespace reft::hooks {

namespace {

using Dlsym = void* (*)(void* handle, const char* symbol);
using Dlvsym = void* (*)(void* handle, const char* symbol, const char* version);

std::atomic<void*> orig_dlsym;
std::atomic<void*> orig_dlvsym;

// Another library that replaces dlsym may be next, and wants to see the lookups, too.
void* next(std::atomic<void*>& orig, const char* symbol) {
  void* found = orig.load(std::memory_order_relaxed);
  if (found == nullptr) {
    found = earlyDefinition(symbol);
    orig.store(found, std::memory_order_relaxed);
  }
  return found;
}

// The object that holds `address`, as a handle; nullptr: none does.
void* handleOf(const void* address) {
  Dl_info info;
  void* object = nullptr;
  return &::dladdr1 != nullptr && ::dladdr1(address, &info, &object, RTLD_DL_LINKMAP) != 0
             ? object
             : nullptr;
}

// `real(handle)` looks the symbol up.
template <typename Real>
void* find(void* handle, const char* symbol, const void* caller, Real real) {
  void* found = real(handle);
  if (isExport(found)) {
    found = real(RTLD_NEXT);
    // The caller may have brought its libcuda along, unseen by others (RTLD_LOCAL).
    void* const own = found == nullptr && handle == RTLD_DEFAULT ? handleOf(caller) : nullptr;
    if (own != nullptr) {
      found = real(own);
      found = isExport(found) ? real(RTLD_NEXT) : found;  // the program itself: an error after all
    }
  }
  return hookOfSymbol(symbol, found);
}

}  // namespace

// What an entry does: jump to `jump` with the arguments that it got, or return `result` if that is
// nullptr. In rax and rdx.
struct Route {
  void* jump;
  void* result;
};

extern "C" __attribute__((visibility("hidden"))) Route reft_route_dlsym(void* handle,
                                                                        const char* symbol,
                                                                        const void* caller) {
  void* const orig = next(orig_dlsym, "dlsym");
  if (handle == RTLD_NEXT || !isHooked(symbol) || orig == nullptr) {
    return {orig, nullptr};
  }
  const auto real = [=](void* in) { return reinterpret_cast<Dlsym>(orig)(in, symbol); };
  return {nullptr, find(handle, symbol, caller, real)};
}

extern "C" __attribute__((visibility("hidden"))) Route reft_route_dlvsym(void* handle,
                                                                         const char* symbol,
                                                                         const char* version,
                                                                         const void* caller) {
  void* const orig = next(orig_dlvsym, "dlvsym");
  if (handle == RTLD_NEXT || !isHooked(symbol) || orig == nullptr) {
    return {orig, nullptr};
  }
  const auto real = [=](void* in) { return reinterpret_cast<Dlvsym>(orig)(in, symbol, version); };
  return {nullptr, find(handle, symbol, caller, real)};
}

extern "C" __attribute__((visibility("default"))) ActivityTable* reft_device_activity() {
  activity.layout.store(ActivityTable::kLayout, std::memory_order_release);
  return &activity;
}

}  // namespace reft::hooks

// An entry keeps its arguments over the call of its route, whose last argument is the return
// address. A compiler may turn such a call into a jump, or not: here it has to.
#define REFT_ENTRY(name, route, third, return_address)               \
  asm(".pushsection .text\n"                                         \
      ".p2align 4\n"                                                 \
      ".globl " name                                                 \
      "\n"                                                           \
      ".type " name ", @function\n" name                             \
      ":\n"                                                          \
      ".cfi_startproc\n"                                             \
      "endbr64\n"                                                    \
      "subq $24, %rsp\n"                                             \
      ".cfi_adjust_cfa_offset 24\n"                                  \
      "movq %rdi, (%rsp)\n"                                          \
      "movq %rsi, 8(%rsp)\n" third "movq 24(%rsp), %" return_address \
      "\n"                                                           \
      "call " route                                                  \
      "\n"                                                           \
      "movq (%rsp), %rdi\n"                                          \
      "movq 8(%rsp), %rsi\n"                                         \
      "movq %rax, %r11\n"                                            \
      "movq %rdx, %rax\n"                                            \
      "movq 16(%rsp), %rdx\n"                                        \
      "addq $24, %rsp\n"                                             \
      ".cfi_adjust_cfa_offset -24\n"                                 \
      "testq %r11, %r11\n"                                           \
      "jz 1f\n"                                                      \
      "jmp *%r11\n"                                                  \
      "1: ret\n"                                                     \
      ".cfi_endproc\n"                                               \
      ".size " name ", .-" name                                      \
      "\n"                                                           \
      ".popsection\n")

REFT_ENTRY("dlsym", "reft_route_dlsym", "", "rdx");
REFT_ENTRY("dlvsym", "reft_route_dlvsym", "movq %rdx, 16(%rsp)\n", "rcx");

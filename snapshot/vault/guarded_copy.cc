#include "snapshot/vault/guarded_copy.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#include <ucontext.h>

#include <array>
#include <csignal>

#include "snapshot/vault/mapping.h"

namespace reft {

#if defined(__x86_64__)

extern "C" {
size_t reftGuardedCopy(std::byte* to, const std::byte* from, size_t bytes);
extern const char reftGuardedCopyLoads;  // the instruction that loads
extern const char reftGuardedCopyEnds;   // the one after it
}

// `rep movsb` keeps the bytes that are left in rcx, in a fault, too.
asm(R"(
  .pushsection .text, "ax", @progbits
  .p2align 4
  .globl reftGuardedCopy
  .hidden reftGuardedCopy
  .type reftGuardedCopy, @function
reftGuardedCopy:
  .cfi_startproc
  endbr64
  movq %rdx, %rcx
  .globl reftGuardedCopyLoads
  .hidden reftGuardedCopyLoads
reftGuardedCopyLoads:
  rep movsb
  .globl reftGuardedCopyEnds
  .hidden reftGuardedCopyEnds
reftGuardedCopyEnds:
  movq %rdx, %rax
  subq %rcx, %rax
  ret
  .cfi_endproc
  .size reftGuardedCopy, . - reftGuardedCopy
  .popsection
)");

namespace {

struct Handled {
  int signal;
  struct sigaction before {};
};

// Written once, before reft's handlers are there.
std::array handled = {Handled{SIGSEGV}, Handled{SIGBUS}};

// Whether the processor copies whole cache lines with `rep movsb` (ERMS: Intel since 2013, AMD
// since 2020). Others copy bytes.
bool isFast() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) != 0 && (b & (1u << 9)) != 0;
}

// Whether this thread's own instruction has raised the signal: no other process has sent it, and
// the kernel does not report memory that this thread has not touched.
bool isOwnFault(const siginfo_t& info) {
  return info.si_code > 0 && info.si_code != BUS_MCEERR_AO;
}

// As the process would have been treated without reft.
void passOn(const Handled& known, siginfo_t* info, void* context) {
  const struct sigaction& before = known.before;
  if ((before.sa_flags & SA_SIGINFO) != 0) {
    before.sa_sigaction(known.signal, info, context);
    return;
  }
  const bool comes_again = isOwnFault(*info);  // when the handler has returned
  if (before.sa_handler == SIG_IGN && !comes_again) {
    return;
  }
  if (before.sa_handler == SIG_IGN || before.sa_handler == SIG_DFL) {
    struct sigaction none {};
    none.sa_handler = SIG_DFL;
    ::sigaction(known.signal, &none, nullptr);
    if (!comes_again) {
      ::raise(known.signal);
    }
    return;
  }
  before.sa_handler(known.signal);
}

void onFault(int signal, siginfo_t* info, void* context) {
  if (signal == SIGBUS && info->si_code == BUS_ADRERR && replaceLostPage(info->si_addr)) {
    return;  // the disk under a vault has failed: the engine sees that, and training goes on
  }
  greg_t& at = static_cast<ucontext_t*>(context)->uc_mcontext.gregs[REG_RIP];
  if (isOwnFault(*info) && at == reinterpret_cast<greg_t>(&reftGuardedCopyLoads)) {
    at = reinterpret_cast<greg_t>(&reftGuardedCopyEnds);
    return;
  }
  passOn(handled[signal == SIGSEGV ? 0 : 1], info, context);
}

bool setHandlers() {
  for (Handled& one : handled) {
    if (::sigaction(one.signal, nullptr, &one.before) != 0 ||
        (one.before.sa_flags & static_cast<int>(SA_RESETHAND)) != 0) {
      return false;
    }
  }
  for (const Handled& one : handled) {
    struct sigaction ours = one.before;  // its mask, and whether calls of the system go on
    ours.sa_flags |= SA_SIGINFO;
    if (one.before.sa_handler == SIG_DFL) {
      ours.sa_flags |= SA_ONSTACK;  // else on the stack that the handler before wants
    }
    ours.sa_sigaction = onFault;
    if (::sigaction(one.signal, &ours, nullptr) != 0) {
      return false;
    }
  }
  return true;
}

bool isOurs(int signal) {
  struct sigaction now {};
  return ::sigaction(signal, nullptr, &now) == 0 && (now.sa_flags & SA_SIGINFO) != 0 &&
         now.sa_sigaction == onFault;
}

}  // namespace

bool isGuarded() {
  static const bool set = setHandlers();
  static const bool fast = isFast();
  sigset_t blocked;
  return set && fast && isOurs(SIGSEGV) && isOurs(SIGBUS) &&
         ::pthread_sigmask(SIG_SETMASK, nullptr, &blocked) == 0 &&
         ::sigismember(&blocked, SIGSEGV) == 0 && ::sigismember(&blocked, SIGBUS) == 0;
}

size_t guardedCopy(std::byte* to, const std::byte* from, size_t bytes) {
  return reftGuardedCopy(to, from, bytes);
}

#else

bool isGuarded() {
  return false;
}

size_t guardedCopy(std::byte* /*to*/, const std::byte* /*from*/, size_t /*bytes*/) {
  return 0;
}

#endif

}  // namespace reft

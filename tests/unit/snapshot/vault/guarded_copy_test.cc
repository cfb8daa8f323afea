#include "snapshot/vault/guarded_copy.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <csignal>
#include <cstring>
#include <functional>

#include "snapshot/vault/live_reader.h"
#include "snapshot/vault/vault_format.h"

namespace reft {
namespace guarded_copy_test {

#if defined(__x86_64__)

// Two pages, of which the second one is gone.
std::byte* onePage() {
  auto* data = static_cast<std::byte*>(
      ::mmap(nullptr, 2 * kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  std::memset(data, 5, 2 * kPage);
  ::munmap(data + kPage, kPage);
  return data;
}

void fault() {
  *static_cast<volatile int*>(nullptr) = 1;
}

// The status of a child in which this was called.
int statusOf(const std::function<void()>& call) {
  const pid_t child = ::fork();
  if (child == 0) {
    call();
    ::_exit(0);
  }
  int status = -1;
  ::waitpid(child, &status, 0);
  return status;
}

void setHandler(int signal, void (*handler)(int, siginfo_t*, void*)) {
  struct sigaction action {};
  action.sa_sigaction = handler;
  action.sa_flags = SA_SIGINFO;
  ::sigaction(signal, &action, nullptr);
}

TEST(GuardedCopy, EndsWhereMemoryEnds) {
  if (!isGuarded()) {
    GTEST_SKIP() << "this processor has no ERMS";
  }
  std::byte* const from = onePage();
  std::array<std::byte, 2 * kPage> to{};
  EXPECT_EQ(guardedCopy(to.data(), from, kPage), kPage);
  EXPECT_EQ(std::memcmp(to.data(), from, kPage), 0);
  EXPECT_EQ(guardedCopy(to.data(), from + 1000, 2 * kPage - 1000), kPage - 1000);
  EXPECT_EQ(guardedCopy(to.data(), from + kPage, 1), 0u);
  EXPECT_EQ(guardedCopy(to.data(), from + kPage, 0), 0u);
  EXPECT_EQ(guardedCopy(to.data(), nullptr, 8), 0u);
  EXPECT_TRUE(isGuarded());
}

TEST(GuardedCopy, AnotherHandlerOrABlockedSignalLeavesTheCopyToTheKernel) {
  if (!isGuarded()) {
    GTEST_SKIP() << "this processor has no ERMS";
  }
  EXPECT_EQ(statusOf([] {
              const std::byte* const from = onePage();
              LiveReader reader;
              for (const int signal : {SIGSEGV, SIGBUS}) {
                struct sigaction ours {};
                ::sigaction(signal, nullptr, &ours);
                setHandler(signal, [](int, siginfo_t*, void*) { ::_exit(2); });
                if (isGuarded() || reader.read(from, kPage) == nullptr ||
                    reader.read(from, kPage + 1) != nullptr) {
                  ::_exit(3);
                }
                ::sigaction(signal, &ours, nullptr);
                sigset_t one;
                ::sigemptyset(&one);
                ::sigaddset(&one, signal);
                ::pthread_sigmask(SIG_BLOCK, &one, nullptr);
                if (isGuarded() || reader.read(from, kPage) == nullptr ||
                    reader.read(from, kPage + 1) != nullptr) {
                  ::_exit(4);
                }
                ::pthread_sigmask(SIG_UNBLOCK, &one, nullptr);
                if (!isGuarded()) {
                  ::_exit(5);
                }
              }
            }),
            0);
}

// A sanitizer's handler stands before reft's: it ends the process in its own way.
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
TEST(GuardedCopy, OtherFaultsEndTheProcessAsBefore) {
  isGuarded();  // sets the handlers
  for (const int signal : {SIGSEGV, SIGBUS}) {
    const int sent = statusOf([signal] { ::kill(::getpid(), signal); });
    ASSERT_TRUE(WIFSIGNALED(sent));
    EXPECT_EQ(WTERMSIG(sent), signal);
  }
  const int faulted = statusOf(fault);
  ASSERT_TRUE(WIFSIGNALED(faulted));
  EXPECT_EQ(WTERMSIG(faulted), SIGSEGV);
}
#endif

#endif

}  // namespace guarded_copy_test
}  // namespace reft

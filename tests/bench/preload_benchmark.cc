// What a hook of the preloaded library adds to a launch: a function that returns at once, called as
// it is and through its hook, in turns. Started by tests/bench/preload.py, preloaded.
//
//     preload_benchmark LIBRARY BLOCKS    prints a line "direct hooked" for each block: ns a call
#include <dlfcn.h>
#include <time.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>

namespace {

using Launch = int (*)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                       void*, void**, void**);
constexpr int kCalls = 2'000;  // a block: shorter than a turn of the scheduler

double nsOf(Launch launch) {
  timespec begin{}, end{};
  ::clock_gettime(CLOCK_MONOTONIC, &begin);
  for (int i = 0; i < kCalls; ++i) {
    if (launch(nullptr, 1, 1, 1, 1, 1, 1, 0, nullptr, nullptr, nullptr) != 0) {
      std::abort();
    }
  }
  ::clock_gettime(CLOCK_MONOTONIC, &end);
  return (static_cast<double>(end.tv_sec - begin.tv_sec) * 1e9 +
          static_cast<double>(end.tv_nsec - begin.tv_nsec)) /
         kCalls;
}

}  // namespace

int main(int count, char** words) {
  void* const library = count == 3 ? ::dlopen(words[1], RTLD_NOW) : nullptr;
  if (library == nullptr) {
    std::fprintf(stderr, "%s\n",
                 count == 3 ? ::dlerror() : "usage: preload_benchmark LIBRARY BLOCKS");
    return 2;
  }
  const auto direct = reinterpret_cast<Launch>(::dlsym(library, "launch_without_hook"));
  const auto hooked = reinterpret_cast<Launch>(::dlsym(library, "cuLaunchKernel"));
  if (direct == nullptr || hooked == nullptr || direct == hooked) {
    std::fprintf(stderr, "cuLaunchKernel has no hook: is the library preloaded?\n");
    return 1;
  }
  for (int block = std::atoi(words[2]); block > 0; --block) {
    const bool first = block % 2 == 0;
    const double a = nsOf(first ? direct : hooked);
    const double b = nsOf(first ? hooked : direct);
    std::printf("%.3f %.3f\n", first ? a : b, first ? b : a);
  }
  return 0;
}

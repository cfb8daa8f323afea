// Tests of the preloaded library run preloaded: a process without it starts itself again with it,
// and with the stand-in's driver where programs look for libcuda.so.1.
#include <dlfcn.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <string>

int main(int count, char** words) {
  if (::dlsym(RTLD_DEFAULT, "reft_device_activity") == nullptr) {
    if (std::getenv("PRELOAD_TEST_STARTED") != nullptr) {
      std::fprintf(stderr, "the loader has not preloaded %s\n", REFT_PRELOAD_LIBRARY);
      return 1;
    }
    ::setenv("PRELOAD_TEST_STARTED", "1", 1);
    const char* const others = std::getenv("LD_PRELOAD");
    const std::string library = REFT_PRELOAD_LIBRARY;
    ::setenv("LD_PRELOAD", (others == nullptr ? library : library + ":" + others).c_str(), 1);
    ::setenv("LD_LIBRARY_PATH", REFT_FAKE_CUDA_FOLDER, 1);
    ::execv("/proc/self/exe", words);
    std::perror("execv");
    return 1;
  }
  ::testing::InitGoogleTest(&count, words);
  return RUN_ALL_TESTS();
}

// Which function a program gets when it looks one up, and that everything else is as without the
// library.
#include <sys/stat.h>

#include <array>
#include <cerrno>
#include <filesystem>
#include <memory>
#include <set>
#include <vector>

#include "tests/unit/preload/support.h"

namespace reft::preload_test {
namespace {

constexpr int kInvalidValue = 1;
constexpr int kInvalidContext = 201;
constexpr int kNotFound = 500;

using GetProcAddress = int (*)(const char*, void**, int, uint64_t, int*);

GetProcAddress getProcAddress() {
  return staticRuntime("libruntime_a.so", StaticRuntime::kLegacy).getProcAddress;
}

void* ofVersion(const char* name, int version, uint64_t flags = StaticRuntime::kLegacy) {
  void* function = nullptr;
  int found = -1;
  return getProcAddress()(name, &function, version, flags, &found) == 0 ? function : nullptr;
}

// The library that a function is in.
const char* fileOf(void* function) {
  Dl_info info;
  return ::dladdr(function, &info) == 0 ? "" : info.dli_fname;
}

TEST(Lookup, FindsNothingWhereThereIsNoDriver) {
  EXPECT_TRUE(holdsInChild([] {
    void* const program = ::dlopen(nullptr, RTLD_LAZY);
    for (const char* name : {"cuLaunchKernel", "cuGetProcAddress_v2", "cuMemcpyAsync_ptsz"}) {
      EXPECT_EQ(::dlsym(RTLD_DEFAULT, name), nullptr) << name;
      EXPECT_NE(::dlerror(), nullptr);
      EXPECT_EQ(::dlsym(program, name), nullptr) << name;
    }
    EXPECT_EQ(readDeviceActivity().state, DeviceActivity::kInert);
  }));
}

TEST(Lookup, FindsWhatWasLoadedForAll) {
  EXPECT_TRUE(holdsInChild([] {
    ASSERT_NE(::dlopen("libcuda.so.1", RTLD_LAZY | RTLD_GLOBAL), nullptr);
    void* const found = ::dlsym(RTLD_DEFAULT, "cuGraphLaunch");
    EXPECT_NE(found, nullptr);
    EXPECT_EQ(::dlerror(), nullptr);
    EXPECT_EQ(found, ::dlsym(::dlopen(nullptr, RTLD_LAZY), "cuGraphLaunch"));
    EXPECT_EQ(found, ::dlsym(::dlopen("libcuda.so.1", RTLD_LAZY), "cuGraphLaunch"));
  }));
}

TEST(Lookup, EachCopyOfTheRuntimeIsSeen) {
  void* const work = kernel("copies");
  for (const char* library : {"libruntime_a.so", "libruntime_b.so", "libruntime_c.so"}) {
    for (const uint64_t flags : {StaticRuntime::kLegacy, StaticRuntime::kPerThread}) {
      const StaticRuntime& runtime = staticRuntime(library, flags);
      ASSERT_STREQ(runtime.problem, "");
      const Counted counted;
      EXPECT_EQ(runtime.launch(work), 0);
      EXPECT_EQ(runtime.launch(work), 0);
      EXPECT_EQ(runtime.streamSynchronize(nullptr), 0);
      EXPECT_EQ(counted(CallKind::kLaunch), 2u) << library;
      EXPECT_EQ(counted(CallKind::kStreamSync), 1u);
      EXPECT_EQ(counted.all(), 3u);
    }
  }
  EXPECT_NE(reinterpret_cast<void*>(
                staticRuntime("libruntime_a.so", StaticRuntime::kLegacy).launchKernel),
            reinterpret_cast<void*>(
                staticRuntime("libruntime_a.so", StaticRuntime::kPerThread).launchKernel));
}

TEST(Lookup, VersionsDoNotMix) {
  // The first ABI had addresses of 32 bits: nothing but the real function may be called by it.
  const Counted counted;
  void* const oldest = ofVersion("cuMemcpyHtoDAsync", 2000);
  EXPECT_NE(std::string(fileOf(oldest)).find("libcuda"), std::string::npos);
  EXPECT_EQ(counted.unhooked(), 1u);
  EXPECT_EQ(oldest, ::dlsym(::dlopen("libcuda.so.1", RTLD_LAZY), "cuMemcpyHtoDAsync"));
  EXPECT_NE(oldest, ofVersion("cuMemcpyHtoDAsync", 3020));
  EXPECT_EQ(ofVersion("cuMemcpyHtoDAsync", 3020), ofVersion("cuMemcpyHtoDAsync", 12000));

  const auto without_context = reinterpret_cast<int (*)()>(ofVersion("cuCtxSynchronize", 12000));
  const auto with_context = reinterpret_cast<int (*)(void*)>(ofVersion("cuCtxSynchronize", 13000));
  kernel("context");
  EXPECT_EQ(without_context(), 0);
  EXPECT_EQ(with_context(nullptr), kInvalidContext);
  cuda::Context context = nullptr;
  FakeCuda::instance().api.ctxGetCurrent(&context);
  EXPECT_EQ(with_context(context), 0);
  EXPECT_EQ(counted(CallKind::kContextSync), 3u);
}

TEST(Lookup, KnowsTheAbiOfAnAddressByItsVersion) {
  const auto thunks =
      find<void (*)(int)>(::dlopen("libcuda.so.1", RTLD_LAZY), "fake_cuda_set_thunks");
  void* const plain = ofVersion("cuLaunchKernel", 4000);
  thunks(1);
  void* const thunk = ofVersion("cuLaunchKernel", 4000);
  const Counted counted;
  void* const future = ofVersion("cuLaunchKernel", 20000);  // may have another ABI
  EXPECT_EQ(counted.unhooked(), 1u);
  thunks(0);
  EXPECT_NE(thunk, plain);
  EXPECT_NE(std::string(fileOf(thunk)).find("libreft_preload"), std::string::npos);
  EXPECT_NE(std::string(fileOf(future)).find("libcuda"), std::string::npos);
  const auto launch = reinterpret_cast<decltype(StaticRuntime::launchKernel)>(thunk);
  EXPECT_EQ(launch(kernel("thunk"), 1, 1, 1, 1, 1, 1, 0, nullptr, nullptr, nullptr), 0);
  EXPECT_EQ(counted(CallKind::kLaunch), 1u);
  const auto unseen = reinterpret_cast<decltype(StaticRuntime::launchKernel)>(future);
  EXPECT_EQ(unseen(kernel("future"), 1, 1, 1, 1, 1, 1, 0, nullptr, nullptr, nullptr), 0);
  EXPECT_EQ(counted(CallKind::kLaunch), 1u);
  // An export is known whatever version asks for it.
  EXPECT_EQ(ofVersion("cuLaunchKernel", 20000), plain);
}

TEST(Lookup, ALookupThatLooksItselfUpStaysObserved) {
  const auto again = reinterpret_cast<GetProcAddress>(ofVersion("cuGetProcAddress", 12000));
  ASSERT_NE(again, nullptr);
  void* function = nullptr;
  ASSERT_EQ(again("cuStreamSynchronize", &function, 2000, StaticRuntime::kLegacy, nullptr), 0);
  EXPECT_EQ(function, ofVersion("cuStreamSynchronize", 2000));
  const auto first = reinterpret_cast<int (*)(const char*, void**, int, uint64_t)>(
      ofVersion("cuGetProcAddress", 11030));
  ASSERT_NE(first, nullptr);
  void* same = nullptr;
  ASSERT_EQ(first("cuStreamSynchronize", &same, 2000, StaticRuntime::kLegacy), 0);
  EXPECT_EQ(same, function);
}

TEST(Lookup, ErrorsAreThoseOfTheDriver) {
  void* function = &function;
  int found = -1;
  EXPECT_EQ(getProcAddress()("cuNoSuchThing", &function, 13000, 1, &found), kNotFound);
  EXPECT_EQ(function, nullptr);
  EXPECT_EQ(found, 1);
  EXPECT_EQ(getProcAddress()("cuLaunchKernelEx", &function, 11000, 1, &found), kNotFound);
  EXPECT_EQ(found, 2);  // too new for the version
  EXPECT_EQ(getProcAddress()(nullptr, &function, 13000, 1, &found), kInvalidValue);
  EXPECT_EQ(getProcAddress()("cuLaunchKernel", nullptr, 13000, 1, &found), kInvalidValue);
  EXPECT_EQ(::dlsym(::dlopen("libcuda.so.1", RTLD_LAZY), "cuNoSuchThing"), nullptr);
  EXPECT_NE(std::string(::dlerror()).find("cuNoSuchThing"), std::string::npos);
  // In the table of hooks, but not in this driver.
  EXPECT_EQ(::dlsym(::dlopen("libcuda.so.1", RTLD_LAZY), "cuMemcpyPeerAsync_ptsz"), nullptr);
  EXPECT_NE(std::string(::dlerror()).find("cuMemcpyPeerAsync_ptsz"), std::string::npos);
  errno = E2BIG;
  EXPECT_NE(::dlsym(::dlopen("libcuda.so.1", RTLD_LAZY), "cuLaunchKernel"), nullptr);
  EXPECT_EQ(::dlerror(), nullptr);
}

TEST(Lookup, NextIsTheNextOneOfTheCaller) {
  EXPECT_EQ(find<int (*)()>(RTLD_DEFAULT, "next_number")(), 12);
  EXPECT_EQ(find<int (*)()>(RTLD_DEFAULT, "next_number_of_version")(), 12);
}

TEST(Lookup, DefaultIsThatOfTheCaller) {
  void* const library = openHelper("liblocal_names.so");
  const auto ask = find<void* (*)(const char*)>(library, "local_default");
  EXPECT_EQ(ask("local_name"), ::dlsym(library, "local_name"));
  EXPECT_EQ(::dlsym(RTLD_DEFAULT, "local_name"), nullptr);
  // Not for who has not brought libcuda along.
  FakeCuda::instance();
  EXPECT_EQ(ask("cuLaunchKernel"), nullptr);
}

TEST(Lookup, LinkedCallsAreSeen) {
  void* const library = openHelper("liblinked_user.so");
  const Counted counted;
  EXPECT_EQ(find<int (*)(void*)>(library, "linked_launch")(kernel("linked")), 0);
  EXPECT_EQ(counted(CallKind::kLaunch), 1u);

  void* const launch = find<void* (*)(const char*)>(library, "linked_default")("cuLaunchKernel");
  ASSERT_NE(launch, nullptr);
  EXPECT_EQ(::dlerror(), nullptr);
  EXPECT_EQ(reinterpret_cast<decltype(StaticRuntime::launchKernel)>(launch)(
                kernel("linked"), 1, 1, 1, 1, 1, 1, 0, nullptr, nullptr, nullptr),
            0);
  EXPECT_EQ(counted(CallKind::kLaunch), 2u);

  void* function = nullptr;
  ASSERT_EQ(find<int (*)(const char*, void**)>(library, "linked_lookup")("cuStreamSynchronize",
                                                                         &function),
            0);
  EXPECT_EQ(reinterpret_cast<int (*)(void*)>(function)(nullptr), 0);
  EXPECT_EQ(counted(CallKind::kStreamSync), 1u);
}

TEST(Lookup, VersionedLookupsAreSeen) {
  void* const library = openHelper("libversioned.so");
  void* const found = ::dlvsym(library, "cuGraphLaunch", "VERSIONED_1");
  ASSERT_NE(found, nullptr);
  EXPECT_EQ(found, ::dlsym(library, "cuGraphLaunch"));
  *find<int*>(library, "shim_result") = 11;
  const Counted counted;
  EXPECT_EQ(reinterpret_cast<int (*)(void*, void*)>(found)(nullptr, nullptr), 11);
  EXPECT_EQ(counted(CallKind::kGraphLaunch), 1u);
  EXPECT_EQ(::dlvsym(library, "cuGraphLaunch", "VERSIONED_2"), nullptr);
  EXPECT_NE(::dlerror(), nullptr);
  // Of a library that has versions, each is a function of its own; one that it lacks is none.
  void* const libc = ::dlopen("libc.so.6", RTLD_LAZY);
  EXPECT_EQ(::dlvsym(libc, "memcpy", "GLIBC_2.14"), ::dlsym(libc, "memcpy"));
  EXPECT_EQ(::dlvsym(libc, "memcpy", "GLIBC_0.1"), nullptr);
}

TEST(Lookup, ALauncherThatOpensTheDriverIsSeen) {
  void* const driver = ::dlopen("libcuda.so.1", RTLD_LAZY);
  const auto launch = find<decltype(StaticRuntime::launchKernelEx)>(driver, "cuLaunchKernelEx");
  struct {
    unsigned grid[3] = {1, 1, 1}, block[3] = {1, 1, 1}, shared_bytes = 0;
    void* stream = nullptr;
    void* attributes = nullptr;
    unsigned attribute_count = 0;
  } configuration;
  const Counted counted;
  EXPECT_EQ(launch(&configuration, kernel("triton_kernel_0d1d"), nullptr, nullptr), 0);
  EXPECT_EQ(counted(CallKind::kLaunch), 1u);
  const auto newest = readDeviceActivity().launch;
  ASSERT_TRUE(newest);
  EXPECT_STREQ(nameOf(newest->call), "cuLaunchKernelEx");
  EXPECT_EQ(nameOfKernel(*newest), "triton_kernel_0d1d");
}

TEST(Lookup, EachFunctionOfANameKeepsItsResult) {
  // More than there are hooks, so in a child: what they use up is gone for the process.
  EXPECT_TRUE(holdsInChild([] {
    const std::filesystem::path from = std::string(REFT_PRELOAD_HELPERS) + "/libshim.so";
    std::vector<int (*)(void*, void*)> launches;
    const Counted counted;
    for (int i = 0; i < 6; ++i) {
      const std::filesystem::path copy =
          std::filesystem::path(::testing::TempDir()) /
          ("shim-" + std::to_string(::getpid()) + "-" + std::to_string(i));
      std::filesystem::copy_file(from, copy);
      void* const library = openLibrary(copy);
      std::filesystem::remove(copy);
      *find<int*>(library, "shim_result") = 100 + i;
      launches.push_back(find<int (*)(void*, void*)>(library, "cuGraphLaunch"));
    }
    for (int i = 0; i < 6; ++i) {
      EXPECT_EQ(launches[static_cast<size_t>(i)](nullptr, nullptr), 100 + i);
    }
    EXPECT_EQ(counted(CallKind::kGraphLaunch) + counted.unhooked(), 6u);
    EXPECT_GE(counted.unhooked(), 2u);
  }));
}

TEST(Lookup, ALibraryMayBeClosedAndOpenedAgain) {
  void* const work = kernel("again");
  const Counted counted;
  for (int i = 0; i < 3; ++i) {
    void* const library = openHelper("libruntime_c.so");
    EXPECT_EQ(find<StartRuntime>(library, "static_runtime")(StaticRuntime::kLegacy)->launch(work),
              0);
    ::dlclose(library);
  }
  EXPECT_EQ(counted(CallKind::kLaunch), 3u);
}

}  // namespace
}  // namespace reft::preload_test

#include "intercept/nccl_profiler/plugin.h"

#include <dlfcn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <string>

#include <gtest/gtest.h>

#include "intercept/nccl_profiler/abi.h"

namespace reft {
namespace plugin_test {

using nccl_abi::EventV5;
using nccl_abi::ProfilerV4;
using nccl_abi::ProfilerV5;

// As NCCL finds it. The plugin is armed once in a process, so each test runs in a child.
const void* symbolOf(const char* name) {
  const char* const path = std::getenv("NCCL_PROFILER_PLUGIN");
  void* const library = ::dlopen(path, RTLD_NOW | RTLD_LOCAL);
  return library != nullptr ? ::dlsym(library, name) : nullptr;
}

template <typename Body>
int inChild(Body body) {
  const pid_t child = ::fork();
  if (child == 0) {
    ::_exit(body() ? 0 : 1);
  }
  int status = -1;
  ::waitpid(child, &status, 0);
  return status;
}

bool armed() {
  ::unsetenv("NCCL_PROFILER_PLUGIN");
  return armNcclProfiler(false) == NcclArming::kArmed;
}

TEST(NcclPlugin, NcclFindsItInTheLibraryThatIsLoaded) {
  EXPECT_EQ(inChild([] {
              if (!armed()) {
                return false;
              }
              void* const loaded = ::dlopen(std::getenv("NCCL_PROFILER_PLUGIN"),
                                            RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);
              return loaded != nullptr && symbolOf("ncclProfiler_v6") != nullptr;
            }),
            0);
}

TEST(NcclPlugin, EventsOfVersion5And6EndInTheTableOfThisProcess) {
  for (const char* const name : {"ncclProfiler_v5", "ncclProfiler_v6"}) {
    EXPECT_EQ(inChild([&] {
                const auto* const plugin =
                    armed() ? static_cast<const ProfilerV5*>(symbolOf(name)) : nullptr;
                void* context = nullptr;
                void* handle = nullptr;
                int mask = -1;
                EventV5 event{};
                event.type = nccl_abi::kColl;
                event.coll.func = "AllReduce";
                event.coll.seq = 12;
                const bool succeeded =
                    plugin != nullptr && std::string(plugin->name) == "reft" &&
                    plugin->init(&context, 42, &mask, "dp", 2, 16, 3, nullptr) == 0 &&
                    plugin->start(context, &handle, &event) == 0 && handle != nullptr &&
                    plugin->stop(handle) == 0;
                const NcclProgress progress = ncclProgressTable()->snapshot();
                return succeeded && mask == 0x1e && progress.comms.at(0).hash == 42 &&
                       progress.comms[0].rank == 3 && progress.comms[0].ranks == 16 &&
                       progress.comms[0].nodes == 2 && progress.comms[0].tasks.at(0).seq == 12 &&
                       progress.comms[0].tasks[0].launched && plugin->finalize(context) == 0 &&
                       ncclProgressTable()->snapshot().comms.empty();
              }),
              0)
        << name;
  }
}

TEST(NcclPlugin, OfVersion4sTypeOneByteCounts) {
  EXPECT_EQ(inChild([] {
              const auto* const plugin =
                  armed() ? static_cast<const ProfilerV4*>(symbolOf("ncclProfiler_v4")) : nullptr;
              void* context = nullptr;
              void* handle = nullptr;
              int mask = -1;
              EventV5 event{};
              event.type = 0xabcdef00 | nccl_abi::kP2p;
              event.p2p.func = "Send";
              event.p2p.peer = 5;
              plugin->init(&context, &mask, nullptr, 43, 2, 16, 4, nullptr);
              plugin->start(context, &handle, &event);
              const NcclProgress progress = ncclProgressTable()->snapshot();
              return mask == 0x1e && progress.comms.at(0).hash == 43 &&
                     progress.comms[0].rank == 4 && progress.comms[0].name.empty() &&
                     progress.comms[0].tasks.at(0).peer == 5;
            }),
            0);
}

TEST(NcclPlugin, AsksForNothingUnlessThisProcessHasArmedIt) {
  EXPECT_EQ(inChild([] {
              Dl_info info{};
              ::dladdr(reinterpret_cast<const void*>(&ncclProgressTable), &info);
              ::setenv("NCCL_PROFILER_PLUGIN", info.dli_fname, 1);
              const auto* const plugin =
                  static_cast<const ProfilerV5*>(symbolOf("ncclProfiler_v5"));
              void* context = &info;
              void* handle = &info;
              int mask = -1;
              EventV5 event{};
              event.type = nccl_abi::kColl;
              return plugin->init(&context, 1, &mask, "", 1, 1, 0, nullptr) == 0 && mask == 0 &&
                     context == nullptr && plugin->start(context, &handle, &event) == 0 &&
                     handle == nullptr && ncclProgressTable() == nullptr;
            }),
            0);
}

TEST(NcclPlugin, AForkedChildIsNotArmed) {
  EXPECT_EQ(inChild([] {
              if (!armed()) {
                return false;
              }
              return inChild([] {
                       const auto* const plugin =
                           static_cast<const ProfilerV5*>(symbolOf("ncclProfiler_v5"));
                       void* context = nullptr;
                       int mask = -1;
                       plugin->init(&context, 1, &mask, "", 1, 1, 0, nullptr);
                       return mask == 0 && context == nullptr;
                     }) == 0;
            }),
            0);
}

TEST(NcclPlugin, AnotherPluginKeepsItsPlace) {
  EXPECT_EQ(inChild([] {
              ::setenv("NCCL_PROFILER_PLUGIN", "inspector", 1);
              return armNcclProfiler(false) == NcclArming::kTaken &&
                     std::string(std::getenv("NCCL_PROFILER_PLUGIN")) == "inspector" &&
                     ncclProgressTable() == nullptr;
            }),
            0);
}

TEST(NcclPlugin, NullPointersAreHarmless) {
  EXPECT_EQ(inChild([] {
              const auto* const plugin =
                  armed() ? static_cast<const ProfilerV5*>(symbolOf("ncclProfiler_v5")) : nullptr;
              void* context = nullptr;
              int mask = 0;
              plugin->init(nullptr, 1, &mask, nullptr, 1, 1, 0, nullptr);
              plugin->init(&context, 1, nullptr, nullptr, 1, 1, 0, nullptr);
              plugin->init(&context, 1, &mask, nullptr, 1, 1, 0, nullptr);
              EventV5 event{};
              void* handle = nullptr;
              plugin->start(context, nullptr, &event);
              plugin->start(context, &handle, nullptr);
              event.type = nccl_abi::kColl;  // all its texts are null
              plugin->start(context, &handle, &event);
              plugin->stop(nullptr);
              plugin->record(nullptr, 9, nullptr);
              plugin->record(handle, 9, nullptr);
              plugin->finalize(nullptr);
              return handle != nullptr && ncclProgressTable()->snapshot().counts.tasks == 1;
            }),
            0);
}

}  // namespace plugin_test
}  // namespace reft

// NVIDIA's runtimes over the stand-in's driver. They refuse it in the end, since it lacks what only
// they and the driver know of; before that, they look up everything that they need.
#include "tests/unit/preload/support.h"

namespace reft::preload_test {
namespace {

// Functions that FakeCuda and the runtime look up together, of those in driver_calls.h: legacy ones
// and twins. FakeCuda alone looks up nine.
constexpr uint64_t kFewest = 24;

void expectLookups(int (*start)()) {
  const FakeCuda& cuda = FakeCuda::instance();
  const DeviceActivity before = readDeviceActivity();
  const uint64_t lookups = cuda.calls("cuGetProcAddress_v2");
  EXPECT_NE(start(), 0);
  EXPECT_GE(cuda.calls("cuGetProcAddress_v2") - lookups, 400u);
  EXPECT_EQ(readDeviceActivity().state, DeviceActivity::kArmed);
  EXPECT_GE(readDeviceActivity().hooked, kFewest);
  EXPECT_EQ(readDeviceActivity().unhooked, before.unhooked);
}

TEST(RealRuntime, LinkedStaticallyLooksUpThroughTheHooks) {
  expectLookups(find<int (*)()>(openHelper("libreal_runtime.so"), "real_runtime_start"));
}

TEST(RealRuntime, LoadedLooksUpThroughTheHooks) {
  const auto free = find<int (*)(void*)>(openLibrary(REFT_REAL_CUDART), "cudaFree");
  static const auto once = free;
  expectLookups([] { return once(nullptr); });
}

}  // namespace
}  // namespace reft::preload_test

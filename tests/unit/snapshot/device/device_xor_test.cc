#include "snapshot/device/device_xor.h"

#include <gtest/gtest.h>

#include <array>
#include <deque>
#include <vector>

#include "tests/fakes/cuda/driver.h"

namespace reft {
namespace {

// A table of its own for each test: what was tried is remembered by table and device.
class DeviceXorTest : public testing::Test {
 protected:
  void SetUp() override { fake_.heal(); }
  void TearDown() override { fake_.heal(); }

  std::string hindrance(std::vector<int> devices) { return DeviceXor::hindrance(*api_, devices); }

  const FakeCuda& fake_ = FakeCuda::instance();
  const CudaApi* const api_ = &tables().emplace_back(fake_.api);

 private:
  // They live on: the address of one is what is remembered.
  static std::deque<CudaApi>& tables() {
    static std::deque<CudaApi> all;
    return all;
  }
};

TEST_F(DeviceXorTest, StateOnTheHostNeedsNoDevice) {
  const CudaApi none;
  EXPECT_EQ(DeviceXor::hindrance(none, std::array{-1, -1}), "");
  EXPECT_EQ(hindrance({}), "");
}

TEST_F(DeviceXorTest, StateOnOneDeviceIsAddedUpThereAndWithWhatIsOnTheHost) {
  EXPECT_EQ(hindrance({1, -1, 1}), "");
  EXPECT_EQ(hindrance({0, 2, 0}), "this rank has state on CUDA devices 0 and 2");
}

TEST_F(DeviceXorTest, ADeviceIsTriedOnce) {
  EXPECT_EQ(hindrance({0}), "");
  const uint64_t before = fake_.calls("cuModuleLoadData");
  EXPECT_EQ(hindrance({0}), "");
  EXPECT_EQ(fake_.calls("cuModuleLoadData"), before);
  EXPECT_EQ(hindrance({1}), "");
  EXPECT_EQ(fake_.calls("cuModuleLoadData"), before + 1);
}

TEST_F(DeviceXorTest, ADriverThatCannotCompileTheKernelIsAReasonForGood) {
  fake_.fail("cuModuleLoadData", 1, 222, 0);
  EXPECT_EQ(hindrance({0}).find("CUDA device 0: cuModuleLoadData: "), 0u) << hindrance({0});
  EXPECT_NE(hindrance({0}).find("(222)"), std::string::npos);
  EXPECT_EQ(hindrance({1}), "");
}

TEST_F(DeviceXorTest, NoMemoryForTheSumIsAReasonAndGivesBackTheRest) {
  fake_.fail("cuMemAlloc_v2", 1, cuda::kOutOfMemory, 0);
  const uint64_t unloaded = fake_.calls("cuModuleUnload");
  EXPECT_NE(hindrance({0}).find("cuMemAlloc: "), std::string::npos);
  EXPECT_EQ(fake_.calls("cuModuleUnload"), unloaded + 1);
}

// The table is this process's, as `launch` has no other way to find what to spoil.
cuda::Result (*launch_right)(cuda::Function, unsigned, unsigned, unsigned, unsigned, unsigned,
                             unsigned, unsigned, cuda::Stream, void**, void**) = nullptr;

TEST_F(DeviceXorTest, AKernelThatComputesOtherSumsThanTheHostIsNotUsed) {
  CudaApi& wrong = const_cast<CudaApi&>(*api_);
  launch_right = fake_.api.launchKernel;
  wrong.launchKernel = [](cuda::Function function, unsigned x, unsigned y, unsigned z, unsigned a,
                          unsigned b, unsigned c, unsigned shared, cuda::Stream stream,
                          void** arguments, void** extra) {
    uint64_t& bytes = *static_cast<uint64_t*>(arguments[2]);
    bytes -= bytes > 16 ? 16 : 0;  // the last line is left out
    return launch_right(function, x, y, z, a, b, c, shared, stream, arguments, extra);
  };
  EXPECT_EQ(hindrance({0}), "CUDA device 0: its XOR of a few bytes differs from the host's");
}

TEST_F(DeviceXorTest, AFailedLaunchIsAReason) {
  fake_.fail("cuLaunchKernel", 2, 719, 0);
  EXPECT_NE(hindrance({0}).find("XOR of a few bytes: "), std::string::npos) << hindrance({0});
}

}  // namespace
}  // namespace reft

#include "hang_detect/health/network_reader.h"

#include <filesystem>
#include <fstream>

#include <unistd.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace reft {
namespace network_reader_test {

namespace fs = std::filesystem;
using ::testing::IsEmpty;
using ::testing::SizeIs;

// A tree like /sys.
class NetworkReader : public ::testing::Test {
 protected:
  NetworkReader()
      : root(fs::path(::testing::TempDir()) / ("reft_sys_" + std::to_string(::getpid()))) {
    fs::remove_all(root);
    fs::create_directories(root);
  }
  ~NetworkReader() override { fs::remove_all(root); }

  void write(const fs::path& path, const std::string& text) {
    fs::create_directories((root / path).parent_path());
    std::ofstream(root / path) << text;
  }
  void addNic(const std::string& name, bool hardware) {
    const fs::path folder = fs::path("class/net") / name;
    write(folder / "operstate", "up\n");
    write(folder / "carrier_down_count", "3\n");
    write(folder / "statistics/rx_errors", "4120\n");
    write(folder / "statistics/rx_bytes", "9\n");
    write(folder / "statistics/tx_errors", "many\n");
    if (hardware) {
      fs::create_directories(root / folder / "device");
    }
  }

  fs::path root;
};

TEST_F(NetworkReader, FindsNothingWhereThereIsNothing) {
  EXPECT_THAT(readNetwork(root), IsEmpty());
  EXPECT_THAT(readNetwork("/nonexistent"), IsEmpty());
}

TEST_F(NetworkReader, ReadsCardsAndLeavesOutVirtualDevices) {
  addNic("eth0", true);
  addNic("lo", false);
  addNic("docker0", false);
  const auto found = readNetwork(root);
  ASSERT_THAT(found, SizeIs(1));
  EXPECT_EQ(found[0].device, "eth0");
  EXPECT_EQ(found[0].state, "up");
  EXPECT_FALSE(found[0].infiniband);
  EXPECT_EQ(found[0].counters, (HardwareCounters{{"carrier_down_count", 3}, {"rx_errors", 4120}}));
}

TEST_F(NetworkReader, TakesTheDevicesOfAContainer) {
  addNic("eth0", false);
  addNic("lo", false);
  ASSERT_THAT(readNetwork(root), SizeIs(1));
  EXPECT_EQ(readNetwork(root)[0].device, "eth0");
}

TEST_F(NetworkReader, ReadsPortsOfInfiniband) {
  const fs::path port = "class/infiniband/mlx5_0/ports/1";
  write(port / "state", "4: ACTIVE\n");
  write(port / "counters/link_downed", "2\n");
  write(port / "counters/symbol_error", "18446744073709551615\n");
  write(port / "counters/port_rcv_errors", "18446744073709551616\n");
  write(port / "hw_counters/packet_seq_err", "11\n");
  const auto found = readNetwork(root);
  ASSERT_THAT(found, SizeIs(1));
  EXPECT_EQ(found[0].device, "mlx5_0 port 1");
  EXPECT_TRUE(found[0].infiniband);
  EXPECT_EQ(found[0].state, "active");
  EXPECT_EQ(
      found[0].counters,
      (HardwareCounters{{"link_downed", 2}, {"packet_seq_err", 11}, {"symbol_error", UINT64_MAX}}));
}

TEST_F(NetworkReader, IsBounded) {
  for (int i = 0; i < 200; ++i) {
    addNic("eth" + std::to_string(i), true);
    write("class/infiniband/mlx5_" + std::to_string(i) + "/ports/1/state", "1: DOWN\n");
  }
  EXPECT_THAT(readNetwork(root), SizeIs(kMaxNetworkDevices));
}

}  // namespace network_reader_test
}  // namespace reft

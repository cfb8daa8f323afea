#include "snapshot/state/agreement.h"

#include <gtest/gtest.h>

#include <functional>

namespace reft {
namespace agreement_test {

SnapshotTable tableOf(int rank, const std::vector<int>& members, int own_regions = 0) {
  std::vector<RegionInfo> regions;
  for (int i = 0; i < own_regions; ++i) {
    regions.push_back({"own", "float32", {2}, 8, 4, -1, false});
  }
  regions.push_back({"o0.p0", "float32", {4, 2}, 32, 8, 0, false});
  regions.push_back({"o0.p1", "float32", {2}, 8, 4, 0, false});
  return buildTable(rank, 4, std::move(regions), {{"g", members}}, "none", {}, 64);
}

uint64_t part(const SnapshotTable& table, uint64_t digest = 9) {
  return agreementOf(table, groupLayouts(table), std::vector<uint64_t>{digest});
}

TEST(Agreement, PartsOfReplicasAddUpToZero) {
  for (const std::vector<int>& members : {std::vector{0, 1}, {0, 2, 3}, {0, 1, 2, 3}}) {
    uint64_t sum = 0;
    for (const int rank : members) {
      sum += part(tableOf(rank, members, rank));  // private regions are a rank's own affair
    }
    EXPECT_EQ(sum, 0u);
  }
}

TEST(Agreement, AMemberThatHoldsSomethingElseShows) {
  const std::vector<int> members{0, 1, 3};
  const std::vector<std::function<void(SnapshotTable&)>> changes{
      [](SnapshotTable& t) { t.regions[0].name = "o0.p9"; },
      [](SnapshotTable& t) { t.regions[0].dtype = "int32"; },
      [](SnapshotTable& t) {
        t.regions[0].shape = {2, 4};
      },
      [](SnapshotTable& t) { t.regions[0].bytes = 64; },
      [](SnapshotTable& t) { t.regions[0].row_bytes = 32; },
      [](SnapshotTable& t) { t.regions[0].group = -1; },
      [](SnapshotTable& t) { std::swap(t.regions[0], t.regions[1]); },
      [](SnapshotTable& t) { t.groups[0].id = "h"; },
      [](SnapshotTable& t) {
        t.groups[0].ranks = {0, 1};
      },
      [](SnapshotTable& t) { t.protection = "arc"; },
      [](SnapshotTable& t) {
        t.groups[0].sets = {{0, 1}};
      },
      [](SnapshotTable& t) { t.groups.clear(), t.regions.clear(); },
  };
  const uint64_t others = part(tableOf(0, members)) + part(tableOf(3, members));
  EXPECT_EQ(others + part(tableOf(1, members)), 0u);
  for (size_t i = 0; i < changes.size(); ++i) {
    SnapshotTable changed = tableOf(1, members);
    changes[i](changed);
    EXPECT_NE(others + part(changed), 0u) << i;
  }
  EXPECT_NE(others + part(tableOf(1, members), 10), 0u) << "contents";
}

TEST(Agreement, TwoDifferencesDoNotCancel) {
  const std::vector<int> members{0, 1};
  EXPECT_NE(part(tableOf(0, members), 10) + part(tableOf(1, members), 11), 0u);
  EXPECT_EQ(part(tableOf(0, members), 10) + part(tableOf(1, members), 10), 0u);
}

}  // namespace agreement_test
}  // namespace reft

// Jobs that go on with another number of ranks, whole, as threads with real vaults: each rank gets
// the rows of split tensors that are its own now, from whichever vaults have them.
#include <fcntl.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <random>
#include <thread>

#include "intercept/base/error.h"
#include "snapshot/restore/restorer.h"
#include "snapshot/vault/hash.h"
#include "snapshot/vault/writer.h"
#include "tests/contract/transport/in_process_transport.h"

namespace reft {
namespace rows_test {

constexpr uint64_t kChunk = 256;
constexpr int64_t kStep = 7;
constexpr uint64_t kIncarnation = 5;

using Bytes = std::vector<std::byte>;

TEST(RowsOf, AreDealtAsTorchChunkDoes) {
  const auto dealt = [](int64_t rows, int world) {
    std::vector<int64_t> found;
    for (int rank = 0; rank < world; ++rank) {
      const RowRange own = rowsOf(rows, world, rank);
      EXPECT_EQ(own.begin, std::accumulate(found.begin(), found.end(), int64_t{0}));
      found.push_back(own.end - own.begin);
    }
    return found;
  };
  EXPECT_EQ(dealt(7, 4), (std::vector<int64_t>{2, 2, 2, 1}));
  EXPECT_EQ(dealt(6, 4), (std::vector<int64_t>{2, 2, 2, 0}));
  EXPECT_EQ(dealt(5, 4), (std::vector<int64_t>{2, 2, 1, 0}));
  EXPECT_EQ(dealt(2, 4), (std::vector<int64_t>{1, 1, 0, 0}));
  EXPECT_EQ(dealt(8, 4), (std::vector<int64_t>{2, 2, 2, 2}));
  EXPECT_EQ(dealt(3, 1), (std::vector<int64_t>{3}));
  EXPECT_EQ(dealt(0, 2), (std::vector<int64_t>{0, 0}));
}

Bytes randomBytes(uint64_t size, std::mt19937_64& random) {
  Bytes bytes(size);
  for (std::byte& byte : bytes) {
    byte = static_cast<std::byte>(random());
  }
  return bytes;
}

// The rows of a whole tensor that a rank has.
Bytes partOf(const Bytes& whole, const SplitTensor& split, int world, int rank) {
  const RowRange own = rowsOf(split.shape[0], world, rank);
  const auto at = [&](int64_t row) { return row * static_cast<int64_t>(split.row_bytes); };
  return Bytes(whole.begin() + at(own.begin), whole.begin() + at(own.end));
}

RegionInfo regionOf(const SplitTensor& split, int world, int rank) {
  RegionInfo region;
  region.name = split.name;
  region.dtype = split.dtype;
  region.shape = split.shapeOf(world, rank);
  region.bytes = split.bytesOf(world, rank);
  region.row_bytes = split.row_bytes;
  return region;
}

std::vector<int> ranksOf(int world) {
  std::vector<int> ranks(static_cast<size_t>(world));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

std::unique_ptr<Vault> seal(const SnapshotTable& table, const std::vector<Bytes>& contents) {
  auto vault = Vault::create({"job", table.rank, table.world}, 2, 64);
  const std::string json = table.toJson();
  const uint64_t chunks = (table.payload_bytes + kChunk - 1) / kChunk;
  vault->reserveSlot(0, json.size(), 100, chunks, table.payload_bytes);
  vault->beginSlot(0, kStep, kIncarnation, json, hashBytes(json.data(), json.size()), kChunk,
                   table.payload_bytes, chunks);
  vault->putObjects(0, "objects");
  for (const Piece& piece : table.pieces) {
    std::memcpy(vault->payload(0) + piece.payload_offset,
                contents[piece.region].data() + piece.begin, piece.end - piece.begin);
  }
  for (uint64_t i = 0; i < chunks; ++i) {
    vault->chunkHashes(0)[i] = hashBytes(vault->payload(0) + i * kChunk,
                                         std::min(kChunk, table.payload_bytes - i * kChunk));
  }
  vault->sealSlot(0, {}, 1);
  return vault;
}

// What all ranks of a job had together: split tensors, a tensor that they shared, and a buffer of
// each.
struct State {
  std::vector<SplitTensor> splits;
  std::vector<Bytes> wholes;
  Bytes shared;

  explicit State(std::mt19937_64& random) : shared(randomBytes(96, random)) {
    const size_t count = 1 + random() % 4;
    for (size_t i = 0; i < count; ++i) {
      const auto rows = static_cast<int64_t>(1 + random() % 12);
      const int64_t columns = static_cast<int64_t>(1 + random() % 40);
      splits.push_back({"t" + std::to_string(i),
                        "float32",
                        {rows, columns},
                        static_cast<uint64_t>(columns) * 4});
      wholes.push_back(randomBytes(static_cast<uint64_t>(rows) * splits.back().row_bytes, random));
    }
  }
};

struct Job {
  const State& state;
  int world;
  std::vector<SnapshotTable> tables;
  std::vector<std::vector<Bytes>> contents;  // by rank, by region
  std::vector<std::unique_ptr<Vault>> vaults;

  Job(const State& of, int ranks, std::mt19937_64& random) : state(of), world(ranks) {
    for (int rank = 0; rank < world; ++rank) {
      std::vector<RegionInfo> infos;
      std::vector<Bytes> values;
      for (size_t i = 0; i < state.splits.size(); ++i) {
        RegionInfo region = regionOf(state.splits[i], world, rank);
        if (region.bytes > 0) {
          infos.push_back(std::move(region));
          values.push_back(partOf(state.wholes[i], state.splits[i], world, rank));
        }
      }
      infos.push_back({"shared", "uint8", {96}, 96, 1, 0, false});
      values.push_back(state.shared);
      infos.push_back({"buffer", "uint8", {50}, 50, 50, -1, random() % 2 == 0, {}, true});
      values.push_back(randomBytes(50, random));
      tables.push_back(buildTable(rank, world, infos, {{"g", ranksOf(world)}}, "none", {}, kChunk,
                                  state.splits));
      vaults.push_back(seal(tables.back(), values));
      contents.push_back(std::move(values));
    }
  }

  std::vector<VaultSummary> inventory(const std::vector<int>& node_of) const {
    std::vector<VaultSummary> found;
    std::vector<std::string> faults;
    for (int rank = 0; rank < world; ++rank) {
      const VaultReader reader(vaults[static_cast<size_t>(rank)]->fd());
      VaultSummary vault{rank, node_of[static_cast<size_t>(rank)],
                         summarizeVerified(reader, faults)};
      vault.world = world;
      found.push_back(std::move(vault));
    }
    EXPECT_TRUE(faults.empty());
    return parseInventories({inventoryJson(found)});
  }
};

// Dealt to the nodes in turn.
std::vector<int> dealt(int count, int nodes) {
  std::vector<int> node_of;
  for (int i = 0; i < count; ++i) {
    node_of.push_back(i % nodes);
  }
  return node_of;
}

// All ranks of now restore at once, and have their rows, and the rest of their donors.
// `parts`: into so many the rows are dealt now, to the ranks in turn.
void restoreAll(const Job& job, const RestorePlan& plan, const std::vector<int>& vault_nodes,
                bool on_device, int parts) {
  InProcessHub hub;
  const int world = plan.shape.world;
  std::vector<std::thread> threads;
  for (int rank = 0; rank < world; ++rank) {
    threads.emplace_back([&, rank] {
      const auto open = [&](int vault, bool) {
        EXPECT_EQ(vault_nodes.at(static_cast<size_t>(vault)), plan.shape.nodeOf(rank));
        return UniqueFd(
            ::fcntl(job.vaults.at(static_cast<size_t>(vault))->fd(), F_DUPFD_CLOEXEC, 3));
      };
      Restorer restorer(plan, rank, open, 100);
      const auto owner = static_cast<size_t>(plan.ownerFor(rank));
      if (!restorer.hasOwnersVault()) {
        restorer.putTable(job.tables[owner]);
      }
      if (plan.rows_tag > 0) {
        restorer.dealRows(parts);
      }
      std::vector<LiveRegion> live;
      std::vector<Bytes> memory, expected;
      for (size_t i = 0; i < job.state.splits.size(); ++i) {
        const SplitTensor& split = job.state.splits[i];
        if (const int part = rank % parts; split.bytesOf(parts, part) > 0) {
          live.push_back({split.name, split.dtype, split.shapeOf(parts, part),
                          split.bytesOf(parts, part), nullptr});
          expected.push_back(partOf(job.state.wholes[i], split, parts, part));
        }
      }
      live.push_back({"shared", "uint8", {96}, 96, nullptr});
      expected.push_back(job.state.shared);
      live.push_back({"buffer", "uint8", {50}, 50, nullptr});
      expected.push_back(job.contents[owner].back());
      for (const Bytes& bytes : expected) {
        memory.emplace_back(bytes.size());
      }
      for (size_t i = 0; i < live.size() && !on_device; ++i) {
        live[i].memory = memory[i].data();
      }
      EXPECT_EQ(restorer.difference(live), "");
      const auto transport = hub.transport(rank);
      restorer.restore(live, transport.get(),
                       [&](size_t region, uint64_t begin, std::span<const std::byte> bytes) {
                         std::memcpy(memory[region].data() + begin, bytes.data(), bytes.size());
                       });
      EXPECT_EQ(memory, expected) << "rank " << rank << " of " << world << ", " << job.world
                                  << " saved it";
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
}

TEST(Rows, AreThoseOfTheRankWhateverTheNumberOfRanks) {
  std::mt19937_64 random(11);
  for (int round = 0; round < 300; ++round) {
    const State state(random);
    const int then = 1 + static_cast<int>(random() % 7), now = 1 + static_cast<int>(random() % 7);
    const Job job(state, then, random);
    const int nodes = 1 + static_cast<int>(random() % static_cast<unsigned>(std::min(then, now)));
    const std::vector<int> vault_nodes = dealt(then, nodes);
    const RestoreDecision decision =
        planRestore(job.inventory(vault_nodes), JobShape(dealt(now, nodes)));
    ASSERT_TRUE(decision.plan) << then << " to " << now << ": " << decision.rejected.at(0);
    EXPECT_EQ(decision.plan->rows_tag > 0, then != now);
    const bool has_replicas = then != now && now % 2 == 0 && random() % 2 == 0;
    restoreAll(job, *decision.plan, vault_nodes, random() % 2 == 0, has_replicas ? now / 2 : now);
    if (testing::Test::HasFailure()) {
      return;
    }
  }
}

TEST(Rows, ALostRankOrOtherTensorsAreRefused) {
  std::mt19937_64 random(12);
  const State state(random);
  const Job job(state, 4, random);
  const JobShape three(std::vector<int>{0, 0, 0});
  std::vector<VaultSummary> vaults = job.inventory({0, 0, 0, 0});
  vaults[3].slots[0].splits += 1;
  EXPECT_EQ(
      planRestore(vaults, three).rejected.at(0),
      "step 7: 4 ranks saved it, which had rows of different tensors: start 4 ranks to resume "
      "from it");
  vaults = job.inventory({0, 0, 0, 0});
  vaults.pop_back();
  EXPECT_FALSE(planRestore(vaults, three).plan) << "the rows of the last rank are lost";
  for (VaultSummary& vault : vaults) {  // the group's shards are elsewhere
    vault.slots[0].groups.clear();
  }
  EXPECT_FALSE(planRestore(vaults, three).plan);
}

TEST(Rows, OfAnotherShapeAreADifference) {
  std::mt19937_64 random(13);
  const State state(random);
  const Job job(state, 2, random);
  const RestorePlan plan = *planRestore(job.inventory({0, 0}), JobShape(std::vector<int>{0})).plan;
  Restorer restorer(plan, 0, [&](int vault, bool) {
    return UniqueFd(::fcntl(job.vaults.at(static_cast<size_t>(vault))->fd(), F_DUPFD_CLOEXEC, 3));
  });
  const SplitTensor& split = state.splits[0];
  std::vector<LiveRegion> live = {
      {split.name, split.dtype, split.shapeOf(2, 0), split.bytesOf(2, 0), nullptr}};
  EXPECT_NE(restorer.difference(live).find("t0 was float32"), std::string::npos)
      << restorer.difference(live);
}

TEST(Rows, AreDealtIntoEqualPartsOnly) {
  std::mt19937_64 random(14);
  const State state(random);
  const Job job(state, 2, random);
  const JobShape four(std::vector<int>{0, 0, 0, 0});
  const RestorePlan plan = *planRestore(job.inventory({0, 0}), four).plan;
  Restorer restorer(plan, 0, [](int, bool) { return UniqueFd(); });
  EXPECT_THROW(restorer.dealRows(3), InvalidArgument);
  EXPECT_THROW(restorer.dealRows(0), InvalidArgument);
  EXPECT_NO_THROW(restorer.dealRows(2));
}

// Experts of 48 MiB each, and rows whose bytes have no number.
TEST(Rows, MayBeLong) {
  EXPECT_EQ(rowBytes({8, 3072, 4096}, 4), uint64_t{48} << 20);
  EXPECT_EQ(rowBytes({8}, 2), 2u);
  EXPECT_EQ(rowBytes({}, 4), 0u);
  EXPECT_EQ(rowBytes({8, 0}, 4), 0u);
  EXPECT_EQ(rowBytes({8, INT64_MAX, INT64_MAX}, 4), 0u);
  const SplitTensor split{"t", "float32", {8, 3072, 4096}, uint64_t{48} << 20};
  EXPECT_NO_THROW(buildTable(0, 4, {regionOf(split, 4, 0)}, {}, "none", {}, kChunk, {split}));
}

TEST(Rows, ATableWhoseRegionHasOtherRowsIsRefused) {
  const SplitTensor split{"t", "float32", {5, 2}, 8};
  const auto built = [&](int world, int rank, const RegionInfo& region,
                         const std::vector<SplitTensor>& splits) {
    return buildTable(rank, world, {region}, {}, "none", {}, kChunk, splits);
  };
  const RegionInfo right = regionOf(split, 2, 0);
  EXPECT_NO_THROW(built(2, 0, right, {split}));
  const SnapshotTable table = built(2, 0, right, {split});
  EXPECT_EQ(SnapshotTable::fromJson(table.toJson()).splits.at(0).shape, split.shape);
  EXPECT_THROW(built(2, 1, right, {split}), InvalidArgument) << "rank 1 has two rows";
  EXPECT_THROW(built(2, 0, right, {split, split}), InvalidArgument);
  EXPECT_THROW(built(2, 0, right, {{"u", "float32", {5, 2}, 8}}), InvalidArgument);
  EXPECT_THROW(built(2, 0, right, {{"t", "float32", {}, 8}}), InvalidArgument);
  EXPECT_THROW(built(2, 0, right, {{"t", "float32", {-5, 2}, 8}}), InvalidArgument);
  EXPECT_THROW(built(2, 0, right, {{"t", "float32", {5, 2}, uint64_t{1} << 62}}), InvalidArgument);
  EXPECT_THROW(built(2, 0, right, {{"t", "int32", {5, 2}, 8}}), InvalidArgument);
  std::string json = table.toJson();
  json.replace(json.find("[5,2]"), 5, "[6,3]");
  EXPECT_THROW(SnapshotTable::fromJson(json), Corruption) << "rows of another length";
  json = table.toJson();
  json.replace(json.find("[5,2]"), 5, "[7,2]");
  EXPECT_THROW(SnapshotTable::fromJson(json), Corruption);
}

}  // namespace rows_test
}  // namespace reft

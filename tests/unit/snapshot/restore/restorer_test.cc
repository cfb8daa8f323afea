// Whole jobs of ranks as threads with real vaults: what the plan promises is what the restorers
// write.
#include "snapshot/restore/restorer.h"

#include <fcntl.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <random>
#include <thread>

#include "intercept/base/error.h"
#include "snapshot/engine/verify.h"
#include "snapshot/restore/decoding.h"
#include "snapshot/state/parity_cells.h"
#include "snapshot/vault/hash.h"
#include "snapshot/vault/writer.h"
#include "snapshot/vault/xor.h"
#include "tests/contract/transport/in_process_transport.h"

namespace reft {
namespace restorer_test {

constexpr uint64_t kChunk = 4096;
constexpr int64_t kStep = 7;
constexpr uint64_t kIncarnation = 5;

using Bytes = std::vector<std::byte>;

// One job: `groups` partition the ranks; every rank has shared regions of its group and a private
// one.
struct SmallJob {
  JobShape shape;
  std::string protection;
  std::vector<std::vector<int>> groups;
  std::vector<std::unique_ptr<Vault>> vaults;  // by rank
  std::vector<SnapshotTable> tables;
  std::vector<std::vector<Bytes>> contents;  // by rank, by region

  SmallJob(JobShape job_shape, std::string protection_name, std::mt19937_64& random)
      : shape(job_shape), protection(std::move(protection_name)) {
    std::vector<int> ranks;
    for (int rank = 0; rank < shape.world; ++rank) {
      ranks.push_back(rank);
    }
    // All ranks, or two halves that interleave.
    if (random() % 2 == 0 || shape.world < 4) {
      groups = {ranks};
    } else {
      groups.resize(2);
      for (const int rank : ranks) {
        groups[static_cast<size_t>(rank) % 2].push_back(rank);
      }
    }
    std::vector<std::vector<Bytes>> shared(groups.size());
    std::vector<uint64_t> sizes;
    for (int i = 0; i < 3; ++i) {
      sizes.push_back((1 + random() % 60) * 96);
    }
    for (auto& regions : shared) {
      for (const uint64_t size : sizes) {
        regions.push_back(randomBytes(size, random));
      }
    }
    const Bytes of_all = randomBytes(60 * 96, random);
    for (const int rank : ranks) {
      const size_t g = groups.size() == 1 ? 0 : static_cast<size_t>(rank) % 2;
      std::vector<RegionInfo> infos;
      std::vector<Bytes> values = shared[g];
      for (size_t i = 0; i < values.size(); ++i) {
        infos.push_back({"shared" + std::to_string(i),
                         "uint8",
                         {static_cast<int64_t>(values[i].size() / 96), 96},
                         values[i].size(),
                         96,
                         0,
                         false});
      }
      values.push_back(randomBytes(500, random));
      infos.push_back({"mine", "uint8", {500}, 500, 1, -1, false, {}, true});
      // Each rank has two groups: their messages to one receiver differ.
      values.push_back(of_all);
      infos.push_back({"of all", "uint8", {60, 96}, of_all.size(), 96, 1, false});
      const Protection& named = Protection::named(protection);
      tables.push_back(
          buildTable(rank, shape.world, infos,
                     {{"g" + std::to_string(g), groups[g], named.paritySets(nodesOf(groups[g]))},
                      {"h", ranks, named.paritySets(nodesOf(ranks))}},
                     protection, {heldBy(rank, groups[g]), heldBy(rank, ranks)}, kChunk));
      contents.push_back(std::move(values));
      vaults.push_back(seal(rank));
    }
  }

  MemberNodes nodesOf(const std::vector<int>& group) const {
    MemberNodes nodes;
    for (const int rank : group) {
      nodes.push_back(shape.nodeOf(rank));
    }
    return nodes;
  }

  std::vector<uint32_t> heldBy(int rank, const std::vector<int>& group) const {
    const auto self = std::find(group.begin(), group.end(), rank) - group.begin();
    return Protection::named(protection).placement(nodesOf(group))[static_cast<size_t>(self)];
  }

  static Bytes randomBytes(uint64_t size, std::mt19937_64& random) {
    Bytes bytes(size);
    for (std::byte& byte : bytes) {
      byte = static_cast<std::byte>(random());
    }
    return bytes;
  }

  std::unique_ptr<Vault> seal(int rank) const {
    const SnapshotTable& table = tables[static_cast<size_t>(rank)];
    auto vault = Vault::create({"job", rank, shape.world}, 2, 64);
    const std::string json = table.toJson();
    const uint64_t chunks = (table.payload_bytes + kChunk - 1) / kChunk;
    vault->reserveSlot(0, json.size(), 100, chunks, table.payload_bytes);
    vault->beginSlot(0, kStep, kIncarnation, json, hashBytes(json.data(), json.size()), kChunk,
                     table.payload_bytes, chunks);
    vault->putObjects(0, "objects of " + std::to_string(rank));
    for (const Piece& piece : table.pieces) {
      std::memcpy(vault->payload(0) + piece.payload_offset,
                  contents[static_cast<size_t>(rank)][piece.region].data() + piece.begin,
                  piece.end - piece.begin);
    }
    for (const ParityPiece& piece : table.parities) {
      const auto group = static_cast<int32_t>(piece.group);
      const ParityCells cells(table, group, table.memberOf(group));
      for (const uint32_t shard : cells.set()) {
        std::vector<ShardRange> ranges;
        if (shard != table.memberOf(group)) {
          cells.ranges(shard, table.memberOf(group), piece.begin, piece.end, ranges);
        }
        std::byte* into = vault->payload(0) + piece.payload_offset;
        for (const ShardRange& range : ranges) {
          xorInto(into, contents[static_cast<size_t>(rank)][range.region].data() + range.begin,
                  range.end - range.begin);
          into += range.end - range.begin;
        }
      }
    }
    for (uint64_t i = 0; i < chunks; ++i) {
      const uint64_t begin = i * kChunk;
      vault->chunkHashes(0)[i] =
          hashBytes(vault->payload(0) + begin, std::min(kChunk, table.payload_bytes - begin));
    }
    std::vector<const std::byte*> addresses;
    for (const Bytes& bytes : contents[static_cast<size_t>(rank)]) {
      addresses.push_back(bytes.data());
    }
    const SnapshotPlan plan(table);
    vault->sealSlot(0, groupDigests(plan, addresses, {}, kStep), 1);
    return vault;
  }

  // What the nodes publish after the vaults in `lost` are gone.
  std::vector<VaultSummary> inventory(const std::vector<bool>& lost) const {
    std::vector<VaultSummary> found;
    std::vector<std::string> faults;
    for (int rank = 0; rank < shape.world; ++rank) {
      if (!lost[static_cast<size_t>(rank)]) {
        const VaultReader reader(vaults[static_cast<size_t>(rank)]->fd());
        found.push_back({rank, shape.nodeOf(rank), summarizeVerified(reader, faults)});
      }
    }
    EXPECT_TRUE(faults.empty());
    return found;
  }

  // A rank comes back if every shard of its groups does and a rank of the same groups is left;
  // private parts of lost ranks are their donors'.
  bool comesBack(const std::vector<bool>& lost) const {
    if (!Protection::named(protection).survives(shape.node_of, lost)) {  // the group of all
      return false;
    }
    for (const std::vector<int>& group : groups) {
      std::vector<bool> members;
      for (const int rank : group) {
        members.push_back(lost[static_cast<size_t>(rank)]);
      }
      if (!Protection::named(protection).survives(nodesOf(group), members)) {
        return false;
      }
    }
    return true;
  }

  std::vector<LiveRegion> live(int rank, std::vector<Bytes>& memory) const {
    const SnapshotTable& table = tables[static_cast<size_t>(rank)];
    std::vector<LiveRegion> regions;
    memory.clear();
    for (const RegionInfo& region : table.regions) {
      memory.emplace_back(region.bytes);
    }
    for (size_t i = 0; i < memory.size(); ++i) {
      regions.push_back({table.regions[i].name, table.regions[i].dtype, table.regions[i].shape,
                         table.regions[i].bytes, memory[i].data()});
    }
    return regions;
  }

  UniqueFd open(int rank, int node, const std::vector<bool>& lost) const {
    if (lost[static_cast<size_t>(rank)] || shape.nodeOf(rank) != node) {
      throw Unavailable("no vault of rank " + std::to_string(rank) + " on this node");
    }
    return UniqueFd(::fcntl(vaults[static_cast<size_t>(rank)]->fd(), F_DUPFD_CLOEXEC, 3));
  }
};

// All ranks restore at once; returns their memory.
std::vector<std::vector<Bytes>> restoreAll(const SmallJob& job, const RestorePlan& plan,
                                           const std::vector<bool>& lost, bool on_device,
                                           uint64_t message_bytes) {
  InProcessHub hub;
  std::vector<std::vector<Bytes>> memory(static_cast<size_t>(job.shape.world));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < job.shape.world; ++rank) {
    threads.emplace_back([&, rank] {
      const int node = job.shape.nodeOf(rank);
      const auto open = [&](int vault, bool) { return job.open(vault, node, lost); };
      Restorer restorer(plan, rank, open, message_bytes);
      std::vector<Bytes>& mine = memory[static_cast<size_t>(rank)];
      std::vector<LiveRegion> live = job.live(rank, mine);
      if (on_device) {
        for (LiveRegion& region : live) {
          region.memory = nullptr;
        }
      }
      const int owner = plan.ownerFor(rank);
      if (!restorer.hasOwnersVault()) {
        restorer.putTable(job.tables[static_cast<size_t>(owner)]);
      }
      EXPECT_EQ(restorer.difference(live), "");
      const auto transport = hub.transport(rank);
      const uint64_t written =
          restorer.restore(live, transport.get(),
                           [&](size_t region, uint64_t begin, std::span<const std::byte> bytes) {
                             std::memcpy(mine[region].data() + begin, bytes.data(), bytes.size());
                           });
      uint64_t total = 0;
      for (const LiveRegion& region : live) {
        total += region.bytes;
      }
      EXPECT_EQ(written, total);
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  EXPECT_LE(hub.longest(), message_bytes);
  return memory;
}

// Every loss that a small world can have: the planner accepts exactly those that the protection
// survives, and then every rank has every byte again.
TEST(Restorer, EverySurvivableLossComesBackBitForBitAndNoOtherIsPlanned) {
  std::mt19937_64 random(3);
  for (const char* protection : {"none", "arc", "arc:2", "aec"}) {
    for (const JobShape& shape :
         {JobShape{1, 1}, JobShape{2, 1}, JobShape{4, 2}, JobShape{5, 2}, JobShape{6, 3}}) {
      const SmallJob job(shape, protection, random);
      for (unsigned bits = 0; bits < 1u << shape.world; ++bits) {
        std::vector<bool> lost(static_cast<size_t>(shape.world));
        for (size_t rank = 0; rank < lost.size(); ++rank) {
          lost[rank] = (bits >> rank & 1) != 0;
        }
        const RestoreDecision decision = planRestore(job.inventory(lost), shape);
        ASSERT_EQ(decision.plan.has_value(), job.comesBack(lost))
            << protection << ", " << shape.world << " ranks, lost " << bits;
        if (!decision.plan) {
          continue;
        }
        const auto memory =
            restoreAll(job, *decision.plan, lost, random() % 2 == 0, 500 + random() % 20'000);
        for (int rank = 0; rank < shape.world; ++rank) {
          const auto r = static_cast<size_t>(rank);
          const auto owner = static_cast<size_t>(decision.plan->ownerFor(rank));
          for (size_t i = 0; i < memory[r].size(); ++i) {
            const bool shared = job.tables[r].regions[i].group >= 0;
            ASSERT_EQ(memory[r][i], job.contents[shared ? r : owner][i])
                << "rank " << rank << " region " << i << ", lost " << bits;
          }
        }
      }
    }
  }
}

// What is decoded is compared with what its members recorded.
TEST(Restorer, AParityThatDoesNotFitTheShardsIsFound) {
  std::mt19937_64 random(8);
  SmallJob job({3, 1}, "aec", random);
  const SnapshotTable& table = job.tables[1];
  Vault& vault = *job.vaults[1];
  for (const bool in_padding : {false, true}) {
    // Of a state with another byte, intact as such.
    const ParityPiece& piece = table.parities.back();
    std::byte* const at =
        vault.payload(0) + piece.payload_offset + (in_padding ? piece.end - piece.begin - 1 : 0);
    *at ^= std::byte{1};
    const uint64_t chunks = (table.payload_bytes + kChunk - 1) / kChunk;
    for (uint64_t i = 0; i < chunks; ++i) {
      vault.chunkHashes(0)[i] = hashBytes(vault.payload(0) + i * kChunk,
                                          std::min(kChunk, table.payload_bytes - i * kChunk));
    }
    const std::vector<bool> lost = {false, false, true};
    const RestorePlan plan = *planRestore(job.inventory(lost), job.shape).plan;
    InProcessHub hub;
    std::vector<std::thread> threads;
    std::atomic<int> found{0};
    for (int rank = 0; rank < 3; ++rank) {
      threads.emplace_back([&, rank] {
        Restorer restorer(plan, rank, [&](int other, bool) { return job.open(other, rank, lost); });
        if (!restorer.hasOwnersVault()) {
          restorer.putTable(job.tables[static_cast<size_t>(plan.ownerFor(rank))]);
        }
        std::vector<Bytes> memory;
        const auto live = job.live(rank, memory);
        const auto transport = hub.transport(rank);
        try {
          restorer.restore(live, transport.get(), [](size_t, uint64_t, auto) {});
        } catch (const Corruption&) {
          ++found;
        }
      });
    }
    for (std::thread& thread : threads) {
      thread.join();
    }
    EXPECT_EQ(found.load(), 3);
    *at ^= std::byte{1};
  }
}

// A vault may lie about what it holds: its table is checked against that of the rank that restores.
TEST(Restorer, AParityOfAnotherLengthOrSetIsRefused) {
  std::mt19937_64 random(10);
  SmallJob job({3, 1}, "aec", random);
  const std::vector<bool> lost = {false, false, true};
  const RestorePlan plan = *planRestore(job.inventory(lost), job.shape).plan;
  const SnapshotTable& table = job.tables[0];
  const std::vector<Move> moves = movesOf(plan, 0, table);
  ASSERT_EQ(moves.back().decode, Decode::kXor);
  EXPECT_NO_THROW(Decoding(table, moves.back()));
  Move wrong = moves.back();
  wrong.sources.pop_back();
  EXPECT_THROW(Decoding(table, wrong), Corruption) << "a parity is missing";
  wrong = moves.back();
  wrong.sources[0].shard = wrong.sources[1].shard;
  EXPECT_THROW(Decoding(table, wrong), Corruption) << "twice the same";
  wrong = moves.back();
  wrong.group = -1;
  EXPECT_THROW(Decoding(table, wrong), Corruption) << "no group";
  SnapshotTable other = table;
  other.groups[0].sets = other.groups[1].sets = {{0, 1}};
  EXPECT_THROW(Decoding(other, moves.back()), Corruption) << "another set";
  const SlotSource source(job.vaults[0]->fd(), 0, kStep, kIncarnation);
  Bytes parity(source.bytesOf("h", 3));
  EXPECT_NO_THROW(source.copyPart("h", 3, parity));
  parity.resize(parity.size() - 64);
  EXPECT_THROW(source.copyPart("h", 3, parity), Corruption);
}

TEST(Restorer, ADifferentLiveStateIsNamed) {
  std::mt19937_64 random(4);
  const SmallJob job({2, 2}, "none", random);
  const std::vector<bool> lost(2);
  const RestorePlan plan = *planRestore(job.inventory(lost), job.shape).plan;
  Restorer restorer(plan, 0, [&](int vault, bool) { return job.open(vault, 0, lost); });
  std::vector<Bytes> memory;
  auto live = job.live(0, memory);
  live[0].dtype = "float32";
  EXPECT_NE(restorer.difference(live).find("shared0 was uint8 ["), std::string::npos);
  live = job.live(0, memory);
  live.pop_back();
  EXPECT_EQ(restorer.difference(live), "of all (uint8 [60, 96]) was saved and does not exist now");
  live = job.live(0, memory);
  live.push_back({"new", "uint8", {1}, 1, nullptr});
  EXPECT_EQ(restorer.difference(live), "new exists now and was not saved");
}

TEST(Restorer, APlanThatLeavesBytesOutIsRefusedBeforeOneIsWritten) {
  std::mt19937_64 random(9);
  const SmallJob job({2, 2}, "none", random);
  const std::vector<bool> lost(2);
  RestorePlan plan = *planRestore(job.inventory(lost), job.shape).plan;
  plan.groups.begin()->second.recipes[0].clear();  // as if the shard were empty
  Restorer restorer(plan, 0, [&](int vault, bool) { return job.open(vault, 0, lost); });
  std::vector<Bytes> memory;
  const auto live = job.live(0, memory);
  const std::vector<Bytes> before = memory;
  EXPECT_THROW(restorer.restore(live, nullptr, [](size_t, uint64_t, auto) {}), Corruption);
  EXPECT_EQ(memory, before);
}

TEST(Restorer, SmallStateOfAVaultOnAnotherNodeIsUnavailable) {
  std::mt19937_64 random(5);
  const SmallJob job({2, 1}, "arc", random);
  const std::vector<bool> lost = {false, true};
  const RestorePlan plan = *planRestore(job.inventory(lost), job.shape).plan;
  Restorer restorer(plan, 1, [&](int vault, bool) { return job.open(vault, 1, lost); });
  EXPECT_FALSE(restorer.hasOwnersVault());
  EXPECT_THROW(restorer.objects(), Unavailable);
  EXPECT_THROW(restorer.table(), Unavailable);
  Restorer donor(plan, 0, [&](int vault, bool) { return job.open(vault, 0, lost); });
  EXPECT_EQ(donor.objects(), "objects of 0");
}

// Also where the damaged byte is none of those that are asked for.
TEST(SlotSource, DamageInAChunkIsFound) {
  std::mt19937_64 random(6);
  const SmallJob job({1, 1}, "none", random);
  const SlotSource source(job.vaults[0]->fd(), 0, kStep, kIncarnation);
  const uint64_t bytes = job.tables[0].payload_bytes;
  Bytes whole(bytes), to(bytes);
  std::memcpy(whole.data(), job.vaults[0]->payload(0), bytes);
  const uint64_t half = bytes / 2;
  EXPECT_NO_THROW(source.copy({{half, bytes - half, to.data() + half}, {0, 10, to.data()}}));
  EXPECT_TRUE(std::equal(to.begin() + static_cast<ptrdiff_t>(half), to.end(),
                         whole.begin() + static_cast<ptrdiff_t>(half)));
  EXPECT_EQ(to[9], whole[9]);
  for (const uint64_t at : {uint64_t{9}, uint64_t{10}, uint64_t{100}}) {
    job.vaults[0]->payload(0)[at] ^= std::byte{1};
    EXPECT_THROW(source.copy({{0, 10, to.data()}}), Corruption);
    EXPECT_THROW(source.copy({{half, bytes - half, to.data()}, {1, 2, to.data()}}), Corruption);
    EXPECT_THROW(source.visitPart("", 0, 500, [](uint64_t, auto) {}), Corruption) << "mine";
    job.vaults[0]->payload(0)[at] ^= std::byte{1};
  }
  Bytes mine(500), visited(500);
  source.copyPart("", 0, mine);
  source.visitPart("", 0, 500, [&](uint64_t from, std::span<const std::byte> part) {
    std::memcpy(visited.data() + from, part.data(), part.size());
  });
  EXPECT_EQ(visited, mine);
  EXPECT_THROW(source.visitPart("", 0, 499, [](uint64_t, auto) {}), Corruption);
}

TEST(SlotSource, AnotherStepInTheSlotIsRefused) {
  std::mt19937_64 random(7);
  const SmallJob job({1, 1}, "none", random);
  EXPECT_THROW(SlotSource(job.vaults[0]->fd(), 0, kStep + 1, kIncarnation), Corruption);
  EXPECT_THROW(SlotSource(job.vaults[0]->fd(), 1, kStep, kIncarnation), Corruption);
  const SlotSource source(job.vaults[0]->fd(), 0, kStep, kIncarnation);
  EXPECT_THROW(source.offsetOf("mine", 0, 0, 499), Corruption);
  EXPECT_THROW(source.copy({{uint64_t{1} << 40, 1, nullptr}}), InvalidArgument);
}

}  // namespace restorer_test
}  // namespace reft

#include "agent/mesh/frames.h"

#include <gtest/gtest.h>

#include "intercept/base/error.h"

namespace reft::agent {
namespace mesh_frames_test {

const Sha256 kKey{1, 2, 3};

SlotHead head() {
  SlotHead head;
  head.rank = 2;
  head.world = 4;
  head.step = 7;
  head.incarnation = 9;
  head.chunk_bytes = 4096;
  head.payload_bytes = 10'000;
  head.chunk_count = 3;
  head.still_count = 1;
  head.still[0] = head.key();
  return head;
}

// Reads one frame of `bytes`, as a session does.
std::optional<MeshFrame> read(FrameReader& reader, std::string& bytes) {
  while (bytes.size() >= reader.wants()) {
    const size_t wanted = reader.wants();
    auto frame = reader.take(std::string_view(bytes).substr(0, wanted));
    bytes.erase(0, wanted);
    if (frame) {
      return frame;
    }
  }
  return std::nullopt;
}

TEST(MeshFrames, WhatIsSealedIsRead) {
  FrameSealer sealer(kKey);
  FrameReader reader(kKey);
  std::string bytes = sealer.seal(MeshType::kWant, payloadOf(Want{4, {0, 3}}));
  bytes += sealer.seal(MeshType::kOffer, payloadOf(head()));
  bytes += sealer.seal(MeshType::kSend, "");
  bytes += sealer.seal(MeshType::kHeld, payloadOf(HeldSlot{2, Kept::kLater, 7, 9}));
  const Want want = wantIn(read(reader, bytes)->payload);
  EXPECT_EQ(want.world, 4);
  EXPECT_EQ(want.ranks, (std::vector<int>{0, 3}));
  const SlotHead offered = slotHeadIn(read(reader, bytes)->payload);
  EXPECT_EQ(offered.key(), head().key());
  EXPECT_EQ(offered.bytes(), 3 * 8 + 10'000u);
  EXPECT_EQ(read(reader, bytes)->type, MeshType::kSend);
  const HeldSlot held = heldSlotIn(read(reader, bytes)->payload);
  EXPECT_EQ(held.kept, Kept::kLater);
  EXPECT_EQ(held.step, 7);
  EXPECT_TRUE(bytes.empty());
}

TEST(MeshFrames, AChangedByteIsRefusedWhereverItIs) {
  const std::string sealed =
      FrameSealer(kKey).seal(MeshType::kHeld, payloadOf(HeldSlot{2, Kept::kYes, 7, 9}));
  for (size_t i = 0; i < sealed.size(); ++i) {
    std::string changed = sealed;
    changed[i] = static_cast<char>(changed[i] ^ 4);
    FrameReader reader(kKey);
    // A changed length waits for bytes that do not come, or takes others for the MAC.
    try {
      changed += std::string(64, 'x');
      EXPECT_FALSE(read(reader, changed)) << i;
    } catch (const Corruption&) {
    }
  }
}

TEST(MeshFrames, OthersOrderRepetitionAndKeyAreRefused) {
  FrameSealer sealer(kKey);
  const std::string first = sealer.seal(MeshType::kSend, "");
  const std::string second = sealer.seal(MeshType::kSend, "");
  for (std::string bytes : {second, first + first, first + sealer.seal(MeshType::kSend, "")}) {
    FrameReader reader(kKey);
    EXPECT_THROW(
        {
          read(reader, bytes);
          read(reader, bytes);
        },
        Corruption);
  }
  FrameReader other(Sha256{9});
  std::string bytes = first;
  EXPECT_THROW(read(other, bytes), Corruption);
}

TEST(MeshFrames, NoMoreIsReadThanAFrameMayHave) {
  FrameReader reader(kKey);
  std::string bytes = FrameSealer(kKey).seal(MeshType::kWant, std::string(kMostMeshPayload + 1, 0));
  EXPECT_THROW(read(reader, bytes), Corruption);
}

TEST(MeshFrames, NumbersThatCannotBeAreRefused) {
  const auto refused = [](auto change) {
    SlotHead changed = head();
    change(changed);
    EXPECT_THROW(slotHeadIn(payloadOf(changed)), Corruption);
  };
  EXPECT_NO_THROW(slotHeadIn(payloadOf(head())));
  refused([](SlotHead& h) { h.rank = -1; });
  refused([](SlotHead& h) { h.rank = 4; });
  refused([](SlotHead& h) { h.world = 0; });
  refused([](SlotHead& h) { h.step = -1; });
  refused([](SlotHead& h) { h.table_bytes = UINT64_MAX; });
  refused([](SlotHead& h) { h.objects_bytes = UINT64_MAX; });
  refused([](SlotHead& h) { h.payload_bytes = UINT64_MAX; });
  refused([](SlotHead& h) { h.chunk_bytes = 0; });
  refused([](SlotHead& h) { h.chunk_bytes = UINT64_MAX; });
  refused([](SlotHead& h) { h.chunk_count = 4; });
  refused([](SlotHead& h) { h.group_count = kMaxGroupDigests + 1; });
  refused([](SlotHead& h) { h.plan_anew = 2; });
  refused([](SlotHead& h) { h.has_committed = 2; });
  refused([](SlotHead& h) { h.still_count = kMaxSlots + 1; });
  EXPECT_THROW(slotHeadIn(payloadOf(head()).substr(1)), Corruption);

  EXPECT_THROW(wantIn(""), Corruption);
  EXPECT_THROW(wantIn(payloadOf(Want{0, {}})), Corruption);
  EXPECT_THROW(wantIn(payloadOf(Want{2, {2}})), Corruption);
  EXPECT_THROW(wantIn(payloadOf(Want{2, {-1}})), Corruption);
  EXPECT_THROW(wantIn(payloadOf(Want{8, {1}}) + "x"), Corruption);
  EXPECT_THROW(wantIn(payloadOf(Want{1 << 20, std::vector<int>(kMostWanted + 1)})), Corruption);
  EXPECT_THROW(heldSlotIn(payloadOf(HeldSlot{-1, Kept::kYes, 1, 1})), Corruption);
  EXPECT_THROW(heldSlotIn(payloadOf(HeldSlot{1, static_cast<Kept>(3), 1, 1})), Corruption);
  EXPECT_THROW(heldSlotIn(""), Corruption);
  EXPECT_EQ(vaultHeadsIn("").size(), 0u);
  const auto heads = vaultHeadsIn(payloadOf(std::vector<VaultHead>{{1, 0, 2, -1}, {3, 0, 4, 5}}));
  ASSERT_EQ(heads.size(), 2u);
  EXPECT_EQ(heads[1].rank, 3);
  EXPECT_EQ(heads[1].writer, 4u);
  EXPECT_EQ(heads[1].resumed, 5);
  EXPECT_THROW(vaultHeadsIn("x"), Corruption);
  EXPECT_THROW(vaultHeadsIn(payloadOf(std::vector<VaultHead>{{-1, 0, 2, -1}})), Corruption);
  EXPECT_THROW(vaultHeadsIn(payloadOf(std::vector<VaultHead>{{1, 0, 2, -2}})), Corruption);
  EXPECT_THROW(vaultHeadsIn(payloadOf(std::vector<VaultHead>(kMostWanted + 1))), Corruption);
}

}  // namespace mesh_frames_test
}  // namespace reft::agent

// What tests of the mesh share: the vault of a rank with slots of known contents, a connection, a
// wait, and whether a test that runs twice is the one with TLS.
#pragma once

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <sys/socket.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "agent/mesh/frames.h"
#include "intercept/base/unique_fd.h"
#include "snapshot/state/table.h"
#include "snapshot/vault/hash.h"
#include "snapshot/vault/reader.h"
#include "snapshot/vault/writer.h"

namespace reft::agent::mesh_test {

constexpr uint64_t kChunk = 4096;
constexpr uint64_t kPayload = 10'000;
constexpr int kWorld = 4;

// A rank's own vault.
class Owner {
 public:
  explicit Owner(int rank = 1, uint64_t payload = kPayload)
      : rank_(rank),
        vault_(Vault::create({"job", rank, kWorld}, 2, 64)),
        table_(tableOf(rank, payload)) {}

  int fd() const { return vault_->fd(); }
  Vault& vault() { return *vault_; }

  // Seals a step whose payload is full of `fill`.
  void seal(uint32_t slot, int64_t step, uint64_t incarnation, char fill) {
    const std::string json = table_.toJson();
    const uint64_t bytes = table_.payload_bytes;
    const uint64_t chunks = (bytes + kChunk - 1) / kChunk;
    const std::string objects = "small state of step " + std::to_string(step);
    vault_->reserveSlot(slot, json.size(), 64, chunks, bytes);
    vault_->beginSlot(slot, step, incarnation, json, hashBytes(json.data(), json.size()), kChunk,
                      bytes, chunks);
    vault_->putObjects(slot, objects);
    std::memset(vault_->payload(slot), fill, bytes);
    for (uint64_t i = 0; i < chunks; ++i) {
      vault_->chunkHashes(slot)[i] =
          hashBytes(vault_->payload(slot) + i * kChunk, std::min(kChunk, bytes - i * kChunk));
    }
    vault_->setBallot(slot, 5, 6, 3, true);
    vault_->sealSlot(slot, std::vector<uint64_t>{11, 22}, step);
  }

  // An attempt has taken it over, and resumed.
  void began(uint64_t incarnation, int64_t resumed) {
    vault_->stats().incarnation.store(incarnation);
    vault_->stats().restored_step.store(static_cast<uint64_t>(resumed));
  }

  // The head of a sealed slot, as an owner's agent offers it, and its bytes.
  SlotHead head(uint32_t slot, bool has_committed = false) const {
    const VaultReader reader(vault_->fd());
    SlotHead head;
    for (const SlotView& view : reader.slots()) {
      head.still[head.still_count++] = {view.step, view.incarnation};
      if (view.index != slot) {
        continue;
      }
      head.rank = rank_;
      head.world = kWorld;
      head.step = view.step;
      head.incarnation = view.incarnation;
      head.cut = view.cut;
      head.replicas = 6;
      head.table_bytes = view.table_bytes;
      head.table_hash = view.table_hash;
      head.objects_bytes = view.object_bytes;
      head.objects_hash = view.objects_hash;
      head.chunk_count = view.chunk_count;
      head.chunk_bytes = view.chunk_bytes;
      head.chunk_hashes_hash = hashBytes(vault_->chunkHashes(slot), view.chunk_count * 8);
      head.payload_bytes = view.payload_bytes;
      head.group_count = 2;
      head.proposal = 3;
      head.plan_anew = 1;
      head.group_digests[0] = 11;
      head.group_digests[1] = 22;
    }
    head.has_committed = has_committed ? 1 : 0;
    return head;
  }
  std::string bytes(uint32_t slot) const {
    const VaultReader reader(vault_->fd());
    for (const SlotView& view : reader.slots()) {
      if (view.index == slot) {
        const auto* all = reinterpret_cast<const char*>(reader.payload(view)) - view.payload_at;
        return std::string(all + view.table_at, view.table_bytes) +
               std::string(all + view.objects_at, view.object_bytes) +
               std::string(all + view.chunk_hashes_at, view.chunk_count * 8) +
               std::string(all + view.payload_at, view.payload_bytes);
      }
    }
    return "";
  }

 private:
  static SnapshotTable tableOf(int rank, uint64_t payload) {
    return buildTable(rank, kWorld,
                      {{"w", "uint8", {static_cast<int64_t>(payload)}, payload, 1u, -1, false}}, {},
                      "none", {}, kChunk);
  }

  int rank_;
  std::unique_ptr<Vault> vault_;
  SnapshotTable table_;
};

// The payload's first byte of a step in a vault; '?' if it is not whole there.
inline char fillOf(int fd, int64_t step, uint64_t incarnation) {
  const VaultReader reader(fd);
  for (const SlotView& view : reader.slots()) {
    if (view.step == step && view.incarnation == incarnation && reader.verify(view).empty() &&
        view.payload_bytes > 0 &&
        reader.objects(view) == "small state of step " + std::to_string(step)) {
      return static_cast<char>(*reader.payload(view));
    }
  }
  return '?';
}

inline UniqueFd connectTo(uint16_t port) {
  UniqueFd socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in at{};
  at.sin_family = AF_INET;
  at.sin_port = htons(port);
  at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  EXPECT_EQ(::connect(socket.get(), reinterpret_cast<sockaddr*>(&at), sizeof(at)), 0);
  return socket;
}

// Until `done`, or half a minute.
inline bool eventually(const std::function<bool()>& done) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(30);
  while (!done()) {
    if (std::chrono::steady_clock::now() > end) {
      return false;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  return true;
}

// In tests of suites with a parameter only.
inline bool withTls() {
  return testing::WithParamInterface<bool>::GetParam();
}
inline std::string tlsName(const testing::TestParamInfo<bool>& info) {
  return info.param ? "tls" : "plain";
}

}  // namespace reft::agent::mesh_test

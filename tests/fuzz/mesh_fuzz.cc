// Bytes as another agent, or a stranger, may send them to the mesh: greetings, frames and slots.
//
// The same bytes are taken for a greeting, for frames (as they are, and well-formed ones in which a
// byte was changed), for the head of a slot and its contents, and for a series of slots that
// arrive whole, in part or changed. What may still be needed has to stay readable throughout.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "agent/mesh/copy_store.h"
#include "agent/mesh/frames.h"
#include "agent/mesh/handshake.h"
#include "intercept/base/error.h"
#include "snapshot/vault/hash.h"
#include "snapshot/vault/reader.h"

namespace {

using namespace reft::agent;
using reft::CommitKey;

constexpr uint64_t kRoom = 1u << 20;
constexpr size_t kMostArrivals = 24;
const MeshKey kKey{1};

template <typename Parse>
void tryParse(Parse parse) {
  try {
    parse();
  } catch (const reft::Error&) {
  }
}

void demand(bool condition) {
  if (!condition) {
    __builtin_trap();
  }
}

// Frames out of bytes, in the pieces that the reader asks for.
std::vector<MeshFrame> framesIn(std::string_view bytes) {
  std::vector<MeshFrame> frames;
  FrameReader reader(kKey);
  tryParse([&] {
    while (bytes.size() >= reader.wants()) {
      const size_t wanted = reader.wants();
      if (auto frame = reader.take(bytes.substr(0, wanted))) {
        frames.push_back(std::move(*frame));
      }
      bytes.remove_prefix(wanted);
    }
  });
  return frames;
}

// Some frames whose payloads are the bytes, one of which is then changed where the first two say.
void readChanged(std::string_view bytes) {
  if (bytes.size() < 4) {
    return;
  }
  uint16_t where = 0;
  std::memcpy(&where, bytes.data(), sizeof(where));
  FrameSealer sealer(kKey);
  std::string sent;
  std::vector<size_t> ends;
  for (size_t at = 4, length = bytes[3] & 127; at < bytes.size(); at += length, length += 7) {
    const std::string_view payload = bytes.substr(at, length = std::max<size_t>(length, 1));
    sent += sealer.seal(static_cast<MeshType>(at % 6 + 1), payload);
    ends.push_back(sent.size());
  }
  demand(framesIn(sent).size() == ends.size());
  if (sent.empty() || bytes[2] == 0) {
    return;
  }
  sent[where % sent.size()] = static_cast<char>(sent[where % sent.size()] ^ bytes[2]);
  const auto before = static_cast<size_t>(std::count_if(
      ends.begin(), ends.end(), [&](size_t end) { return end <= where % sent.size(); }));
  demand(framesIn(sent).size() == before);
}

// Puts bytes into a slot until there is no room or nothing more. Whether it is whole.
bool fill(CopyStore::Incoming& incoming, std::string_view bytes) {
  while (!incoming.next().empty() && !bytes.empty()) {
    const auto room = incoming.next();
    const size_t count = std::min({room.size(), bytes.size(), size_t{1000}});
    std::memcpy(room.data(), bytes.data(), count);
    incoming.took(count);
    bytes.remove_prefix(count);
  }
  return incoming.next().empty();
}

// Takes a slot whose head is the first bytes, and whose contents are the rest.
void takeSlot(std::string_view bytes) {
  SlotHead head;
  std::memcpy(static_cast<void*>(&head), bytes.data(), std::min(bytes.size(), sizeof(head)));
  head = slotHeadIn(payloadOf(head));
  CopyStore store("job");
  store.limit([&](uint64_t wanted) { return store.bytes() + wanted <= kRoom; });
  auto answer = Kept::kNo;
  const auto incoming = store.begin(head, answer);
  if (incoming != nullptr && fill(*incoming, bytes.substr(std::min(bytes.size(), sizeof(head))))) {
    store.seal(*incoming, 1);
  }
}

// One slot of a series.
struct Arrival {
  uint8_t rank, step, incarnation, how, table, objects, chunk, still;
  uint16_t payload, at;
};
static_assert(sizeof(Arrival) == 12);
enum How : uint8_t { kCutOff = 1, kChanged = 2, kHasCommitted = 4, kNoRoom = 8, kOthersGo = 16 };

std::set<CommitKey> readable(const CopyStore& store, int rank) {
  std::set<CommitKey> keys;
  for (const CopyStore::Copy& copy : store.copies()) {
    if (copy.owner.rank != rank) {
      continue;
    }
    const reft::VaultReader reader(copy.vault->get());
    const auto views = reader.slots();
    demand(views.size() <= reft::kMaxSlots);
    for (const reft::SlotView& view : views) {
      demand(reader.verify(view).empty());
      keys.insert({view.step, view.incarnation});
    }
  }
  return keys;
}

// The contents of a slot, and its head.
std::string contentsOf(const Arrival& arrival, const std::vector<CommitKey>& earlier,
                       SlotHead& head) {
  head.rank = arrival.rank & 1;
  head.world = 2;
  head.step = arrival.step & 15;
  head.incarnation = arrival.incarnation & 3;
  head.has_committed = (arrival.how & kHasCommitted) != 0 ? 1 : 0;
  head.table_bytes = arrival.table;
  head.objects_bytes = arrival.objects;
  head.payload_bytes = arrival.payload;
  head.chunk_bytes = arrival.chunk + 40;
  head.chunk_count = (head.payload_bytes + head.chunk_bytes - 1) / head.chunk_bytes;
  const std::string table(head.table_bytes, static_cast<char>(arrival.step));
  const std::string objects(head.objects_bytes, static_cast<char>(arrival.incarnation));
  const std::string payload(head.payload_bytes, static_cast<char>(arrival.at));
  std::string hashes;
  for (uint64_t i = 0; i < head.chunk_count; ++i) {
    const auto chunk = std::string_view(payload).substr(i * head.chunk_bytes, head.chunk_bytes);
    const uint64_t hash = reft::hashBytes(chunk.data(), chunk.size());
    hashes.append(reinterpret_cast<const char*>(&hash), sizeof(hash));
  }
  head.table_hash = reft::hashBytes(table.data(), table.size());
  head.objects_hash = reft::hashBytes(objects.data(), objects.size());
  head.chunk_hashes_hash = reft::hashBytes(hashes.data(), hashes.size());
  head.still[head.still_count++] = head.key();
  for (size_t i = 0; i < earlier.size() && head.still_count < reft::kMaxSlots; ++i) {
    if ((arrival.still >> (i & 7) & 1) != 0) {
      head.still[head.still_count++] = earlier[earlier.size() - 1 - i];
    }
  }
  return table + objects + hashes + payload;
}

void takeSeries(std::string_view bytes) {
  CopyStore store("job");
  uint64_t limit = kRoom;
  store.limit([&](uint64_t wanted) { return store.bytes() + wanted <= limit; });
  std::vector<CommitKey> earlier[2];
  std::set<CommitKey> counted[2];  // arrived whole, and were needed since
  bytes = bytes.substr(0, kMostArrivals * sizeof(Arrival));
  for (; bytes.size() >= sizeof(Arrival); bytes.remove_prefix(sizeof(Arrival))) {
    Arrival arrival;
    std::memcpy(static_cast<void*>(&arrival), bytes.data(), sizeof(arrival));
    SlotHead head;
    std::string contents = contentsOf(arrival, earlier[arrival.rank & 1], head);
    head = slotHeadIn(payloadOf(head));
    const auto isNeeded = [&](const CommitKey& key) {
      auto* const end = head.still + head.still_count;
      return std::find(head.still, end, key) != end ||
             (head.has_committed == 0 && key.incarnation != head.incarnation);
    };
    auto& needed = counted[head.rank];
    std::erase_if(needed, [&](const CommitKey& key) { return !isNeeded(key); });
    const size_t at = contents.empty() ? 0 : arrival.at % contents.size();
    const bool whole = (arrival.how & (kCutOff | kChanged)) == 0 || contents.empty();
    if ((arrival.how & kChanged) != 0 && !contents.empty()) {
      contents[at] = static_cast<char>(contents[at] ^ 1);
    } else if ((arrival.how & kCutOff) != 0) {
      contents.resize(at);
    }
    limit = (arrival.how & kNoRoom) != 0 ? 0 : kRoom;
    auto answer = Kept::kNo;
    tryParse([&] {
      if (const auto incoming = store.begin(head, answer)) {
        if (fill(*incoming, contents)) {
          demand(whole);
          store.seal(*incoming, 1);
          answer = Kept::kYes;
          earlier[head.rank].push_back(head.key());
        }
      }
    });
    const std::set<CommitKey> after = readable(store, head.rank);
    demand(answer != Kept::kYes || after.contains(head.key()));
    demand(std::includes(after.begin(), after.end(), needed.begin(), needed.end()));
    demand(answer != Kept::kLater ||
           std::count_if(after.begin(), after.end(), isNeeded) == reft::kMaxSlots);
    if (answer == Kept::kYes) {
      needed.insert(head.key());
    }
    demand(store.bytes() <= kRoom);
    if ((arrival.how & kOthersGo) != 0) {
      store.keepOnly({{head.rank, head.world}});
      demand(store.copies().size() <= 1);
      counted[1 - head.rank].clear();
    }
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view whole(reinterpret_cast<const char*>(data), size);
  const Nonce nonce{2};
  openGreeting(whole);
  // Nobody guesses a MAC.
  demand(!openAnswer(kKey, nonce, whole) && !isProof(kKey, nonce, nonce, whole));
  demand(framesIn(whole).empty());
  tryParse([&] { demand(payloadOf(wantIn(whole)) == whole); });
  tryParse([&] { demand(payloadOf(heldSlotIn(whole)) == whole); });
  tryParse([&] { demand(payloadOf(vaultHeadsIn(whole)) == whole); });
  tryParse([&] { demand(payloadOf(slotHeadIn(whole)) == whole); });
  readChanged(whole);
  tryParse([&] { takeSlot(whole); });
  takeSeries(whole);
  return 0;
}

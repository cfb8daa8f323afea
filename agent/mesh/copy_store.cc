#include "agent/mesh/copy_store.h"

#include <fcntl.h>

#include <algorithm>
#include <cstring>
#include <string_view>

#include "intercept/base/error.h"
#include "intercept/base/log.h"
#include "snapshot/vault/hash.h"

namespace reft::agent {

namespace {

constexpr uint32_t kOpLogRecords = 16;  // a copy has no op log of its own
constexpr uint32_t kUsually = 2;        // slots with memory

// What the owner has overwritten is not needed: its step was aborted, or a newer one is committed.
// What an earlier attempt has left is, until this one has committed something: it may be what the
// next restart resumes. snapshot/commit/model/copies.pml checks that no other rule is needed, and
// that keeping the newest committed step alone is too little.
bool isNeeded(const CommitKey& held, const SlotHead& head) {
  const CommitKey* end = head.still + head.still_count;
  return std::find(head.still, end, held) != end ||
         (head.has_committed == 0 && held.incarnation != head.incarnation);
}

[[noreturn]] void mismatch(const SlotHead& head, const char* what) {
  throw Corruption("step " + std::to_string(head.step) + " of rank " + std::to_string(head.rank) +
                   ": " + what + " did not arrive as it was sent");
}

}  // namespace

uint64_t CopyStore::Incoming::bytesOfPart() const {
  switch (part_) {
    case Part::kTable: return head_.table_bytes;
    case Part::kObjects: return head_.objects_bytes;
    case Part::kHashes: return head_.chunk_count * sizeof(uint64_t);
    case Part::kPayload: return head_.payload_bytes;
    case Part::kDone: break;
  }
  return 0;
}

std::byte* CopyStore::Incoming::bufferOfPart() {
  switch (part_) {
    case Part::kTable: table_.resize(head_.table_bytes); return table_.data();
    case Part::kObjects: objects_.resize(head_.objects_bytes); return objects_.data();
    case Part::kHashes:
      hashes_.resize(head_.chunk_count);
      return reinterpret_cast<std::byte*>(hashes_.data());
    case Part::kPayload: return vault_.payload(slot_);
    case Part::kDone: break;
  }
  return nullptr;
}

std::span<std::byte> CopyStore::Incoming::next() {
  const uint64_t left = bytesOfPart() - at_;
  return left == 0 ? std::span<std::byte>() : std::span(bufferOfPart() + at_, left);
}

void CopyStore::Incoming::took(size_t bytes) {
  at_ += bytes;
  if (part_ == Part::kPayload) {
    hashChunks();
  }
  if (at_ == bytesOfPart()) {
    endPart();
    skipEmpty();
  }
}

void CopyStore::Incoming::skipEmpty() {
  while (part_ != Part::kDone && bytesOfPart() == 0) {
    endPart();
  }
}

void CopyStore::Incoming::endPart() {
  switch (part_) {
    case Part::kTable:
      if (hashBytes(table_.data(), table_.size()) != head_.table_hash) {
        mismatch(head_, "the table");
      }
      part_ = Part::kObjects;
      break;
    case Part::kObjects:
      if (hashBytes(objects_.data(), objects_.size()) != head_.objects_hash) {
        mismatch(head_, "the small state");
      }
      part_ = Part::kHashes;
      break;
    case Part::kHashes:
      if (hashBytes(hashes_.data(), hashes_.size() * sizeof(uint64_t)) != head_.chunk_hashes_hash) {
        mismatch(head_, "the list of hashes");
      }
      beginSlot();
      part_ = Part::kPayload;
      break;
    case Part::kPayload: part_ = Part::kDone; break;
    case Part::kDone: break;
  }
  at_ = 0;
}

// What the slot held stays until here: its small parts are there.
void CopyStore::Incoming::beginSlot() {
  const auto view = [](const std::vector<std::byte>& bytes) {
    const auto* data = reinterpret_cast<const char*>(bytes.data());
    return data == nullptr ? std::string_view("") : std::string_view(data, bytes.size());
  };
  vault_.beginSlot(slot_, head_.step, head_.incarnation, view(table_), head_.table_hash,
                   head_.chunk_bytes, head_.payload_bytes, head_.chunk_count);
  vault_.putObjects(slot_, view(objects_));
  vault_.setBallot(slot_, head_.cut, head_.replicas, head_.proposal, head_.plan_anew != 0);
  table_ = {};
  objects_ = {};
}

// A chunk's hash stands in the vault only once its bytes are there: readers of a slot that is not
// sealed take it for copied then.
void CopyStore::Incoming::hashChunks() {
  const std::byte* payload = vault_.payload(slot_);
  while (hashed_ < head_.chunk_count) {
    const uint64_t begin = hashed_ * head_.chunk_bytes;
    const uint64_t end = std::min(begin + head_.chunk_bytes, head_.payload_bytes);
    if (end > at_) {
      return;
    }
    if (hashBytes(payload + begin, end - begin) != hashes_[hashed_]) {
      mismatch(head_, "a chunk");
    }
    vault_.chunkHashes(slot_)[hashed_] = hashes_[hashed_];
    ++hashed_;
  }
}

std::unique_ptr<CopyStore::Incoming> CopyStore::begin(const SlotHead& head, Kept& answer) {
  const Owner owner{head.rank, head.world};
  auto found = kept_.find(owner);
  if (found == kept_.end()) {
    if (room_ && !room_(head.bytes())) {
      throw Unavailable("no memory for a copy of " + std::to_string(head.bytes()) + " bytes");
    }
    Vaulted kept;
    kept.vault = Vault::create({job_, head.rank, head.world}, kMaxSlots, kOpLogRecords);
    kept.vault->askRoom([this](uint64_t bytes) { return !room_ || room_(bytes); });
    UniqueFd shared(::fcntl(kept.vault->fd(), F_DUPFD_CLOEXEC, 3));
    if (!shared) {
      throw SystemError("duplicating the descriptor of a copy");
    }
    kept.shared = std::make_shared<const UniqueFd>(std::move(shared));
    kept.slots.resize(kMaxSlots);
    found = kept_.emplace(owner, std::move(kept)).first;
  }
  Vaulted& kept = found->second;
  if (std::any_of(kept.slots.begin(), kept.slots.end(),
                  [&](const Slot& slot) { return slot.key == head.key(); })) {
    answer = Kept::kYes;
    return nullptr;
  }
  const auto index = choose(kept, head);
  if (!index) {
    answer = Kept::kLater;
    return nullptr;
  }
  // All memory now: the owner waits for the answer, and can still be told that there is none.
  Slot& slot = kept.slots[*index];
  slot.key.reset();
  try {
    kept.vault->reserveSlot(*index, head.table_bytes, head.objects_bytes, head.chunk_count,
                            head.payload_bytes);
  } catch (const SystemError& error) {
    slot.used = kept.vault->payloadCapacity(*index) > 0;  // it may have lost its place
    throw Unavailable(error.what());
  }
  slot.used = true;
  return std::unique_ptr<Incoming>(new Incoming(*kept.vault, *index, head));
}

std::optional<uint32_t> CopyStore::choose(const Vaulted& kept, const SlotHead& head) const {
  std::optional<uint32_t> empty, oldest;
  uint32_t used = 0;
  for (uint32_t i = 0; i < kept.slots.size(); ++i) {
    const Slot& slot = kept.slots[i];
    used += slot.used ? 1 : 0;
    if (slot.used && !slot.key) {
      return i;  // left unfinished
    }
    if (!slot.used) {
      empty = empty.value_or(i);
    } else if (!isNeeded(*slot.key, head) &&
               (!oldest || slot.key->step < kept.slots[*oldest].key->step)) {
      oldest = i;
    }
  }
  if (oldest && (used >= kUsually || !empty)) {
    return oldest;
  }
  return empty ? empty : oldest;
}

void CopyStore::seal(Incoming& incoming, int64_t now_ns) {
  const SlotHead& head = incoming.head_;
  if (incoming.part_ != Incoming::Part::kDone) {
    throw InvalidArgument("a slot", "not complete", "a complete one");
  }
  incoming.vault_.sealSlot(incoming.slot_, {head.group_digests, head.group_count}, now_ns);
  Vaulted& kept = kept_.at({head.rank, head.world});
  kept.slots[incoming.slot_].key = head.key();
  // The third slot goes as soon as nothing needs it.
  uint32_t used = 0;
  for (const Slot& slot : kept.slots) {
    used += slot.used ? 1 : 0;
  }
  for (uint32_t i = 0; i < kept.slots.size() && used > kUsually; ++i) {
    Slot& slot = kept.slots[i];
    if (slot.used && slot.key && slot.key != head.key() && !isNeeded(*slot.key, head)) {
      kept.vault->releaseSlot(i);
      slot = Slot();
      --used;
    }
  }
}

std::vector<CopyStore::Copy> CopyStore::copies() const {
  std::vector<Copy> result;
  for (const auto& [owner, kept] : kept_) {
    result.push_back({owner, kept.shared});
  }
  return result;
}

void CopyStore::complete(const Owner& owner, uint64_t writer, int64_t resumed) {
  if (const auto found = kept_.find(owner); found != kept_.end()) {
    RankStats& stats = found->second.vault->stats();
    stats.restored_step.store(static_cast<uint64_t>(resumed));
    stats.incarnation.store(writer);
  }
}

void CopyStore::dropEmpty() {
  std::erase_if(kept_, [](const auto& entry) {
    return std::ranges::none_of(entry.second.slots,
                                [](const Slot& slot) { return slot.key.has_value(); });
  });
}

void CopyStore::keepOnly(const std::set<Owner>& owners) {
  std::erase_if(kept_, [&](const auto& entry) {
    const bool gone = !owners.contains(entry.first);
    if (gone) {
      logInfo("agent", "the copy of rank ", entry.first.rank, " is no longer needed");
    }
    return gone;
  });
}

uint64_t CopyStore::bytes() const {
  uint64_t sum = 0;
  for (const auto& [owner, kept] : kept_) {
    for (uint32_t i = 0; i < kept.slots.size(); ++i) {
      sum += kept.slots[i].used ? kept.vault->payloadCapacity(i) : 0;
    }
  }
  return sum;
}

}  // namespace reft::agent

// A protection decides what a rank stores beside its own shard, and how a lost shard comes back.
//
// The members of a sharding group are numbered from 0 in ascending order of their ranks. Shard k is
// the own shard of member k. What a member stores of others is that of members on other nodes,
// wherever the group allows it (ring.h). Every other file asks this interface; none compares
// names. A new protection is one file in this folder, one line in protection.cc, and its name in
// the setting (intercept/base/env.h). In a group of D members, part D + k is the parity of member k
// (snapshot/state/parity_cells.h).
//
// Threads: immutable. Errors: named() throws InvalidArgument.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "snapshot/protect/ring.h"

namespace reft {

// How the stored parts of a recipe become a shard.
enum class Decode : uint8_t {
  kCopy,  // one part, which is the shard
  kXor,   // the parities of the other members of its set, and their shards
};

// What one member stores: a shard of its group, or a parity.
struct StoredPart {
  uint32_t member = 0;
  uint32_t shard = 0;
  bool operator==(const StoredPart&) const = default;
};

// One way to get a shard back; it needs all of its parts. The shards that kXor needs are no parts
// of it: who takes a group takes all of its shards.
struct Recipe {
  Decode decode = Decode::kCopy;
  std::vector<StoredPart> parts;
  bool operator==(const Recipe&) const = default;
};

// Per member of a group, the parts that its vault holds intact, ascending; empty: a lost member.
using StoredShards = std::vector<std::vector<uint32_t>>;
// Members of a group whose shards have parities in common.
using ParitySets = std::vector<std::vector<uint32_t>>;

// How many nodes a group may lose.
struct Survival {
  uint32_t nodes = 0;             // every shard comes back after the loss of so many, whichever
  std::vector<uint32_t> weakest;  // the members whose loss would be too much: on nodes + 1 nodes
};

class Protection {
 public:
  virtual ~Protection() = default;

  // The protection that REFT_SNAPSHOT_PROTECTION or a snapshot's table names.
  static const Protection& named(std::string_view name);

  virtual std::string_view name() const = 0;
  // How many lost nodes a group of so many members survives if each is on a node of its own.
  virtual uint32_t losses(uint32_t members) const = 0;
  // How many times the bytes of a shard the member that stores most does.
  virtual double storedShards(const MemberNodes& nodes) const = 0;
  // Whether it stores parities, which not every device can make (snapshot/device/device_xor.h).
  virtual bool hasParities() const { return false; }
  // The parity sets of a group; none: the protection stores no parities.
  virtual ParitySets paritySets(const MemberNodes& /*nodes*/) const { return {}; }
  // Per member, the parts that it stores: its own shard first.
  virtual StoredShards placement(const MemberNodes& nodes) const = 0;
  // Per shard of the group, all ways to get it back from what the vaults hold; none: it is lost.
  // `sets`: with which it was stored. Takes time in the number of parts that are stored and the
  // size of a set, not in the square of the members.
  virtual std::vector<std::vector<Recipe>> recipes(const StoredShards& stored,
                                                   const ParitySets& sets) const = 0;
  virtual Survival survival(const MemberNodes& nodes) const = 0;

  // Whether every shard comes back after the loss of the vaults of the members in `lost`.
  bool survives(const MemberNodes& nodes, const std::vector<bool>& lost) const;
};

}  // namespace reft

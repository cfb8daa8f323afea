// Whether the members of each sharding group agree on what they share. If they do not, their
// shards do not fit together, and no restart could use the snapshot.
//
// Each rank adds one number to its vote. It has one term per group, from a key that covers the
// layout of the group and a digest of its contents. The terms of all members of a group add up to
// 0 (mod 2^64) if their keys are equal, and almost surely not otherwise; so it is for a member that
// does not list the group. A group of one member adds nothing: the planner of a rank makes none.
// The sum over all ranks is thus 0 only if all members of all groups agree (the same ring as in
// intercept/record/cut.h).
//
// Threads: re-entrant. Errors: none.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "snapshot/state/table.h"

namespace reft {

// Hash of what the members of each group have to agree on before any contents: id, ranks,
// protection, parity sets, and name, dtype, shape, bytes and row of each of its regions, in table
// order.
std::vector<uint64_t> groupLayouts(const SnapshotTable& table);

// This rank's number. `layouts`: groupLayouts(table). `digests`: of each group's contents; those
// that are missing at the end count as 0.
uint64_t agreementOf(const SnapshotTable& table, std::span<const uint64_t> layouts,
                     std::span<const uint64_t> digests);

}  // namespace reft

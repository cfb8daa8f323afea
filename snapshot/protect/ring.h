// The order in which the members of a group keep each other's shards.
//
// Threads: any. Errors: none.
#pragma once

#include <cstdint>
#include <vector>

namespace reft {

// Per member of a group, in ascending order of their ranks: a number of its node.
using MemberNodes = std::vector<int>;

// The members in rows, as many as the node with the most members has. The members of a row are on
// nodes of their own; rows differ by one member at most. Members of a node keep their order.
std::vector<std::vector<uint32_t>> rowsOf(const MemberNodes& nodes);

// The members as a ring, row by row, in which those of one node lie as far from each other as the
// node with the most members allows: `width` places or more, where width = members / members of
// that node, rounded down. No ring has a larger distance, so copies at the next `width - 1` places
// are on nodes of their own. On one node alone, the ring is ascending.
std::vector<uint32_t> ringOf(const MemberNodes& nodes);

}  // namespace reft

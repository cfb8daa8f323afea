// The order in which the members of a group keep each other's shards.
//
// Threads: any. Errors: none.
#pragma once

#include <cstdint>
#include <vector>

namespace reft {

// Per member of a group, in ascending order of their ranks: a number of its node.
using MemberNodes = std::vector<int>;

// The members as a ring in which those of one node lie as far from each other as the node with the
// most members allows: `width` places or more, where width = members / members of that node,
// rounded down. No ring has a larger distance, so copies at the next `width - 1` places are on
// nodes of their own. Members of a node keep their order; on one node alone, the ring is ascending.
std::vector<uint32_t> ringOf(const MemberNodes& nodes);

}  // namespace reft

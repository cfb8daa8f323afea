// The sentences of a verdict: what is seen, and what to do next.
//
// Threads: free functions, re-entrant. Errors: none (except std::bad_alloc).
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "hang_detect/verdict/habit.h"
#include "hang_detect/verdict/job_view.h"
#include "hang_detect/verdict/verdict.h"
#include "hang_detect/verdict/wait_graph.h"

namespace reft {

// Members of a group that agree with each other about an op.
struct OpSide {
  const OpEntry* op = nullptr;  // as its first member has it
  std::vector<size_t> ranks;    // indices into HangEvidence::ranks
};

// "seq 6 of group default:", then a line for each side in the order given:
// "rank 1 calls broadcast (4.0 MiB, float32, root 0) at jobs/train.py:9 step".
std::string disagreementSentence(const JobView& view, const GroupLog& group, uint32_t seq,
                                 const std::vector<OpSide>& sides);

// ": it calls broadcast (4.0 MiB, float32, root 0) at jobs/train.py:9 step": the op of this number
// in the group, by rank; without the ranks whose log lacks it.
std::map<int, std::string> whatEachCalls(const JobView& view, const GroupLog& group, uint32_t seq);

// "all_reduce"; "an op" where no waiting rank has it.
std::string opOf(const CollectiveWait& wait);

// A sentence for each wait, the widest first; the last one counts those left out.
std::vector<std::string> waitSentences(const JobView& view, const WaitGraph& graph);

// ": it is in all_reduce seq 6 of group default, called at train.py:9"; "" if it waits in no op.
std::string whereInOp(const JobView& view, int rank);

// "the device of rank 3 has not reached all_reduce seq 6 of group default, called at train.py:9: …"
std::string behindText(const JobView& view, int rank, const OpEntry& op);

// " departs from its habit: it calls recv from 2 at jobs/train.py:9 step, where it has called send
// to 2 at jobs/train.py:8 step all 7 times before"
std::string departureText(const JobView& view, const Departure& departure);

// "node 1 does not answer: no evidence about its ranks"
std::string silentNodesSentence(std::vector<int> nodes);

std::string adviceFor(const HangEvidence& evidence, const Verdict& verdict);

}  // namespace reft

// What an Investigation asks of the agent that runs it. The agent executes actions in order.
//
// Threads: values. Errors: none.
#pragma once

#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "agent/hang/finding.h"
#include "agent/peers/messages.h"
#include "hang_detect/evidence/evidence.h"

namespace reft::agent {

namespace action {

// Sample the processes of these ranks, then call Investigation::sampled().
struct Sample {
  uint64_t look = 0;
  std::vector<int> ranks;
  bool children = false;  // with the list of their children
};
// Note what the processes of the live ranks have used, then call Investigation::counted().
struct Count {};
// Read the hardware counters of the node, unless that has just been done; NodeFacts has what they
// say.
struct ReadHardware {
  bool again = false;  // although it has just been done
};
// Ask these connections for the stacks of their ranks; answers go to Investigation::replied().
struct AskForStacks {
  uint64_t look = 0;
  std::vector<uint64_t> connections;
};
// Read the stacks of these processes from their memory, one after the other; results go to
// Investigation::readOutside().
struct ReadOutside {
  uint64_t look = 0;
  std::vector<int> pids;
};
// Examine these ranks (process, op log, counters) without asking them, then call
// Investigation::examined().
struct Examine {
  uint64_t look = 0;
  std::vector<int> ranks;
};
// Have a rank send this to the other nodes. kEvidence: call Investigation::gathering() with the
// rank's connection; the answers go to Investigation::gathered().
struct AskNodes {
  uint64_t look = 0;  // 0: no answer is expected
  double seconds = 0;
  NodeRequest kind = NodeRequest::kHold;
};
// Answer the request of another node.
struct AnswerNode {
  uint64_t request = 0;
  std::vector<uint64_t> connections;
  int64_t asked_ns = 0;
  HangEvidence evidence;
  int nodes = 1;
};
// Answer a tool with this report.
struct AnswerTool {
  uint64_t connection = 0;
  std::string json;
};
// Write the report on a hang or a crash (a quiet one: to the log alone), then call
// Investigation::written().
struct WriteReport {
  uint64_t incarnation = 0;
  uint64_t speaker = 0;  // connection of the rank whose terminal shows it; 0: none
  bool crash = false;    // the ranks may be gone before they can show it
  bool ends = false;     // it says how ranks ended
  bool quiet = false;    // a person ended them: no terminal shows it, and no file has it
  int loop = 0;          // so many attempts have failed so, and the launcher is to end; 0: no
  Finding finding;
  HangEvidence evidence;
};
// Show this text on the terminal of the rank at this connection.
struct Show {
  uint64_t connection = 0;
  std::string text;
};
// Write this text where the launcher writes, because ranks are about to be gone: call
// Investigation::shown() if that is done, else show it on the terminal of the rank at this
// connection.
struct ShowAtLauncher {
  std::string text;
  uint64_t connection = 0;  // 0: none
};
// End the launcher, which would start the ranks again.
struct EndLauncher {};
// End the ranks of this incarnation.
struct Abort {
  uint64_t incarnation = 0;
  uint64_t speaker = 0;  // connection of the rank whose terminal shows why
  std::string why;
};

}  // namespace action

using Action =
    std::variant<action::Sample, action::Count, action::ReadHardware, action::AskForStacks,
                 action::ReadOutside, action::Examine, action::AskNodes, action::AnswerNode,
                 action::AnswerTool, action::WriteReport, action::Show, action::ShowAtLauncher,
                 action::EndLauncher, action::Abort>;

}  // namespace reft::agent

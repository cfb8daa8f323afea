// Runs the Investigation of this agent: feeds it what the agent learns, and executes its actions on
// the ranks of the node (messages, /proc, memory of other processes, report files).
//
// Threads: the agent's loop only. Errors: toolAsks() throws InvalidArgument; what cannot be written
// is logged.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "agent/hang/abort.h"
#include "agent/hang/actions.h"
#include "agent/hang/investigation.h"
#include "agent/hang/outside_stacks.h"
#include "agent/hang/rank_examiner.h"
#include "agent/hang/report_folder.h"
#include "agent/health/hardware_watch.h"
#include "agent/peers/connection.h"
#include "agent/peers/messages.h"
#include "agent/peers/rank_table.h"

namespace reft::agent {

// "" if it is unknown.
std::string bootId();

class InvestigationRunner {
 public:
  // `directory`: the agent's, open, at `path`; reports go to verdicts/ in it. `wake`: an eventfd of
  // the loop.
  InvestigationRunner(const Investigation::Settings& settings, int directory,
                      const std::string& path, RankTable& ranks, Connections& connections,
                      HardwareWatch& hardware, int wake);

  void setDirectory(int directory, const std::string& path) { reports_.move(directory, path); }

  // Call every Settings::tick_ns.
  void tick(int64_t now_ns);
  // Call after each batch of messages.
  void step(int64_t now_ns);

  void setNode(int node) {
    settings_.node = node;
    investigation_.setNode(node);
  }
  void rankJoined(Connection& connection, const RankState& rank);
  // The process has ended; `rank` is no longer alive.
  void rankEnded(RankState& rank, int64_t now_ns);
  // The first rank of the node has voted.
  void rankVoted(const RankState& rank, int64_t now_ns);
  void stackReply(const RankState& rank, std::string payload);
  void evidenceRequested(const Connection& connection, const EvidenceRequest& request,
                         int64_t now_ns);
  void gathered(const Connection& connection, Gathered message, int64_t now_ns);
  void toolAsks(const Connection& connection, const std::vector<int>& ranks, int64_t now_ns);

  const Investigation& investigation() const { return investigation_; }

 private:
  void learn();
  // Executes actions until there are no more.
  void execute(int64_t now_ns);
  void execute(const action::Sample& action, int64_t now_ns);
  void execute(const action::Count& action, int64_t now_ns);
  void execute(const action::ReadHardware& action, int64_t now_ns);
  void execute(const action::AskForStacks& action, int64_t now_ns);
  void execute(const action::ReadOutside& action, int64_t now_ns);
  void execute(const action::Examine& action, int64_t now_ns);
  void execute(const action::AskNodes& action, int64_t now_ns);
  void execute(const action::AnswerNode& action, int64_t now_ns);
  void execute(const action::AnswerTool& action, int64_t now_ns);
  void execute(const action::WriteReport& action, int64_t now_ns);
  void execute(const action::Show& action, int64_t now_ns);
  void execute(const action::ShowAtLauncher& action, int64_t now_ns);
  void execute(const action::EndLauncher& action, int64_t now_ns);
  void execute(const action::Abort& action, int64_t now_ns);
  void send(uint64_t connection, wire::Type type, std::string_view payload);
  Connection* carrier();
  bool traced();

  Investigation::Settings settings_;
  ReportFolder reports_;
  RankTable& ranks_;
  Connections& connections_;
  HardwareWatch& hardware_;
  Investigation investigation_;
  OutsideStacks outside_stacks_;
  Aborter aborter_;
};

}  // namespace reft::agent

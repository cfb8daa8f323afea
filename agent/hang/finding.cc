#include "agent/hang/finding.h"

#include <algorithm>

#include "hang_detect/report/report.h"
#include "hang_detect/report/verdict_text.h"

namespace reft::agent {

Finding judge(const HangEvidence& evidence) {
  return findingOf(evidence, decide(evidence));
}

Finding findingOf(const HangEvidence& evidence, const Verdict& verdict) {
  Finding finding;
  finding.state = verdict.state;
  finding.confidence = verdict.confidence;
  finding.json = hangReportJson(evidence, verdict);
  finding.text = hangReportText(evidence, verdict);
  finding.screen = verdictText(evidence, verdict);
  finding.summary = verdict.what;
  for (const Culprit& culprit : verdict.culprits) {
    finding.summary += " " + std::to_string(culprit.rank) + " " + culprit.reason;
    if (culprit.frame) {
      finding.summary += " " + culprit.frame->file + ":" + std::to_string(culprit.frame->line);
    }
    const auto rank =
        std::find_if(evidence.ranks.begin(), evidence.ranks.end(),
                     [&](const RankEvidence& entry) { return entry.rank == culprit.rank; });
    finding.at_work = finding.at_work || (rank != evidence.ranks.end() && atWork(*rank, culprit));
  }
  finding.disagreement =
      std::any_of(verdict.disagreements.begin(), verdict.disagreements.end(),
                  [&](const Disagreement& found) { return found.what == verdict.what; });
  finding.prompt = std::any_of(evidence.ranks.begin(), evidence.ranks.end(), atDebuggerPrompt);
  finding.somebody_died = std::any_of(
      evidence.ranks.begin(), evidence.ranks.end(),
      [](const RankEvidence& rank) { return !rank.alive && !rank.said_bye && rank.pid > 0; });
  finding.traced =
      std::any_of(evidence.ranks.begin(), evidence.ranks.end(),
                  [](const RankEvidence& rank) { return rank.alive && rank.tracer_pid > 0; });
  finding.nodes = evidence.nodes;
  finding.silent = !evidence.silent_nodes.empty();
  finding.excused = verdict.at_work;
  finding.wait = verdict.group + " " + std::to_string(verdict.seq);
  finding.could_come = verdict.could_come;
  return finding;
}

}  // namespace reft::agent

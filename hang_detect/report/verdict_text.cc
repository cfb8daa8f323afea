#include "hang_detect/report/verdict_text.h"

#include <algorithm>
#include <vector>

#include <nlohmann/json.hpp>

#include "hang_detect/evidence/words.h"
#include "hang_detect/report/wrap.h"
#include "hang_detect/stacks/printable.h"

namespace reft {

std::string verdictText(const HangEvidence& evidence, const Verdict& verdict) {
  constexpr size_t kLines = 24;
  constexpr size_t kSentenceLines = 3;
  constexpr double kShortestReportedSec = 0.5;
  std::vector<std::string> lines;
  const auto add = [&lines](const std::string& text, size_t indent, size_t most) {
    const std::string wrapped = wrapText(text, indent);
    size_t count = 0;
    for (size_t at = 0; at <= wrapped.size() && count < most; ++count) {
      const size_t end = std::min(wrapped.find('\n', at), wrapped.size());
      lines.push_back(wrapped.substr(at, end - at));
      at = end + 1;
    }
  };
  // Ranks disagree, and the transport has ended one for it; another transport would have hung.
  const bool crash =
      verdict.state == VerdictState::kHang && verdict.pattern == "P2" &&
      std::any_of(evidence.ranks.begin(), evidence.ranks.end(),
                  [](const RankEvidence& rank) { return !rank.alive && !rank.said_bye; });
  std::string head = "reft: job " + printable(evidence.job, 40) + ": " +
                     (crash ? "crash" : stateName(verdict.state)) + ", " + verdict.what + " (" +
                     confidenceName(verdict.confidence) + ")";
  const bool ends = verdict.state == VerdictState::kCrash;
  if (verdict.waited_sec > kShortestReportedSec) {
    head += ", no progress for " + words::seconds(verdict.waited_sec);
  }
  add(head, 2, 2);
  const bool named = verdict.confidence != Confidence::kUndecidable;
  const auto& list = named ? verdict.culprits : verdict.candidates;
  if (list.empty()) {
    add(!verdict.dead_paths.empty()               ? "culprit: the network, and no rank"
        : verdict.state == VerdictState::kHealthy ? "no rank holds up the job"
                                                  : "inconclusive: the evidence names no rank",
        2, 2);
  }
  for (size_t i = 0; i < list.size() && i < 4; ++i) {
    add((ends && named ? "failed first: "
         : ends        ? "ended: "
         : named       ? "culprit: "
                       : "undecidable, one of: ") +
            list[i].text + (list[i].host.empty() ? "" : ", on " + printable(list[i].host, 40)),
        4, 3);
  }
  if (list.size() > 4) {
    std::vector<int> ranks;
    ranks.reserve(list.size());
    for (const Culprit& culprit : list) {
      ranks.push_back(culprit.rank);
    }
    add("in all: " + words::rankList(ranks), 4, 2);
  }
  if (!verdict.victims.empty()) {
    add((ends ? "ended in consequence: " : "waiting: ") + words::rankList(verdict.victims), 4, 2);
  }
  const size_t after = verdict.remedy == Remedy::kNone ? 3 : 4;  // lines of what follows
  for (size_t i = 0; i < verdict.evidence.size() && lines.size() + after < kLines - 1; ++i) {
    const std::string& sentence = verdict.evidence[i];
    // The sides of a disagreement have a line each.
    const auto more = static_cast<size_t>(std::count(sentence.begin(), sentence.end(), '\n'));
    add("- " + sentence, 4, std::min(kSentenceLines + more, kLines + 1 - after - lines.size()));
  }
  if (verdict.remedy != Remedy::kNone) {
    add(std::string("class: ") + remedyName(verdict.remedy), 4, 1);
  }
  add("next: " + verdict.advice, 4, 2);
  std::string text;
  for (size_t i = 0; i < lines.size() && i < kLines; ++i) {
    text += lines[i].substr(0, 80) + "\n";
  }
  return text;
}

nlohmann::json disagreementFields(const Disagreement& found) {
  return {{"class", found.what},        {"group", found.group}, {"seq", found.seq},
          {"minority", found.minority}, {"ranks", found.ranks}, {"waited_for", found.waited_for},
          {"text", found.text}};
}

}  // namespace reft

// Which rank of a job failed first, how, and who ended only in consequence: a pure function from
// evidence to a verdict, as verdict.h. It is asked once the ranks of a node have ended, or some of
// them for long enough.
//
// crashRules() is a table; the first row that matches says of which class the end of a rank is.
// docs/crash.md lists the classes. A rank whose transport failed, or that was ended by its
// launcher, ended in consequence; the others failed by themselves. Of these, the first one is
// named, with all that failed alike or at the same time. If the hardware of its node has failed
// (HardwareNote::fatal) and may be the reason, the remedy is to exclude the node.
//
// Threads: free functions, re-entrant; the table is constant.
// Errors:  none, whatever the evidence holds (except std::bad_alloc).
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "hang_detect/evidence/evidence.h"
#include "hang_detect/verdict/verdict.h"

namespace reft {

struct CrashRule {
  enum class Share : uint8_t {
    kOwn,          // it failed by itself
    kConsequence,  // what it met says that another rank or the network failed
    kOutside,      // a person or a program ended it
  };
  const char* reason;  // class word in reports
  Share share;
  Remedy remedy;
  bool (*matches)(const RankEvidence&);
  std::string (*sentence)(const RankEvidence&);  // continues "rank 3 "
  const char* advice;
};

// Never empty; the last row matches any rank.
std::span<const CrashRule> crashRules();
const CrashRule& crashRuleFor(const RankEvidence& rank);

// A verdict of state kCrash, or kHealthy if no rank ended without a clean end.
Verdict decideCrash(const HangEvidence& evidence);

}  // namespace reft

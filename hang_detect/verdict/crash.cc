#include "hang_detect/verdict/crash.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cinttypes>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <initializer_list>
#include <iterator>
#include <optional>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "hang_detect/evidence/oom_kills.h"
#include "hang_detect/evidence/words.h"
#include "hang_detect/stacks/printable.h"

namespace reft {

namespace {

using Share = CrashRule::Share;

// Failures within this time may have happened in any order.
constexpr int64_t kFailedTogetherNs = 1'000'000;
// A rank may hide what it met behind an error of its own, and be quicker to say it than the rank
// that failed first.
constexpr int64_t kDoubtfulNs = 1'000'000'000;
// From the end of a process to its notice; a launcher takes longer than that to end the others.
constexpr int64_t kNoticedNs = 50'000'000;
// A program that kills several ranks does it one after the other.
constexpr int64_t kKilledTogetherNs = 100'000'000;
constexpr size_t kMostMessage = 160;

// The exception that ended the rank, and what it was raised from, say any of `parts`: that of
// Python, else the message of that of C++, whose type says little (NCCL's watchdog has one for
// all).
bool says(const RankEvidence& rank, std::initializer_list<std::string_view> parts) {
  if (!rank.ending.exception) {
    const auto& fault = rank.ending.fault;
    return fault && std::any_of(parts.begin(), parts.end(), [&](std::string_view part) {
             return fault->message.find(part) != std::string::npos;
           });
  }
  const Uncaught& end = *rank.ending.exception;
  return std::any_of(parts.begin(), parts.end(), [&](std::string_view part) {
    return end.message.find(part) != std::string::npos ||
           end.type.find(part) != std::string::npos ||
           std::any_of(end.causes.begin(), end.causes.end(), [part](const std::string& cause) {
             return cause.find(part) != std::string::npos;
           });
  });
}

bool isErrno(const RankEvidence& rank, std::initializer_list<int> numbers) {
  return rank.ending.exception && std::find(numbers.begin(), numbers.end(),
                                            rank.ending.exception->error_number) != numbers.end();
}

int signalOf(const RankEvidence& rank) {
  return rank.ending.signal != 0                          ? rank.ending.signal
         : rank.ending.fault && rank.ending.exit_code < 0 ? rank.ending.fault->signal
                                                          : 0;
}

bool isKilledByKernel(const RankEvidence& rank) {
  const int signal = signalOf(rank);
  return rank.oom_kills > 0 && !rank.ending.exception &&
         (signal == SIGKILL || (signal == 0 && rank.ending.empty()));
}

constexpr std::array<std::string_view, 6> kEndsProcesses = {
    "/libc.so", "/libc-2.", "/libpthread", "/libstdc++.so", "/libc++abi", "/libgcc_s.so"};

// The frame to report: the user's own code where there is some.
std::optional<StackFrame> frameOf(const Uncaught& end) {
  return end.frames.empty() ? std::nullopt : std::optional(ownFrame(end.stack()));
}

std::string placeOf(const Uncaught& end) {
  const std::string place = placeOf(end.stack());
  return place.empty() ? "" : " at " + place;
}

const ThreadStack* stackOf(const FatalSignal& fault) {
  char name[32];
  std::snprintf(name, sizeof(name), "0x%016" PRIx64, fault.thread);
  const auto& threads = fault.stacks.parsed().threads;
  const auto found = std::find_if(threads.begin(), threads.end(), [&](const ThreadStack& thread) {
    return thread.thread == name && !thread.frames.empty();
  });
  return found == threads.end() ? nullptr : &*found;
}

// The newest native frame outside of the libraries by way of which a process aborts itself.
const FaultFrame* nativeFrameOf(const FatalSignal& fault) {
  const FaultFrame* newest = nullptr;
  // Between abort() and std::terminate() is the handler that has kept what was thrown: reft's.
  const auto called = std::find_if(
      fault.frames.begin(), fault.frames.end(),
      [](const FaultFrame& frame) { return frame.function.find("std::terminate") == 0; });
  const auto begin =
      fault.thrown.empty() || called == fault.frames.end() ? fault.frames.begin() : called;
  for (auto at = begin; at != fault.frames.end(); ++at) {
    const FaultFrame& frame = *at;
    if (frame.isNative()) {
      newest = newest == nullptr ? &frame : newest;
      if (std::ranges::none_of(kEndsProcesses, [&](std::string_view name) {
            return frame.object.find(name) != frame.object.npos;
          })) {
        return &frame;
      }
    }
  }
  return newest;
}

std::string firstLine(std::string_view text) {
  return printable(text.substr(0, text.find('\n')), kMostMessage);
}

// What a C++ exception says, without the lines that torch puts before it: "[PG ID 0 … Rank 0]
// Process group watchdog thread terminated with exception: CUDA error: …".
std::string essenceOf(const FatalSignal& fault) {
  constexpr std::string_view kAfter = "terminated with exception: ";
  const size_t at = fault.message.find(kAfter);
  return firstLine(
      std::string_view(fault.message).substr(at == fault.message.npos ? 0 : at + kAfter.size()));
}

std::string ended(const RankEvidence& rank);

std::string raised(const RankEvidence& rank) {
  if (!rank.ending.exception) {
    return ended(rank);
  }
  const Uncaught& end = *rank.ending.exception;
  const std::string message = firstLine(end.message);
  return "raised " + printable(end.type, 80) + placeOf(end) +
         (end.thread.empty() ? "" : " in " + printable(end.thread, 40)) +
         (message.empty() ? "" : ": " + message);
}

std::string ended(const RankEvidence& rank) {
  const int signal = signalOf(rank);
  std::string text = "was ended by " + signalName(signal);
  if (const auto& fault = rank.ending.fault; fault && fault->signal == signal) {
    const bool threw = !fault->thrown.empty();
    if (threw) {
      const std::string message = essenceOf(*fault);
      text += " for " + printable(fault->thrown, 80) + (message.empty() ? "" : ": " + message);
    }
    if (const ThreadStack* stack = stackOf(*fault)) {
      text += (threw ? ", at " : " at ") + placeOf(*stack);
    }
    if (const FaultFrame* frame = nativeFrameOf(*fault)) {
      text += ", in " + printable(frame->text(), 120);
    }
    if (!fault->main) {
      text += ", not in its main thread";
    }
  }
  return text;
}

bool hasException(const RankEvidence& rank) {
  return rank.ending.exception.has_value();
}

bool isAnyOf(int signal, std::initializer_list<int> signals) {
  return std::find(signals.begin(), signals.end(), signal) != signals.end();
}

// What torch, gloo and NCCL say when a peer is gone.
bool lostItsPeer(const RankEvidence& rank) {
  return says(rank, {"DistBackendError", "DistNetworkError", "DistStoreError",
                     "DistQueueEmptyError", "Connection closed by peer", "Connection reset by peer",
                     "Socket closed", "Gloo connectFullMesh failed", "gloo/transport/",
                     "remote process exited", "NCCL communicator was aborted", "ncclRemoteError",
                     "recvValue failed", "failed to recv, got 0 bytes", "sendBytes failed",
                     "Broken pipe", "the connection to the store", "monitoredBarrier"});
}

bool timedOut(const RankEvidence& rank) {
  return says(rank, {"Timed out waiting", "timed out after", "Watchdog caught collective",
                     "wait timeout after", "Timeout waiting for"});
}

// The order is the precedence. What the kernel says comes before what Python saw of it.
constexpr CrashRule kCrashRules[] = {
    {"oom_kill", Share::kOwn, Remedy::kFixProgram, isKilledByKernel,
     [](const RankEvidence&) { return std::string("was ended by SIGKILL; ") + kOomKillText; },
     "give the ranks of that node more host memory, or reduce what they need; dmesg names the "
     "killed process"},
    {"interrupted", Share::kOutside, Remedy::kNone,
     [](const RankEvidence& rank) {
       return says(rank, {"KeyboardInterrupt"}) ||
              (signalOf(rank) == SIGINT && !hasException(rank));
     },
     [](const RankEvidence&) { return std::string("was interrupted (SIGINT)"); },
     "nothing, if you pressed Ctrl-C"},
    {"terminated", Share::kOutside, Remedy::kRetry,
     [](const RankEvidence& rank) {
       // What it raised before counts, not how it was helped to its end.
       return says(rank, {"SignalException"}) ||
              (!hasException(rank) && (isAnyOf(signalOf(rank), {SIGTERM, SIGHUP, SIGQUIT}) ||
                                       rank.ending.exit_code == 128 + SIGTERM));
     },
     [](const RankEvidence& rank) {
       const int signal = signalOf(rank);
       return "was ended by " + signalName(signal == 0 ? SIGTERM : signal) +
              ", as a launcher or a scheduler does";
     },
     "ask what ended the job: its launcher, its scheduler (preemption, time limit), or a person"},
    {"data_worker", Share::kOwn, Remedy::kRetry,
     [](const RankEvidence& rank) {
       return says(rank, {"DataLoader worker (pid"}) && rank.oom_kills <= 0;
     },
     [](const RankEvidence& rank) { return "lost a data worker: it " + raised(rank); },
     "read what the worker wrote; a worker that is killed mostly lacks host or shared memory"},
    {"oom_kill", Share::kOwn, Remedy::kFixProgram,
     [](const RankEvidence& rank) { return says(rank, {"DataLoader worker (pid"}); },
     [](const RankEvidence& rank) {
       return "lost a data worker: it " + raised(rank) + "; " + kOomKillText;
     },
     "give the ranks of that node more host memory, or use fewer data workers"},
    {"device_memory", Share::kOwn, Remedy::kFixProgram,
     [](const RankEvidence& rank) {
       return says(rank, {"OutOfMemoryError", "CUDA out of memory", "HIP out of memory",
                          "CUBLAS_STATUS_ALLOC_FAILED"});
     },
     raised, "use less device memory: smaller batches, activation checkpointing, sharding"},
    {"device", Share::kOwn, Remedy::kExcludeNode,
     [](const RankEvidence& rank) {
       return says(
           rank, {"uncorrectable ECC", "ECC error", "hardware error", "NVLink",
                  "cudaErrorECCUncorrectable", "cudaErrorHardwareStackError",
                  "device is unavailable", "CUDA-capable device(s) is/are busy", "fell off the bus",
                  "system not yet initialized", "no CUDA-capable device"});
     },
     raised, "exclude that node, and test its device (nvidia-smi -q, dmesg: Xid)"},
    {"device", Share::kOwn, Remedy::kFixProgram,
     [](const RankEvidence& rank) { return says(rank, {"device-side assert"}); }, raised,
     "the kernel got wrong input (an index out of range?): run with CUDA_LAUNCH_BLOCKING=1"},
    {"device", Share::kOwn, Remedy::kRetry,
     [](const RankEvidence& rank) {
       return says(rank, {"CUDA error", "cudaError", "CUBLAS_STATUS", "CUDNN_STATUS", "HIP error",
                          "unspecified launch failure", "illegal memory access"});
     },
     raised,
     "an error of a device shows late: run with CUDA_LAUNCH_BLOCKING=1 to find its line; exclude "
     "the node if it comes again there"},
    {"communication", Share::kConsequence, Remedy::kRetry, lostItsPeer, raised,
     "find what its peer did; if none failed before, check the network: the link of that node"},
    {"timeout", Share::kConsequence, Remedy::kRetry, timedOut, raised,
     "find the rank that did not come: the report of the hang names it"},
    {"host_memory", Share::kOwn, Remedy::kFixProgram,
     [](const RankEvidence& rank) {
       return says(rank, {"MemoryError", "can't allocate memory", "Cannot allocate memory",
                          "std::bad_alloc"}) ||
              isErrno(rank, {ENOMEM});
     },
     raised, "give the ranks of that node more host memory, or reduce what they need"},
    {"disk_full", Share::kOwn, Remedy::kFixProgram,
     [](const RankEvidence& rank) {
       return isErrno(rank, {ENOSPC, EDQUOT}) ||
              says(rank, {"No space left on device", "Disk quota exceeded"});
     },
     raised, "free space there, or write elsewhere"},
    {"disk", Share::kOwn, Remedy::kExcludeNode,
     [](const RankEvidence& rank) {
       return isErrno(rank, {EIO, EROFS, ESTALE}) ||
              says(rank, {"Input/output error", "Read-only file system", "Stale file handle"});
     },
     raised, "check the disk or the file system of that node (dmesg), or exclude the node"},
    {"exception", Share::kOwn, Remedy::kFixProgram, hasException, raised,
     "read that rank's traceback: the line above is where it was raised"},
    {"signal", Share::kOwn, Remedy::kFixProgram,
     [](const RankEvidence& rank) {
       return isAnyOf(signalOf(rank), {SIGSEGV, SIGILL, SIGFPE, SIGSYS, SIGTRAP});
     },
     ended,
     "native code failed: read the stacks in the report; an extension may not fit this torch"},
    {"signal", Share::kOwn, Remedy::kFixProgram,
     [](const RankEvidence& rank) { return signalOf(rank) == SIGBUS; }, ended,
     "a mapped file was cut, or /dev/shm is full: df /dev/shm"},
    {"abort", Share::kOwn, Remedy::kFixProgram,
     [](const RankEvidence& rank) { return signalOf(rank) == SIGABRT; }, ended,
     "native code gave up: read that rank's last lines, it mostly says why"},
    {"killed", Share::kOwn, Remedy::kRetry,
     [](const RankEvidence& rank) { return signalOf(rank) == SIGKILL; },
     [](const RankEvidence&) {
       return std::string("was ended by SIGKILL, and not by the OOM killer of its cgroup");
     },
     "ask who kills processes there: a person, the scheduler, or a memory limit above the cgroup "
     "(dmesg)"},
    {"signal", Share::kOwn, Remedy::kRetry,
     [](const RankEvidence& rank) { return signalOf(rank) != 0; }, ended,
     "ask what sent the signal"},
    {"exit_code", Share::kOwn, Remedy::kFixProgram,
     [](const RankEvidence& rank) { return rank.ending.exit_code > 0; },
     [](const RankEvidence& rank) {
       return "left with exit code " + std::to_string(rank.ending.exit_code) +
              ", without an exception that reft saw";
     },
     "read that rank's last lines in the launcher's log"},
    {"exit_code", Share::kOwn, Remedy::kFixProgram,
     [](const RankEvidence& rank) { return rank.ending.exit_code == 0; },
     [](const RankEvidence&) {
       return std::string("left with exit code 0, past Python's own end (os._exit)");
     },
     "find what ends that rank before the others"},
    {"dead", Share::kOwn, Remedy::kRetry, [](const RankEvidence&) { return true; },
     [](const RankEvidence& rank) {
       return "is dead (pid " + std::to_string(rank.pid) + "), and nothing says how it ended";
     },
     "read that rank's last lines in the launcher's log; dmesg shows OOM kills"},
};

struct End {
  const RankEvidence* rank = nullptr;
  const CrashRule* rule = nullptr;
  Share share = Share::kOwn;
  bool hides = false;  // an op of its failed: its own error may only hide that
  int64_t at_ns = 0;   // when it failed, else when its end was noticed; INT64_MAX = unknown
};

End endOf(const RankEvidence& rank) {
  End end;
  end.rank = &rank;
  end.rule = &crashRuleFor(rank);
  end.at_ns = rank.ending.failedNs();
  end.hides = aNewestOpFailed(rank);
  end.share = end.rule->share;
  // An op of its failed, and it says nothing else of its end: as one that says that its peer went.
  if (end.share == Share::kOwn && !rank.ending.exception && !rank.ending.fault && end.hides) {
    end.share = Share::kConsequence;
  }
  if (end.at_ns <= 0) {
    end.at_ns = rank.gone_ns > 0 ? rank.gone_ns : INT64_MAX;
  }
  return end;
}

// Two ranks failed alike: the same error at the same place.
auto likeness(const End& end) {
  const auto& exception = end.rank->ending.exception;
  const auto frame = exception ? frameOf(*exception) : std::nullopt;
  return std::tuple(std::string_view(end.rule->reason),
                    exception ? std::string_view(exception->type) : std::string_view(),
                    frame ? frame->file : "", frame ? frame->line : 0,
                    exception ? 0 : signalOf(*end.rank),
                    exception ? 0 : end.rank->ending.exit_code);
}

Culprit culpritOf(const End& end) {
  const RankEvidence& rank = *end.rank;
  Culprit culprit;
  culprit.rank = rank.rank;
  culprit.pid = rank.pid;
  culprit.host = rank.host;
  culprit.reason = end.rule->reason;
  culprit.text = "rank " + std::to_string(rank.rank) + " " + end.rule->sentence(rank);
  if (rank.ending.exception) {
    culprit.frame = frameOf(*rank.ending.exception);
    culprit.thread = rank.ending.exception->thread;
  } else if (rank.ending.fault) {
    if (const ThreadStack* stack = stackOf(*rank.ending.fault);
        stack != nullptr && !stack->frames.empty()) {
      culprit.frame = ownFrame(*stack);
      culprit.thread = stack->thread;
    }
  }
  return culprit;
}

class CrashDecision {
 public:
  explicit CrashDecision(const HangEvidence& evidence) : evidence_(evidence) {
    for (const RankEvidence& rank : evidence.ranks) {
      if (endedUncleanly(rank)) {
        ends_.push_back(endOf(rank));
      }
    }
    std::stable_sort(ends_.begin(), ends_.end(),
                     [](const End& a, const End& b) { return a.at_ns < b.at_ns; });
  }

  Verdict make() {
    if (ends_.empty()) {
      result_.what = "none";
      return std::move(result_);
    }
    result_.state = VerdictState::kCrash;
    result_.pattern = "P4";
    std::vector<const End*> first = firstOf(Share::kOwn, /*hides=*/false);
    if (first.empty()) {
      first = firstOf(Share::kOwn, /*hides=*/true);
      const auto outside = firstOf(Share::kOutside, /*hides=*/true);
      // One that was ended from outside comes before those that hide what they met then.
      if (first.empty() ||
          (!outside.empty() && outside.front()->at_ns <= first.front()->at_ns + kNoticedNs)) {
        first = outside;
      }
    }
    result_.outside = std::all_of(ends_.begin(), ends_.end(),
                                  [](const End& end) { return end.share == Share::kOutside; });
    const bool others_lost_it = std::any_of(ends_.begin(), ends_.end(), [](const End& end) {
      return end.share == Share::kConsequence;
    });
    const bool only_ended = first.empty() || first.front()->share == Share::kOutside;
    if (only_ended && others_lost_it && leftBefore()) {
      // The launcher has ended the rest.
    } else if (!first.empty()) {
      named(first);
    } else {
      nobodyFailed();
    }
    describe();
    return std::move(result_);
  }

 private:
  // Those that hide something are asked last.
  std::vector<const End*> firstOf(Share share, bool hides) const {
    std::vector<const End*> found;
    for (const End& end : ends_) {
      if (end.share != share || (end.hides && !hides)) {
        continue;
      }
      if (found.empty()) {
        found.push_back(&end);
        continue;
      }
      const int64_t later_ns = end.at_ns - found.front()->at_ns;
      const bool alike = likeness(end) == likeness(*found.front());
      const bool killed = signalOf(*end.rank) == SIGKILL && alike;
      if (end.at_ns == INT64_MAX ? alike
          : killed               ? later_ns <= kKilledTogetherNs
                                 : alike || later_ns <= kFailedTogetherNs + doubtNs()) {
        found.push_back(&end);
      }
    }
    return found;
  }

  int64_t doubtNs() const { return std::max<int64_t>(0, evidence_.clock_error_ns); }

  void named(const std::vector<const End*>& first) {
    const End& end = *first.front();
    result_.what = end.rule->reason;
    result_.remedy = end.rule->remedy;
    result_.advice = end.rule->advice;
    result_.step = lastStepOf(*end.rank);
    if (mayBeHardware(end) && hardwareFailedOn(evidence_, end.rank->node)) {
      result_.remedy = Remedy::kExcludeNode;
      result_.advice =
          "exclude that node, and test its device (nvidia-smi -q, dmesg: Xid): its hardware failed "
          "during this attempt";
    }
    // Ranks of other nodes may have failed before.
    const bool whole = evidence_.nodes <= 1 && evidence_.silent_nodes.empty();
    const bool doubtful = std::any_of(ends_.begin(), ends_.end(), [&](const End& other) {
      return other.share == Share::kOwn && other.at_ns - end.at_ns <= kDoubtfulNs &&
             likeness(other) != likeness(end);
    });
    result_.confidence =
        whole && end.at_ns != INT64_MAX && !doubtful ? Confidence::kCertain : Confidence::kLikely;
    for (const End* one : first) {
      result_.culprits.push_back(culpritOf(*one));
    }
    sort(result_.culprits);
    if (evidence_.nodes > 1) {
      result_.evidence.push_back("first on node " + std::to_string(evidence_.node) +
                                 "; the other nodes have reports of their own");
    }
  }

  // Ranks that ended cleanly while the others still needed them.
  bool leftBefore() {
    for (const RankEvidence& rank : evidence_.ranks) {
      // Its connections end before its process does.
      const int64_t left_ns = rank.ending.left_ns > 0 ? rank.ending.left_ns : rank.gone_ns;
      if (!rank.alive && rank.said_bye && left_ns > 0 && left_ns < ends_.front().at_ns) {
        Culprit& left = result_.culprits.emplace_back(describeRank(rank));
        result_.what = left.reason;
        result_.step = lastStepOf(rank);
      }
    }
    if (result_.culprits.empty()) {
      return false;
    }
    result_.confidence = Confidence::kLikely;
    result_.remedy = Remedy::kFixProgram;
    result_.advice = "find why that rank had less to do: uneven data, or a condition of its own";
    return true;
  }

  // Every one of them says that another failed.
  void nobodyFailed() {
    result_.what = ends_.front().rule->reason;
    result_.remedy = Remedy::kRetry;
    result_.confidence = Confidence::kUndecidable;
    if (evidence_.nodes > 1) {
      result_.evidence.push_back(
          "the ranks of this node ended because ranks of other nodes did, or could not be reached");
      result_.advice =
          "read the reports of the other nodes: the first failure is there, or the "
          "network between them failed";
    } else {
      result_.evidence.push_back("each rank that ended says that another failed, and none did");
      result_.advice = ends_.front().rule->advice;
    }
    for (const End& end : ends_) {
      result_.candidates.push_back(culpritOf(end));
    }
    sort(result_.candidates);
  }

  // Whether a fault of a device may be what ended the rank. Memory, disks, and who ends processes
  // explain the other classes.
  static bool mayBeHardware(const End& end) {
    constexpr std::array<std::string_view, 7> kClasses = {"device", "exception", "signal", "abort",
                                                          "killed", "exit_code", "dead"};
    return end.share != Share::kOutside &&
           std::ranges::find(kClasses, end.rule->reason) != kClasses.end();
  }

  void describe() {
    std::vector<int> consequences, later, live;
    const auto isNamed = [this](int rank) {
      return std::any_of(result_.culprits.begin(), result_.culprits.end(),
                         [rank](const Culprit& culprit) { return culprit.rank == rank; });
    };
    for (const End& end : ends_) {
      if (!isNamed(end.rank->rank) && !result_.culprits.empty()) {
        (end.share == Share::kOwn ? later : consequences).push_back(end.rank->rank);
      }
    }
    for (const RankEvidence& rank : evidence_.ranks) {
      if (rank.alive) {
        live.push_back(rank.rank);
      }
    }
    for (std::vector<int>* ranks : {&consequences, &later, &live}) {
      std::sort(ranks->begin(), ranks->end());
    }
    if (result_.step >= 0) {
      result_.evidence.push_back("it had completed step " + std::to_string(result_.step));
    }
    for (const Culprit& culprit : result_.culprits) {
      addCauses(culprit.rank);
    }
    std::ranges::move(hardwareSentences(evidence_), std::back_inserter(result_.evidence));
    if (!later.empty()) {
      result_.evidence.push_back(words::rankList(later) + " failed later, too");
    }
    if (!live.empty()) {
      result_.evidence.push_back(words::rankList(live) + " still live");
    }
    result_.victims = std::move(consequences);
  }

  void addCauses(int number) {
    const auto rank = std::find_if(evidence_.ranks.begin(), evidence_.ranks.end(),
                                   [&](const RankEvidence& one) { return one.rank == number; });
    const Ending& ending = rank->ending;
    if (ending.exception) {
      for (const std::string& cause : ending.exception->causes) {
        result_.evidence.push_back("before it: " + firstLine(cause));
      }
    }
    if (ending.in_thread) {
      result_.evidence.push_back("a thread of rank " + std::to_string(number) +
                                 " had ended: " + printable(ending.in_thread->type, 80) +
                                 placeOf(*ending.in_thread) + ": " +
                                 firstLine(ending.in_thread->message));
    }
    if (rank->oom_kills > 0 && result_.what != "oom_kill") {
      result_.evidence.push_back("rank " + std::to_string(number) + ": " + kOomKillText);
    }
  }

  static void sort(std::vector<Culprit>& list) {
    std::sort(list.begin(), list.end(),
              [](const Culprit& a, const Culprit& b) { return a.rank < b.rank; });
  }

  const HangEvidence& evidence_;
  std::vector<End> ends_;  // the first comes first
  Verdict result_;
};

}  // namespace

std::span<const CrashRule> crashRules() {
  return kCrashRules;
}

const CrashRule& crashRuleFor(const RankEvidence& rank) {
  return *std::find_if(std::begin(kCrashRules), std::end(kCrashRules) - 1,
                       [&](const CrashRule& rule) { return rule.matches(rank); });
}

Verdict decideCrash(const HangEvidence& evidence) {
  return CrashDecision(evidence).make();
}

}  // namespace reft

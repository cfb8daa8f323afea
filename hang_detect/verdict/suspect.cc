#include "hang_detect/verdict/suspect.h"

#include <algorithm>
#include <cstdlib>
#include <initializer_list>
#include <string_view>

#include "hang_detect/evidence/oom_kills.h"
#include "hang_detect/evidence/words.h"
#include "hang_detect/stacks/printable.h"

namespace reft {

namespace {

constexpr size_t kMaxCalls = 64;
constexpr double kBusyShare = 0.5;
// Enough on a machine with too few processors. The main thread of an idle rank sleeps, and its
// other threads use less.
constexpr double kBusyShareIfRunning = 0.02;
// The same for other threads of the rank and for its children: pollers use a few hundredths.
constexpr double kBusyShareIfOthersRun = 0.1;
constexpr int64_t kMovingIoBytes = 64 << 10;

bool contains(std::string_view text, std::initializer_list<std::string_view> parts) {
  return std::any_of(parts.begin(), parts.end(),
                     [text](std::string_view part) { return text.find(part) != text.npos; });
}

// Python debuggers, and prompts that a script opens. debugpy's own files are missing on purpose: a
// rank that debugpy started has them at the bottom of its stack forever.
bool isPrompt(std::string_view calls) {
  return contains(calls, {"/pdb.py:", "/bdb.py:", "/ipdb/", "/pdbpp.py:", "_wait_suspend",
                          "/code.py:interact", "/IPython/terminal/"});
}

std::string callOf(const StackFrame& frame) {
  return frame.file + ":" + frame.function;
}

// ", at train.py:88 load_batch, and holds the GIL"
std::string at(const Suspect& s) {
  const ThreadStack* thread = s.standing.stack;
  return (s.place.empty() ? "" : ", at " + s.place) +
         (thread != nullptr && !thread->main ? ", not in its main thread" : "") +
         (thread != nullptr && thread->holds_gil ? ", and holds the GIL" : "");
}

// The interpreter's own end has no frame of the program: then where its newest op was called.
std::optional<StackFrame> lastCallSite(const RankEvidence& rank) {
  for (auto op = rank.tail.rbegin(); op != rank.tail.rend(); ++op) {
    const auto site = rank.call_sites.find(op->call_site);
    if (site == rank.call_sites.end()) {
      continue;
    }
    const std::string& text = site->second;  // "train.py:88 load_batch"
    const size_t space = text.rfind(' ');
    const size_t colon = text.rfind(':', space);
    if (space != text.npos && colon != text.npos) {
      return StackFrame{text.substr(0, colon), std::atoll(text.c_str() + colon + 1),
                        text.substr(space + 1)};
    }
  }
  return std::nullopt;
}

bool isInItsProgram(const Suspect& s) {
  return s.standing.stack != nullptr && !isLibraryFile(ownFrame(*s.standing.stack).file);
}

std::string endedAt(const Suspect& s) {
  const auto site = isInItsProgram(s) ? std::nullopt : lastCallSite(s.rank);
  if (!site) {
    return at(s);
  }
  ThreadStack left;
  left.frames = {*site};
  return ", after its last op at " + placeOf(left);
}

// ", whose worker pid 4711 stands at data.py:12 __getitem__": the first data worker of the rank
// that is not idle.
std::string busyWorker(const RankEvidence& rank) {
  for (const ChildProcess& child : rank.children) {
    for (const ThreadStack& thread : child.stacks.parsed().threads) {
      // A forked worker has the frames of the rank below its own loop.
      const auto loop =
          std::find_if(thread.frames.begin(), thread.frames.end(), [](const StackFrame& frame) {
            return frame.function == "_worker_loop" &&
                   frame.file.ends_with("data/_utils/worker.py");
          });
      ThreadStack own = thread;
      own.frames.assign(thread.frames.begin(), loop);
      const bool idle =
          std::all_of(own.frames.begin(), own.frames.end(),
                      [](const StackFrame& frame) { return isLibraryFile(frame.file); });
      if (thread.main && loop != thread.frames.end() && !idle) {
        return ", whose worker pid " + std::to_string(child.pid) + " stands at " + placeOf(own);
      }
    }
  }
  return "";
}

std::string worker(const RankEvidence& rank) {
  const auto dead = std::find_if(rank.children.begin(), rank.children.end(),
                                 [](const ChildProcess& child) { return child.state == "Z"; });
  return dead != rank.children.end()
             ? ", whose worker pid " + std::to_string(dead->pid) + " is dead"
             : busyWorker(rank);
}

// The call in which the thread that counts waits for its device; nullptr if it does not.
const DriverUse::Call* deviceWait(const RankEvidence& rank) {
  // A first thread's number is that of its process.
  const auto bits = rank.callers.empty() ? static_cast<uint16_t>(rank.pid)
                                         : OpThread::tidBitsOf(rank.callers.front().thread);
  return rank.driver.waitOf(bits);
}

std::string launched(const RankEvidence& rank) {
  const std::string sentence = rank.driver.launchSentence();
  return sentence.empty() ? "" : "; " + sentence;
}

constexpr SuspectRule kRules[] = {
    {"left", "ended_early", Excuse::kNever,
     [](const Suspect& s) { return !s.rank.alive && s.rank.said_bye; },
     [](const Suspect&) {
       return std::string("has left the job although others still wait for it");
     }},
    {"dead", "dead", Excuse::kNever, [](const Suspect& s) { return !s.rank.alive; },
     [](const Suspect& s) {
       return "is dead (pid " + std::to_string(s.rank.pid) + "); " +
              (s.rank.oom_kills > 0 ? kOomKillText : "the launcher's log has its exit status");
     }},
    {"stopped", "stopped", Excuse::kNever,
     [](const Suspect& s) { return s.rank.proc_state == "T"; },
     [](const Suspect& s) { return "is stopped (SIGSTOP or a frozen shell job)" + at(s); }},
    {"traced", "traced", Excuse::kAlways,
     [](const Suspect& s) { return s.rank.proc_state == "t" || s.rank.tracer_pid > 0; },
     [](const Suspect& s) {
       return "is under a debugger or tracer, pid " + std::to_string(s.rank.tracer_pid) + at(s);
     }},
    {"uninterruptible", "uninterruptible", Excuse::kNewPlaceOrIo,
     [](const Suspect& s) { return s.standing.state == "D"; },
     [](const Suspect& s) {
       return "is in the kernel and cannot be interrupted (" +
              printable(s.standing.wait_channel, 40) + ")" + at(s);
     }},
    {"debugger", "debugger", Excuse::kNever, [](const Suspect& s) { return isPrompt(s.calls); },
     [](const Suspect& s) { return "stands at a debugger's prompt" + at(s); }},
    // Before the places below: whatever the script does, nothing comes back from its device.
    {"device_failed", "device_failed", Excuse::kNever,
     [](const Suspect& s) { return s.rank.driver.error != 0; },
     [](const Suspect& s) {
       return "goes on although its device has failed: " + s.rank.driver.errorSentence() + at(s);
     }},
    // Before the places below: wherever the thread stands, it cannot go on.
    {"waits_for_gil", "waits_for_gil", Excuse::kNewPlaceOrIo,
     [](const Suspect& s) { return s.gil_holder != nullptr; },
     [](const Suspect& s) {
       const ThreadStack& holder = *s.gil_holder;
       return "waits for the GIL, at " + s.place + ": thread " +
              printable(holder.name.empty() ? holder.thread : holder.name, 32) +
              " holds the GIL at " + placeOf(holder);
     },
     /*at_gil_holder=*/true},
    {"shutting_down", "ended_early", Excuse::kNever,
     [](const Suspect& s) {
       return contains(s.calls, {"destroy_process_group", "threading.py:_shutdown", "atexit"});
     },
     [](const Suspect& s) {
       return "has left the training loop and is shutting down" + endedAt(s);
     },
     /*at_gil_holder=*/false,
     /*at_last_op=*/true},
    // Before the data loader, whose position it restores, too.
    {"restoring", "restoring", Excuse::kAlways,
     [](const Suspect& s) { return contains(s.calls, {"reft/_session/resumer.py:"}); },
     [](const Suspect& s) { return "restores the snapshot (reft)" + at(s); }},
    {"data_loading", "data_loading", Excuse::kNewPlace,
     [](const Suspect& s) {
       return contains(s.calls,
                       {"_try_get_data", "_next_data", "data/dataloader.py", "utils/data/"});
     },
     [](const Suspect& s) { return "waits for its data loader" + worker(s.rank) + at(s); }},
    // Files that only compile: those of compiled code that runs are in the same folders.
    {"compiling", "compiling", Excuse::kAlways,
     [](const Suspect& s) {
       return contains(
           s.calls,
           {"torch/_dynamo/convert_frame.py", "torch/_inductor/compile_fx.py:compile_fx",
            "torch/_inductor/graph.py:", "torch/_inductor/async_compile.py",
            "triton_heuristics.py:autotune", "/triton/compiler/", "/triton/runtime/autotuner.py"});
     },
     [](const Suspect& s) { return "compiles" + at(s); }},
    {"profiling", "profiling", Excuse::kAlways,
     [](const Suspect& s) {
       return contains(s.calls, {"profiler/profiler.py", "autograd/profiler.py:__exit__"});
     },
     [](const Suspect& s) { return "writes a profile" + at(s); }},
    {"checkpoint_io", "checkpoint_io", Excuse::kNewPlaceOrIo,
     [](const Suspect& s) {
       return contains(s.calls, {"distributed/checkpoint", "serialization.py:save",
                                 "serialization.py:_save", "serialization.py:load"});
     },
     [](const Suspect& s) { return "is in checkpoint I/O" + at(s); }},
    {"joins_thread", "waits_for_thread", Excuse::kNewPlaceOrIo,
     [](const Suspect& s) {
       return contains(s.top_call, {"threading.py:join", "threading.py:_wait_for_tstate_lock"});
     },
     [](const Suspect& s) { return "waits for a thread of its own" + at(s); }},
    {"waits_for_thread", "waits_for_thread", Excuse::kNewPlaceOrIo,
     [](const Suspect& s) {
       return contains(s.top_call, {"threading.py:wait", "threading.py:acquire", "queue.py:get",
                                    "futures/_base.py", "synchronize.py"});
     },
     [](const Suspect& s) { return "waits for another thread or process" + at(s); }},
    {"waits_for_child", "waits_for_child", Excuse::kNewPlaceOrIo,
     [](const Suspect& s) { return contains(s.calls, {"subprocess.py"}); },
     [](const Suspect& s) { return "waits for a process that it started" + at(s); }},
    // Before its use of a processor: it may wait for the device in a loop.
    {"waits_for_device", "waits_for_device", Excuse::kNewPlaceOnly,
     [](const Suspect& s) { return deviceWait(s.rank) != nullptr; },
     [](const Suspect& s) {
       const DriverUse::Call& call = *deviceWait(s.rank);
       return "waits for its device in " + printable(call.name, 40) + " for " +
              words::seconds(call.since_sec) + at(s) + launched(s.rank);
     }},
    // An evaluation, a garbage collection or an endless loop: only time tells.
    {"busy", "busy", Excuse::kAlways, [](const Suspect& s) { return usesProcessor(s.rank); },
     [](const Suspect& s) { return "is busy outside any op" + at(s); }},
    {"blocking_io", "blocking_io", Excuse::kNewPlaceOrIo,
     [](const Suspect& s) {
       return contains(s.standing.wait_channel, {"pipe_read", "pipe_wait", "fifo", "sk_wait",
                                                 "unix_stream", "nfs", "fuse", "n_tty"});
     },
     [](const Suspect& s) {
       return "is blocked in I/O (" + printable(s.standing.wait_channel, 40) + ")" + at(s);
     }},
    {"user_code", "user_code", Excuse::kNewPlaceOrIo, [](const Suspect&) { return true; },
     [](const Suspect& s) { return "is outside any op" + at(s); }},
};

}  // namespace

Suspect::Suspect(const RankEvidence& evidence) : rank(evidence), standing(standingOf(evidence)) {
  if (standing.stack == nullptr) {
    return;
  }
  const ThreadStack& own = *standing.stack;
  place = placeOf(own);
  top_call = callOf(own.frames.front());
  for (size_t i = 0; i < own.frames.size() && i < kMaxCalls; ++i) {
    calls += callOf(own.frames[i]) + "\n";
  }
  for (const ThreadStack& thread : evidence.stacks.parsed().threads) {
    if (thread.holds_gil && thread.thread == own.awaits_gil_of && !thread.frames.empty()) {
      gil_holder = &thread;
      break;
    }
  }
}

std::span<const SuspectRule> suspectRules() {
  return kRules;
}

const SuspectRule& ruleFor(const Suspect& suspect) {
  return *std::find_if(std::begin(kRules), std::prev(std::end(kRules)),
                       [&](const SuspectRule& rule) { return rule.matches(suspect); });
}

Culprit describeRank(const RankEvidence& rank) {
  const Suspect suspect(rank);
  const SuspectRule& rule = ruleFor(suspect);
  Culprit culprit;
  culprit.rank = rank.rank;
  culprit.pid = rank.pid;
  culprit.host = rank.host;
  if (const ThreadStack* thread =
          rule.at_gil_holder ? suspect.gil_holder : suspect.standing.stack) {
    culprit.thread = thread->thread;
    culprit.frame = ownFrame(*thread);
  }
  if (rule.at_last_op && !isInItsProgram(suspect)) {
    const auto site = lastCallSite(rank);
    culprit.frame = site ? site : culprit.frame;
  }
  culprit.reason = rule.reason;
  culprit.text = "rank " + std::to_string(rank.rank) + " " + rule.sentence(suspect);
  culprit.rule = &rule;
  return culprit;
}

const SuspectRule& deviceBehindRule() {
  static constexpr SuspectRule kRule = {
      "device behind", "device_behind", Excuse::kNewPlaceOnly, [](const Suspect&) { return false; },
      [](const Suspect& s) { return "waits for its device" + at(s); }};
  return kRule;
}

bool isStopped(const RankEvidence& rank) {
  return rank.alive && (rank.proc_state == "T" || rank.proc_state == "t");
}

bool isOutOfAction(const RankEvidence& rank) {
  return !rank.alive || isStopped(rank);
}

bool atWork(const RankEvidence& rank, const Culprit& culprit) {
  if (isOutOfAction(rank)) {
    return false;
  }
  const bool child_works = std::any_of(
      rank.children.begin(), rank.children.end(),
      [](const ChildProcess& child) { return child.state == "R" || child.state == "D"; });
  // On a crowded machine only its state shows that a process wants a processor.
  return child_works || standingOf(rank).state == "R" || culprit.reason == "busy" ||
         culprit.reason == "compiling" || culprit.reason == "profiling" || rank.cpu_share < 0 ||
         rank.cpu_share >= kBusyShare || childrenUseProcessor(rank) || movesData(rank);
}

bool usesProcessor(const RankEvidence& rank) {
  return rank.cpu_share >= kBusyShare ||
         (standingOf(rank).state == "R" && rank.cpu_share >= kBusyShareIfRunning) ||
         (rank.running_threads > 0 && rank.cpu_share >= kBusyShareIfOthersRun);
}

bool childrenUseProcessor(const RankEvidence& rank) {
  return rank.children_cpu_share >= kBusyShare ||
         (rank.running_children > 0 && rank.children_cpu_share >= kBusyShareIfOthersRun);
}

bool movesData(const RankEvidence& rank) {
  return rank.io_bytes >= kMovingIoBytes;
}

bool atDebuggerPrompt(const RankEvidence& rank) {
  const auto atPrompt = [](const ThreadStack* thread) {
    return thread != nullptr &&
           std::any_of(thread->frames.begin(), thread->frames.end(),
                       [](const StackFrame& frame) { return isPrompt(callOf(frame)); });
  };
  return atPrompt(rank.stacks.mainThread()) || atPrompt(standingOf(rank).stack);
}

}  // namespace reft

#include "hang_detect/stacks/native_stack.h"

#include <algorithm>
#include <cinttypes>
#include <cstdio>

#include <nlohmann/json.hpp>

namespace reft {

namespace {

using nlohmann::json;

void addNative(MergedStack& stack, const NativeFrame& frame) {
  stack.frames.push_back({false, {}, frame});
}

void addPython(MergedStack& stack, const std::vector<StackFrame>& frames, size_t from,
               size_t count) {
  for (size_t i = from; i < std::min(from + count, frames.size()); ++i) {
    stack.frames.push_back({true, frames[i], {}});
  }
}

std::string both(const std::string& one, const std::string& other) {
  return one.empty() ? other : other.empty() ? one : one + "; " + other;
}

std::string counted(size_t count, const char* what) {
  return std::to_string(count) + " " + what + (count == 1 ? "" : "s");
}

}  // namespace

MergedStack mergeStack(const NativeStack& native, const std::optional<PythonThread>& python) {
  MergedStack merged;
  merged.problem = native.problem;
  if (!python) {
    for (const NativeFrame& frame : native.frames) {
      addNative(merged, frame);
    }
    return merged;
  }
  merged.problem = both(merged.problem, python->problem);
  const auto evaluates = [](const NativeFrame& frame) { return frame.evaluates; };
  const auto loops =
      static_cast<size_t>(std::count_if(native.frames.begin(), native.frames.end(), evaluates));
  const size_t runs = python->runs.size();
  const bool all_python = !python->truncated && python->problem.empty();
  // The newest run of the loop may just begin or end, and has no frame of its own then.
  const bool idle_loop =
      loops == runs + 1 && all_python && !native.frames.empty() && native.frames[0].evaluates;
  const bool agree = loops == runs || idle_loop || (loops < runs && !native.complete) ||
                     (loops > runs && !all_python);
  if (!agree) {
    merged.matched = false;
    for (const NativeFrame& frame : native.frames) {
      addNative(merged, frame);
    }
    addPython(merged, python->frames, 0, python->frames.size());
    merged.problem =
        both(merged.problem, "native and Python frames do not match (" +
                                 counted(loops, "interpreter loop") + ", " + counted(runs, "run") +
                                 " of them), so the Python frames come after the native ones");
    return merged;
  }
  size_t run = 0, shown = 0;
  bool idle = idle_loop;
  for (const NativeFrame& frame : native.frames) {
    if (!frame.evaluates || idle || run == runs) {
      idle = idle && !frame.evaluates;
      addNative(merged, frame);
      continue;
    }
    addPython(merged, python->frames, shown, python->runs[run]);
    shown += python->runs[run];
    ++run;
  }
  addPython(merged, python->frames, shown,
            python->frames.size());  // of runs beyond the end of the native frames
  return merged;
}

std::string mergedStacksJson(int pid, const RemoteStacks& stacks, const MergedThreads& merged) {
  json result = json::parse(remoteStacksJson(pid, stacks));
  json threads = json::array();
  for (const MergedThread& thread : merged.threads) {
    json frames = json::array();
    for (const MergedFrame& frame : thread.stack.frames) {
      if (frame.python) {
        const StackFrame& line = frame.line;
        frames.push_back({{"kind", "python"},
                          {"file", line.file},
                          {"line", line.line},
                          {"function", line.function}});
      } else {
        char offset[24];
        std::snprintf(offset, sizeof(offset), "0x%" PRIx64, frame.native.offset);
        frames.push_back({{"kind", "native"},
                          {"function", frame.native.function},
                          {"object", frame.native.object},
                          {"offset", offset}});
      }
    }
    threads.push_back({{"tid", thread.tid},
                       {"name", thread.name},
                       {"state", thread.state},
                       {"main", thread.main},
                       {"holds_gil", thread.holds_gil},
                       {"matched", thread.stack.matched},
                       {"problem", thread.stack.problem},
                       {"frames", std::move(frames)}});
  }
  result["native"] = {{"threads", std::move(threads)}, {"error", merged.error}};
  return result.dump(-1, ' ', false, json::error_handler_t::replace);
}

}  // namespace reft

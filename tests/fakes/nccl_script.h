// Plays what NCCL tells a profiler plugin, without NCCL: a script of events, one a line, goes
// through the structs of the ABI into a listener. One script stands for one rank.
//
//   at 12.5                                          the clock, in seconds
//   comm dp hash=7 rank=0 ranks=2 nodes=2            init; the name holds the context
//   coll c dp AllReduce seq=4 count=256 algo=RING    start of a collective …
//   p2p m dp Send peer=1                             … or message; the name holds the handle
//   op o dp c send ch=0 peer=1 steps=16              start of a proxy op, parent c
//   progress o                                       ProxyOpInProgress
//   step o 0                                         start of a step; "o/0" holds the handle
//   gpu o 0 · peer o 0 · net o 0 bytes=64            states of a send
//   recv o 0 · flush o 0 bytes=64 · take o 0         states of a receive
//   done o 0                                         stop of a step
//   kernel k c ch=0                                  start of the kernel on a channel
//   stop c · stop k                                  stop of any other event
//   end dp                                           finalize
//
// A name that has no handle stands for a null pointer; `-` always does. `#` begins a comment. A
// handle stays with its name after its event has ended, so a script can also misuse it.
//
// Threads: one at a time per script; the clock is the thread's.
// Errors:  std::invalid_argument for a line that it does not know.
#pragma once

#include <cstdint>
#include <map>
#include <sstream>
#include <stdexcept>
#include <string>

#include "intercept/base/clock.h"
#include "intercept/nccl_profiler/listener.h"

namespace reft {

class NcclScript {
 public:
  static constexpr int kPid = 4711;

  explicit NcclScript(bool kernels = false) : listener_(kPid, kernels, &now) {}

  NcclScript& run(const std::string& text) {
    std::istringstream lines(text);
    for (std::string line; std::getline(lines, line);) {
      runLine(line.substr(0, line.find('#')));
    }
    return *this;
  }

  NcclProgress progress() const { return listener_.table().snapshot(); }
  void* handleOf(const std::string& name) const {
    const auto found = handles_.find(name);
    return found != handles_.end() ? found->second : nullptr;
  }
  int mask() const { return mask_; }

  static int64_t now() { return clock(); }
  static int64_t& clock() {
    static thread_local int64_t clock_ns = kSecond;
    return clock_ns;
  }

 private:
  using Words = std::istringstream;

  struct Values {
    std::map<std::string, std::string> texts;
    int64_t number(const std::string& name, int64_t otherwise = 0) const {
      const auto found = texts.find(name);
      return found != texts.end() ? std::stoll(found->second, nullptr, 0) : otherwise;
    }
    const char* text(const std::string& name, const char* otherwise) const {
      const auto found = texts.find(name);
      return found != texts.end() ? found->second.c_str() : otherwise;
    }
  };

  static std::string word(Words& words) {
    std::string next;
    words >> next;
    return next;
  }
  static Values valuesOf(Words& words) {
    Values values;
    for (std::string next = word(words); !next.empty(); next = word(words)) {
      const size_t equals = next.find('=');
      values.texts[next.substr(0, equals)] =
          equals == std::string::npos ? "1" : next.substr(equals + 1);
    }
    return values;
  }

  void start(const std::string& name, const std::string& comm, nccl_abi::EventV5& event) {
    void* handle = &event;  // to be overwritten
    listener_.start(handleOf(comm), &handle, &event, event.type);
    handles_[name] = handle;
  }

  void record(Words& words, int state) {
    const std::string op = word(words);
    const std::string step = word(words);
    nccl_abi::StateArgs args{};
    args.proxy_step.bytes = static_cast<size_t>(valuesOf(words).number("bytes"));
    listener_.record(handleOf(op + "/" + step), state, &args);
  }

  void startComm(Words& words) {
    const std::string name = word(words);
    const Values values = valuesOf(words);
    void* context = &words;
    listener_.init(&context, static_cast<uint64_t>(values.number("hash", 7)), &mask_, name.c_str(),
                   static_cast<int>(values.number("nodes", 1)),
                   static_cast<int>(values.number("ranks", 2)),
                   static_cast<int>(values.number("rank")));
    handles_[name] = context;
  }

  void startTask(Words& words, bool p2p) {
    const std::string name = word(words);
    const std::string comm = word(words);
    const std::string func = word(words);
    const Values values = valuesOf(words);
    nccl_abi::EventV5 event{};
    event.type = p2p ? nccl_abi::kP2p : nccl_abi::kColl;
    if (p2p) {
      event.p2p.func = func.c_str();
      event.p2p.dtype = "ncclFloat32";
      event.p2p.count = static_cast<size_t>(values.number("count", 256));
      event.p2p.peer = static_cast<int>(values.number("peer"));
      event.p2p.channels = static_cast<uint8_t>(values.number("channels", 1));
    } else {
      event.coll.func = func.c_str();
      event.coll.seq = static_cast<uint64_t>(values.number("seq"));
      event.coll.dtype = "ncclFloat32";
      event.coll.count = static_cast<size_t>(values.number("count", 256));
      event.coll.algo = values.text("algo", "RING");
      event.coll.proto = values.text("proto", "SIMPLE");
      event.coll.channels = static_cast<uint8_t>(values.number("channels", 1));
    }
    start(name, comm, event);
  }

  void startOp(Words& words) {
    const std::string name = word(words);
    const std::string comm = word(words);
    const std::string task = word(words);
    const Values values = valuesOf(words);
    nccl_abi::EventV5 event{};
    event.type = nccl_abi::kProxyOp;
    event.parent = handleOf(task);
    event.proxy_op.pid = static_cast<int>(values.number("pid", kPid));
    event.proxy_op.channel = static_cast<uint8_t>(values.number("ch"));
    event.proxy_op.peer = static_cast<int>(values.number("peer"));
    event.proxy_op.steps = static_cast<int>(values.number("steps", 16));
    event.proxy_op.is_send = values.texts.count("send") != 0 ? 1 : 0;
    start(name, comm, event);
    comm_of_[name] = comm;
  }

  void runLine(const std::string& line) {
    Words words(line);
    const std::string verb = word(words);
    if (verb.empty()) {
      return;
    }
    if (verb == "at") {
      clock() = static_cast<int64_t>(std::stod(word(words)) * static_cast<double>(kSecond));
    } else if (verb == "comm") {
      startComm(words);
    } else if (verb == "coll" || verb == "p2p") {
      startTask(words, verb == "p2p");
    } else if (verb == "op") {
      startOp(words);
    } else if (verb == "progress") {
      listener_.record(handleOf(word(words)), nccl_abi::kOpInProgress, nullptr);
    } else if (verb == "step") {
      const std::string op = word(words);
      const std::string step = word(words);
      nccl_abi::EventV5 event{};
      event.type = nccl_abi::kProxyStep;
      event.parent = handleOf(op);
      event.proxy_step.step = std::stoi(step);
      start(op + "/" + step, comm_of_[op], event);
    } else if (verb == "gpu") {
      record(words, nccl_abi::kStepSendGpuWait);
    } else if (verb == "peer") {
      record(words, nccl_abi::kStepSendPeerWait);
    } else if (verb == "net") {
      record(words, nccl_abi::kStepSendWait);
    } else if (verb == "recv") {
      record(words, nccl_abi::kStepRecvWait);
    } else if (verb == "flush") {
      record(words, nccl_abi::kStepRecvFlushWait);
    } else if (verb == "take") {
      record(words, nccl_abi::kStepRecvGpuWait);
    } else if (verb == "done") {
      const std::string op = word(words);
      listener_.stop(handleOf(op + "/" + word(words)));
    } else if (verb == "kernel") {
      const std::string name = word(words);
      nccl_abi::EventV5 event{};
      event.type = nccl_abi::kKernelCh;
      event.parent = handleOf(word(words));
      event.kernel_ch.channel = static_cast<uint8_t>(valuesOf(words).number("ch"));
      start(name, "-", event);
    } else if (verb == "stop") {
      listener_.stop(handleOf(word(words)));
    } else if (verb == "end") {
      listener_.finalize(handleOf(word(words)));
    } else {
      throw std::invalid_argument("NcclScript: " + line);
    }
  }

  int mask_ = 0;
  NcclListener listener_;
  std::map<std::string, void*> handles_;
  std::map<std::string, std::string> comm_of_;
};

}  // namespace reft

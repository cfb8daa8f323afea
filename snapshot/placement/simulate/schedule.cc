#include "snapshot/placement/simulate/schedule.h"

#include <algorithm>
#include <map>
#include <string>
#include <tuple>

#include "intercept/base/error.h"

namespace reft::simulate {

namespace {

struct Name {
  ScheduleKind kind;
  const char* name;
};
constexpr Name kNames[] = {
    {ScheduleKind::kGpipe, "gpipe"},
    {ScheduleKind::kOneFOneB, "1f1b"},
    {ScheduleKind::kInterleaved, "interleaved"},
    {ScheduleKind::kZeroBubble, "zero-bubble"},
    {ScheduleKind::kDdp, "ddp"},
    {ScheduleKind::kFsdp, "fsdp"},
};

void demand(bool condition, const char* what) {
  if (!condition) {
    throw InvalidArgument(std::string("no such schedule: ") + what);
  }
}

int64_t linkNs(const ScheduleSpec& spec, double bytes) {
  return spec.link_latency_ns + static_cast<int64_t>(bytes / spec.link_bytes_per_sec * 1e9);
}

// A ring moves (D-1)/D of the bytes once for a gather or reduce-scatter, twice for an all-reduce.
int64_t ringNs(const ScheduleSpec& spec, uint64_t bytes, int passes) {
  const double share = static_cast<double>(spec.replicas - 1) / spec.replicas;
  return linkNs(spec, static_cast<double>(bytes) * share * passes);
}

Action action(Action::Kind kind, int64_t work_ns = 0, uint64_t bytes = 0, uint32_t id = 0,
              int peer = -1) {
  Action result;
  result.kind = kind;
  result.work_ns = work_ns;
  result.bytes = bytes;
  result.id = id;
  result.peer = peer;
  return result;
}

// Builds the action lists of a pipeline. Model chunk c of rank p is virtual stage c * P + p.
class Pipeline {
 public:
  explicit Pipeline(const ScheduleSpec& spec) : spec_(spec), stages_(spec.stages) {
    chunks_ = spec.kind == ScheduleKind::kInterleaved ? spec.chunks_per_rank : 1;
    result_.stages.resize(static_cast<size_t>(stages_));
  }

  Schedule build() {
    for (int p = 0; p < stages_; ++p) {
      switch (spec_.kind) {
        case ScheduleKind::kGpipe: gpipe(p); break;
        case ScheduleKind::kInterleaved: interleaved(p); break;
        case ScheduleKind::kZeroBubble: zeroBubble(p); break;
        default: oneFOneB(p); break;
      }
      auto& list = result_.stages[static_cast<size_t>(p)];
      if (spec_.replicas > 1 && spec_.gradient_bytes > 0) {
        const int64_t ns = ringNs(spec_, spec_.gradient_bytes, 2);
        list.push_back(action(Action::kStart, ns, spec_.gradient_bytes));
        list.push_back(action(Action::kWait, 0, spec_.gradient_bytes));
        result_.collectives = 1;
      }
      list.push_back(action(Action::kGate));
      list.push_back(action(Action::kCompute, spec_.optimizer_ns));
    }
    result_.messages = static_cast<uint32_t>(messages_.size());
    return std::move(result_);
  }

 private:
  uint32_t message(int from_virtual, int micro_batch, bool forward) {
    return messages_
        .try_emplace({from_virtual, micro_batch, forward}, static_cast<uint32_t>(messages_.size()))
        .first->second;
  }
  int last() const { return stages_ * chunks_ - 1; }

  void pass(int p, Action::Kind kind, int from, int other, int micro_batch, bool forward) {
    const int64_t ns = linkNs(spec_, static_cast<double>(spec_.activation_bytes));
    result_.stages[static_cast<size_t>(p)].push_back(
        action(kind, kind == Action::kSend ? ns : 0, spec_.activation_bytes,
               message(from, micro_batch, forward), other % stages_));
  }
  void work(int p, int64_t ns) {
    result_.stages[static_cast<size_t>(p)].push_back(action(Action::kCompute, ns / chunks_));
  }

  void forward(int p, int chunk, int micro_batch) {
    const int stage = chunk * stages_ + p;
    if (stage > 0) {
      pass(p, Action::kReceive, stage - 1, stage - 1, micro_batch, true);
    }
    work(p, spec_.forward_ns);
    if (stage < last()) {
      pass(p, Action::kSend, stage, stage + 1, micro_batch, true);
    }
  }
  void backward(int p, int chunk, int micro_batch, int64_t ns) {
    const int stage = chunk * stages_ + p;
    if (stage < last()) {
      pass(p, Action::kReceive, stage + 1, stage + 1, micro_batch, false);
    }
    work(p, ns);
    if (stage > 0) {
      pass(p, Action::kSend, stage, stage - 1, micro_batch, false);
    }
  }

  void gpipe(int p) {
    for (int i = 0; i < spec_.micro_batches; ++i) {
      forward(p, 0, i);
    }
    for (int i = 0; i < spec_.micro_batches; ++i) {
      backward(p, 0, i, spec_.backward_ns);
    }
  }

  void oneFOneB(int p) {
    const int warm_up = std::min(stages_ - 1 - p, spec_.micro_batches);
    for (int i = 0; i < warm_up; ++i) {
      forward(p, 0, i);
    }
    for (int i = warm_up; i < spec_.micro_batches; ++i) {
      forward(p, 0, i);
      backward(p, 0, i - warm_up, spec_.backward_ns);
    }
    for (int i = spec_.micro_batches - warm_up; i < spec_.micro_batches; ++i) {
      backward(p, 0, i, spec_.backward_ns);
    }
  }

  void interleaved(int p) {
    const int total = spec_.micro_batches * chunks_;
    const int warm_up = std::min(total, (stages_ - p - 1) * 2 + (chunks_ - 1) * stages_);
    const auto micro_batch = [&](int k) { return k / (stages_ * chunks_) * stages_ + k % stages_; };
    const auto chunk = [&](int k) { return k % (stages_ * chunks_) / stages_; };
    const auto f = [&](int k) { forward(p, chunk(k), micro_batch(k)); };
    const auto b = [&](int k) {
      backward(p, chunks_ - 1 - chunk(k), micro_batch(k), spec_.backward_ns);
    };
    for (int k = 0; k < warm_up; ++k) {
      f(k);
    }
    for (int k = warm_up; k < total; ++k) {
      f(k);
      b(k - warm_up);
    }
    for (int k = total - warm_up; k < total; ++k) {
      b(k);
    }
  }

  // 1F1B with delayed weight gradients: stage p computes them p micro-batches late. Input gradients
  // are sent on early, and the delayed work fills the cool-down.
  void zeroBubble(int p) {
    const int64_t inputs_ns = spec_.backward_ns / 2;
    const int64_t weights_ns = spec_.backward_ns - inputs_ns;
    const int warm_up = std::min(stages_ - 1 - p, spec_.micro_batches);
    int weights_done = 0;
    const auto b = [&](int i) {
      backward(p, 0, i, inputs_ns);
      if (i - weights_done >= p) {
        work(p, weights_ns);
        ++weights_done;
      }
    };
    for (int i = 0; i < warm_up; ++i) {
      forward(p, 0, i);
    }
    for (int i = warm_up; i < spec_.micro_batches; ++i) {
      forward(p, 0, i);
      b(i - warm_up);
    }
    for (int i = spec_.micro_batches - warm_up; i < spec_.micro_batches; ++i) {
      b(i);
    }
    for (; weights_done < spec_.micro_batches; ++weights_done) {
      work(p, weights_ns);
    }
  }

  const ScheduleSpec& spec_;
  const int stages_;
  int chunks_ = 1;
  Schedule result_;
  std::map<std::tuple<int, int, bool>, uint32_t> messages_;
};

Schedule makeDdp(const ScheduleSpec& spec) {
  Schedule result;
  auto& list = result.stages.emplace_back();
  const int64_t layers = spec.layers;
  const uint64_t bytes = spec.gradient_bytes / static_cast<uint64_t>(layers);
  for (int i = 0; i + 1 < spec.micro_batches; ++i) {  // gradient accumulation: no reduction
    list.push_back(action(Action::kCompute, spec.forward_ns + spec.backward_ns));
  }
  list.push_back(action(Action::kCompute, spec.forward_ns));
  for (int64_t layer = 0; layer < layers; ++layer) {
    list.push_back(action(Action::kCompute, spec.backward_ns / layers));
    if (spec.replicas > 1) {
      list.push_back(action(Action::kStart, ringNs(spec, bytes, 2), bytes, result.collectives++));
    }
  }
  for (uint32_t i = 0; i < result.collectives; ++i) {
    list.push_back(action(Action::kWait, 0, bytes, i));
  }
  list.push_back(action(Action::kGate));
  list.push_back(action(Action::kCompute, spec.optimizer_ns));
  return result;
}

Schedule makeFsdp(const ScheduleSpec& spec) {
  Schedule result;
  auto& list = result.stages.emplace_back();
  const int64_t layers = spec.layers;
  const uint64_t bytes = spec.gradient_bytes / static_cast<uint64_t>(layers);
  const bool alone = spec.replicas == 1;  // no replica to gather from
  const auto start = [&] {
    if (alone) {
      return 0u;
    }
    list.push_back(action(Action::kStart, ringNs(spec, bytes, 1), bytes, result.collectives));
    return result.collectives++;
  };
  const auto wait = [&](uint32_t id) {
    if (!alone) {
      list.push_back(action(Action::kWait, 0, bytes, id));
    }
  };
  std::vector<uint32_t> reductions;
  for (int i = 0; i < spec.micro_batches; ++i) {
    for (const bool backward : {false, true}) {
      const int64_t pass_ns = backward ? spec.backward_ns : spec.forward_ns;
      uint32_t gathered = start();
      for (int64_t layer = 0; layer < layers; ++layer) {
        wait(gathered);
        if (layer + 1 < layers) {
          gathered = start();
        }
        list.push_back(action(Action::kCompute, pass_ns / layers));
        if (backward) {
          reductions.push_back(start());
        }
      }
    }
  }
  for (const uint32_t id : reductions) {
    wait(id);
  }
  list.push_back(action(Action::kGate));
  list.push_back(action(Action::kCompute, spec.optimizer_ns));
  return result;
}

}  // namespace

const char* scheduleName(ScheduleKind kind) {
  for (const Name& name : kNames) {
    if (name.kind == kind) {
      return name.name;
    }
  }
  return "unknown";
}

ScheduleKind scheduleNamed(std::string_view text) {
  std::string all;
  for (const Name& name : kNames) {
    if (name.name == text) {
      return name.kind;
    }
    all += all.empty() ? name.name : std::string(", ") + name.name;
  }
  throw InvalidArgument("schedule", "'" + std::string(text) + "'", all);
}

Schedule makeSchedule(const ScheduleSpec& spec) {
  constexpr int kMost = 1 << 20;
  demand(spec.stages >= 1 && spec.stages <= kMost, "stages must be at least 1");
  demand(spec.replicas >= 1 && spec.replicas <= kMost, "replicas must be at least 1");
  demand(spec.micro_batches >= 1 && spec.micro_batches <= kMost,
         "micro_batches must be at least 1");
  demand(spec.layers >= 1 && spec.layers <= kMost, "layers must be at least 1");
  demand(spec.chunks_per_rank >= 1 && spec.chunks_per_rank <= kMost,
         "chunks_per_rank must be at least 1");
  demand(spec.forward_ns >= 0 && spec.backward_ns >= 0 && spec.optimizer_ns >= 0,
         "times must not be negative");
  demand(spec.link_bytes_per_sec > 0, "link_bytes_per_sec must be positive");
  if (spec.kind == ScheduleKind::kDdp || spec.kind == ScheduleKind::kFsdp) {
    demand(spec.stages == 1, "ddp and fsdp have one stage");
    return spec.kind == ScheduleKind::kDdp ? makeDdp(spec) : makeFsdp(spec);
  }
  demand(spec.kind != ScheduleKind::kInterleaved || spec.micro_batches % spec.stages == 0,
         "interleaved needs its micro-batches to be a multiple of its stages");
  return Pipeline(spec).build();
}

std::vector<int64_t> oneFOneBGaps(const ScheduleSpec& spec, int stage) {
  std::vector<int64_t> gaps;
  const auto add = [&](int64_t ns) {
    if (ns > 0) {
      gaps.push_back(ns);
    }
  };
  const int after = spec.stages - 1 - stage;
  add(stage * (spec.forward_ns + spec.backward_ns));
  add(after * spec.backward_ns);
  for (int i = 0; i < after; ++i) {
    add(spec.forward_ns);
  }
  return gaps;
}

double paperBubbleNs(const ScheduleSpec& spec, int stage) {
  return (0.8 * spec.stages + 2.0 * spec.stages - stage - 2) *
         static_cast<double>(spec.forward_ns + spec.backward_ns);
}

}  // namespace reft::simulate

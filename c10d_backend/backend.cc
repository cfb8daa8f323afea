#include "c10d_backend/backend.h"

#include <algorithm>
#include <type_traits>
#include <utility>

#include "c10d_backend/call_site.h"
#include "c10d_backend/gil.h"
#include "c10d_backend/live_backends.h"
#include "c10d_backend/pending_writes.h"
#include "c10d_backend/stream_ops.h"
#include "c10d_backend/stream_wait.h"
#include "intercept/base/fault.h"
#include "intercept/base/hash.h"
#include "intercept/base/log.h"
#include "intercept/record/cut.h"

namespace reft {

using c10d::OpType;

ReftBackend::ReftBackend(Parts parts, int rank, int size, OpLog& log)
    : Backend(rank, size),
      parts_(std::move(parts)),
      log_(log),
      group_(log.addGroup(parts_.group_name, rank, size)),
      family_(parts_, log, rank),
      cut_key_(CutCounter::groupKey(parts_.group_name)),
      collective_cut_(CutCounter::collectiveTerm(cut_key_, rank, size)),
      loopback_(rank) {
  TORCH_CHECK_VALUE(parts_.cpu || parts_.cuda,
                    "backend reft needs gloo or NCCL, and this torch has neither for this machine");
  init();
  addLiveBackend(this, [this] { ReftBackend::abort(); });
}

ReftBackend::~ReftBackend() {
  withoutGil([this] { removeLiveBackend(this); });
  withoutGil([this] {
    {
      const MutexLock lock(region_mutex_);
      region_.works.clear();
    }
    parts_.cuda.reset();
    parts_.cpu.reset();
    parts_.store.reset();
  });
}

// -- which inner backend

ReftBackend::Target ReftBackend::targetOf(const at::Tensor& tensor) {
  if (parts_.cuda && (!tensor.device().is_cpu() || !parts_.cpu)) {
    syncLazyState();
    return {parts_.cuda.get(), ReftWork::Where::kDevice};
  }
  return hostTarget();
}

ReftBackend::Target ReftBackend::hostTarget() const {
  if (parts_.cpu) {
    return {parts_.cpu.get(), ReftWork::Where::kHost};
  }
  return {parts_.cuda.get(), ReftWork::Where::kDevice};
}

// -- one op

void ReftBackend::countForCut(const OpShape& shape, OpType type) const {
  if (type == OpType::SEND) {
    processCut().add(CutCounter::messageTerm(cut_key_, rank_, shape.peer));
  } else if (type == OpType::RECV) {
    processCut().add(-CutCounter::messageTerm(cut_key_, shape.peer, rank_));
  } else if (type == OpType::RECVANYSOURCE) {
    processCut().addUnknown();
  } else {
    processCut().add(collective_cut_);
  }
}

template <typename Written, typename Call>
WorkPtr ReftBackend::issue(const Target& target, const OpShape& shape, OpType type,
                           const Written& written, Call&& call) {
  OpLog::Op op;
  op.kind = shape.kind;
  op.group = group_;
  op.seq =
      (c10d::isP2POp(type) ? messages_ : collectives_).fetch_add(1, std::memory_order_relaxed) + 1;
  op.peer = shape.peer;
  op.tag = shape.tag;
  op.bytes = shape.bytes;
  op.dtype = shape.dtype;
  op.reduce_op = shape.reduce_op;
  op.call_site = currentCallSite();
  // Send and recv of a message have one signature.
  uint64_t signature = c10d::isP2POp(type) ? static_cast<uint64_t>(OpKind::kSend)
                                           : static_cast<uint64_t>(shape.kind);
  signature = hashCombine(signature, (uint64_t{shape.dtype} << 8) | shape.reduce_op);
  op.signature = hashCombine(signature, static_cast<uint64_t>(shape.agreed));
  const uint64_t ticket = log_.begin(op);
  countForCut(shape, type);
  faultPoint(FaultPoint::collective, faultStep());
  const bool coalescing = coalescing_.load(std::memory_order_relaxed);
  WorkPtr work;
  try {
    if (coalescing) {
      openRegion(target);
    }
    // A large op on the stream itself is work of that stream; tensor parallelism has hundreds.
    const bool stands_in_it = shape.on_current_stream && target.where == ReftWork::Where::kDevice &&
                              !coalescing && op.bytes <= kLatencyBytes;
    const StreamWait marked(stands_in_it ? &log_ : nullptr, ticket);
    if (target.where == ReftWork::Where::kDevice) {
      sayWhenReached(log_, ticket);
    }
    work = call();
    if (target.where == ReftWork::Where::kDevice && shape.on_current_stream && !coalescing) {
      sayWhenPassed(log_, ticket);
    }
  } catch (...) {
    log_.markDone(ticket, /*failed=*/true);
    if (coalescing) {
      // The caller's `with` block will not reach endCoalescing().
      const MutexLock lock(region_mutex_);
      if (!region_.on_device) {
        coalescing_.store(false, std::memory_order_relaxed);
        region_ = Region{};
      }
    }
    throw;
  }
  log_.markEnqueued(ticket);
  // A caller that is not given the Work waits before it returns.
  const bool returns_first = !shape.on_current_stream || coalescing;
  if (work && returns_first) {
    processPendingWrites().add(ticket, shape.kind, work, PendingWrites::rangesOf(written));
  }
  if (coalescing) {
    return intoRegion(
        target, std::move(work), ticket, type,
        work ? std::vector<PendingWrites::Range>{} : PendingWrites::rangesOf(written));
  }
  if (!work) {
    // Null is valid: on a device the op is on the caller's stream, on the host it is done.
    if (target.where == ReftWork::Where::kHost) {
      log_.markDone(ticket);
    }
    return work;
  }
  return c10::make_intrusive<ReftWork>(std::move(work), log_, ticket, target.where, rank_, type);
}

// -- coalescing: see Note [coalescing]

bool ReftBackend::supportsCoalescing() const {
  return parts_.cuda && parts_.cuda->supportsCoalescing();
}

void ReftBackend::startCoalescing() {
  const MutexLock lock(region_mutex_);
  region_ = Region{};
  coalescing_.store(true, std::memory_order_relaxed);
}

void ReftBackend::openRegion(const Target& target) {
  const MutexLock lock(region_mutex_);
  if (target.where == ReftWork::Where::kDevice && !region_.on_device) {
    target.backend->startCoalescing();
    region_.on_device = true;
  }
}

WorkPtr ReftBackend::intoRegion(const Target& target, WorkPtr work, uint64_t ticket, OpType type,
                                const std::vector<PendingWrites::Range>& written) {
  const MutexLock lock(region_mutex_);
  if (target.where == ReftWork::Where::kDevice) {
    region_.device_written.insert(region_.device_written.end(), written.begin(), written.end());
    region_.device_tickets.push_back(ticket);
    return work;
  }
  if (work) {
    region_.works.push_back(
        c10::make_intrusive<ReftWork>(std::move(work), log_, ticket, target.where, rank_, type));
  } else {
    log_.markDone(ticket);
  }
  return nullptr;
}

WorkPtr ReftBackend::endCoalescing() {
  const MutexLock lock(region_mutex_);
  Region region = std::move(region_);
  region_ = Region{};
  coalescing_.store(false, std::memory_order_relaxed);
  if (region.on_device) {
    if (WorkPtr work = parts_.cuda->endCoalescing()) {
      const uint64_t first = region.device_tickets.empty() ? 0 : region.device_tickets.front();
      if (!region.device_tickets.empty()) {
        region.device_tickets.erase(region.device_tickets.begin());
      }
      processPendingWrites().add(first, OpKind::kCoalesced, work, std::move(region.device_written));
      region.works.push_back(c10::make_intrusive<ReftWork>(
          std::move(work), log_, first, ReftWork::Where::kDevice, rank_, OpType::COALESCED,
          std::move(region.device_tickets)));
    }
  }
  if (region.works.empty()) {
    return nullptr;
  }
  if (region.works.size() == 1) {
    return region.works.front();
  }
  return c10::make_intrusive<CompositeWork>(std::move(region.works), rank_);
}

// -- what gloo lacks

// NCCL averages integers, gloo does not: sums, then divides and truncates, as NCCL does. `results`
// is a tensor or a list; `here` is false where they are scratch (a reduce, outside of its root).
template <typename OpOptions, typename Results, typename Call>
WorkPtr ReftBackend::averaged(const Target& target, OpType type, const OpOptions& opts,
                              const at::Tensor& first, const Results& results, Call&& call,
                              bool here) const {
  if (target.where != ReftWork::Where::kHost || opts.reduceOp.op_ != c10d::ReduceOp::AVG ||
      !at::isIntegralType(first.scalar_type(), /*includeBool=*/false)) {
    return call(opts);
  }
  OpOptions sum_options = opts;
  sum_options.reduceOp = c10d::ReduceOp::SUM;
  WorkPtr sum = call(sum_options);
  if (!sum || !here) {
    return sum;
  }
  auto divide = [results, size = size_] {
    at::NoGradGuard no_grad;
    const auto divideOne = [size](const at::Tensor& tensor) {
      tensor.detach().div_(size, "trunc");
    };
    if constexpr (std::is_same_v<Results, at::Tensor>) {
      divideOne(results);
    } else {
      std::for_each(results.begin(), results.end(), divideOne);
    }
  };
  return c10::make_intrusive<FinishingWork>(std::move(sum), std::move(divide), TensorList{}, rank_,
                                            type);
}

// -- collectives

WorkPtr ReftBackend::broadcast(TensorList& tensors, const c10d::BroadcastOptions& opts) {
  const Target target = targetOf(firstOf(tensors));
  const OpShape shape = shapeOf(OpKind::kBroadcast, tensors, opts);
  return issue(target, shape, OpType::BROADCAST, tensors,
               [&] { return target.backend->broadcast(tensors, opts); });
}

WorkPtr ReftBackend::allreduce(TensorList& tensors, const c10d::AllreduceOptions& opts) {
  const Target target = targetOf(firstOf(tensors));
  const OpShape shape = shapeOf(OpKind::kAllreduce, tensors, opts);
  return issue(target, shape, OpType::ALLREDUCE, tensors, [&] {
    return averaged(target, OpType::ALLREDUCE, opts, tensors[0], tensors,
                    [&](const auto& options) -> WorkPtr {
                      return target.backend->allreduce(tensors, options);
                    });
  });
}

WorkPtr ReftBackend::allreduce_sparse(TensorList& tensors, const c10d::AllreduceOptions& opts) {
  const Target target = targetOf(firstOf(tensors));
  const OpShape shape = shapeOf(OpKind::kAllreduceSparse, tensors, opts).withBytes(0);
  return issue(target, shape, OpType::_ALLREDUCE_SPARSE, tensors,
               [&] { return target.backend->allreduce_sparse(tensors, opts); });
}

WorkPtr ReftBackend::allreduce_coalesced(TensorList& tensors,
                                         const c10d::AllreduceCoalescedOptions& opts) {
  const Target target = targetOf(firstOf(tensors));
  const OpShape shape = shapeOf(OpKind::kAllreduceCoalesced, tensors, opts);
  return issue(target, shape, OpType::ALLREDUCE_COALESCED, tensors, [&] {
    return averaged(target, OpType::ALLREDUCE_COALESCED, opts, tensors[0], tensors,
                    [&](const auto& options) -> WorkPtr {
                      return target.backend->allreduce_coalesced(tensors, options);
                    });
  });
}

WorkPtr ReftBackend::reduce(TensorList& tensors, const c10d::ReduceOptions& opts) {
  const Target target = targetOf(firstOf(tensors));
  const OpShape shape = shapeOf(OpKind::kReduce, tensors, opts);
  return issue(target, shape, OpType::REDUCE, tensors, [&] {
    return averaged(
        target, OpType::REDUCE, opts, tensors[0], tensors,
        [&](const auto& options) -> WorkPtr { return target.backend->reduce(tensors, options); },
        /*here=*/opts.rootRank == rank_);
  });
}

WorkPtr ReftBackend::allgather(TensorLists& outputs, TensorList& inputs,
                               const c10d::AllgatherOptions& opts) {
  const Target target = targetOf(firstOf(inputs));
  const OpShape shape = shapeOf(OpKind::kAllgather, inputs, opts)
                            .agreedOn(outputs.empty() ? 0 : elements(outputs[0]));
  return issue(target, shape, OpType::ALLGATHER, outputs,
               [&] { return target.backend->allgather(outputs, inputs, opts); });
}

WorkPtr ReftBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                     const c10d::AllgatherOptions& opts) {
  const Target target = targetOf(input);
  const OpShape shape = shapeOf(OpKind::kAllgatherBase, input, opts).agreedOn(output.numel());
  return issue(target, shape, OpType::_ALLGATHER_BASE, output,
               [&] { return target.backend->_allgather_base(output, input, opts); });
}

WorkPtr ReftBackend::all_gather_single(at::Tensor& output, at::Tensor& input,
                                       const c10d::AllgatherOptions& opts) {
  const Target target = targetOf(input);
  const OpShape shape = shapeOf(OpKind::kAllgatherBase, input, opts).agreedOn(output.numel());
  return issue(target, shape, OpType::_ALLGATHER_BASE, output, [&]() -> WorkPtr {
    return REFT_FORWARD(target.backend, all_gather_single, output, input, opts);
  });
}

WorkPtr ReftBackend::allgather_coalesced(TensorLists& outputs, TensorList& inputs,
                                         const c10d::AllgatherOptions& opts) {
  const Target target = targetOf(firstOf(inputs));
  const OpShape shape = shapeOf(OpKind::kAllgatherCoalesced, inputs, opts);
  return issue(target, shape, OpType::ALLGATHER_COALESCED, outputs,
               [&] { return target.backend->allgather_coalesced(outputs, inputs, opts); });
}

WorkPtr ReftBackend::allgather_into_tensor_coalesced(TensorList& outputs, TensorList& inputs,
                                                     const c10d::AllgatherOptions& opts) {
  const Target target = targetOf(firstOf(inputs));
  const OpShape shape =
      shapeOf(OpKind::kAllgatherCoalesced, inputs, opts).agreedOn(elements(outputs));
  return issue(target, shape, OpType::ALLGATHER_COALESCED, outputs, [&] {
    return target.backend->allgather_into_tensor_coalesced(outputs, inputs, opts);
  });
}

WorkPtr ReftBackend::all_gather_single_coalesced(TensorList& outputs, TensorList& inputs,
                                                 const c10d::AllgatherOptions& opts) {
  const Target target = targetOf(firstOf(inputs));
  const OpShape shape =
      shapeOf(OpKind::kAllgatherCoalesced, inputs, opts).agreedOn(elements(outputs));
  return issue(target, shape, OpType::ALLGATHER_COALESCED, outputs, [&]() -> WorkPtr {
    return REFT_FORWARD(target.backend, all_gather_single_coalesced, outputs, inputs, opts);
  });
}

WorkPtr ReftBackend::gather(TensorLists& outputs, TensorList& inputs,
                            const c10d::GatherOptions& opts) {
  const Target target = targetOf(firstOf(inputs));
  const OpShape shape = shapeOf(OpKind::kGather, inputs, opts);
  return issue(target, shape, OpType::GATHER, outputs,
               [&] { return target.backend->gather(outputs, inputs, opts); });
}

WorkPtr ReftBackend::gather_single(at::Tensor& output, at::Tensor& input,
                                   const c10d::GatherOptions& opts) {
  const Target target = targetOf(input);
  const OpShape shape = shapeOf(OpKind::kGatherSingle, input, opts);
  return issue(target, shape, OpType::GATHER, output, [&]() -> WorkPtr {
    return REFT_FORWARD(target.backend, gather_single, output, input, opts);
  });
}

WorkPtr ReftBackend::gather_into_tensor(at::Tensor& output, at::Tensor& input,
                                        const c10d::GatherOptions& opts) {
  const Target target = targetOf(input);
  const OpShape shape = shapeOf(OpKind::kGatherSingle, input, opts);
  return issue(target, shape, OpType::GATHER, output, [&]() -> WorkPtr {
    return REFT_FORWARD(target.backend, gather_into_tensor, output, input, opts);
  });
}

WorkPtr ReftBackend::scatter(TensorList& outputs, TensorLists& inputs,
                             const c10d::ScatterOptions& opts) {
  const Target target = targetOf(firstOf(outputs));
  const OpShape shape =
      shapeOf(OpKind::kScatter, outputs, opts).withBytes(inputs.empty() ? 0 : byteCount(inputs[0]));
  return issue(target, shape, OpType::SCATTER, outputs,
               [&] { return target.backend->scatter(outputs, inputs, opts); });
}

WorkPtr ReftBackend::reduce_scatter(TensorList& outputs, TensorLists& inputs,
                                    const c10d::ReduceScatterOptions& opts) {
  const Target target = targetOf(firstOf(inputs, outputs));
  const OpShape shape = shapeOf(OpKind::kReduceScatter, outputs, opts)
                            .withBytes(inputs.empty() ? 0 : byteCount(inputs[0]))
                            .agreedOn(inputs.empty() ? 0 : elements(inputs[0]));
  return issue(target, shape, OpType::REDUCE_SCATTER, outputs, [&] {
    return averaged(target, OpType::REDUCE_SCATTER, opts, outputs[0], outputs,
                    [&](const auto& options) -> WorkPtr {
                      return target.backend->reduce_scatter(outputs, inputs, options);
                    });
  });
}

WorkPtr ReftBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                          const c10d::ReduceScatterOptions& opts) {
  const Target target = targetOf(input);
  const OpShape shape = shapeOf(OpKind::kReduceScatterBase, input, opts);
  return issue(target, shape, OpType::_REDUCE_SCATTER_BASE, output, [&] {
    return averaged(target, OpType::_REDUCE_SCATTER_BASE, opts, output, output,
                    [&](const auto& options) -> WorkPtr {
                      return target.backend->_reduce_scatter_base(output, input, options);
                    });
  });
}

WorkPtr ReftBackend::reduce_scatter_single(at::Tensor& output, at::Tensor& input,
                                           const c10d::ReduceScatterOptions& opts) {
  const Target target = targetOf(input);
  const OpShape shape = shapeOf(OpKind::kReduceScatterBase, input, opts);
  return issue(target, shape, OpType::_REDUCE_SCATTER_BASE, output, [&] {
    return averaged(target, OpType::_REDUCE_SCATTER_BASE, opts, output, output,
                    [&](const auto& options) -> WorkPtr {
                      return REFT_FORWARD(target.backend, reduce_scatter_single, output, input,
                                          options);
                    });
  });
}

WorkPtr ReftBackend::reduce_scatter_tensor_coalesced(TensorList& outputs, TensorList& inputs,
                                                     const c10d::ReduceScatterOptions& opts) {
  const Target target = targetOf(firstOf(inputs));
  const OpShape shape = shapeOf(OpKind::kReduceScatterCoalesced, inputs, opts);
  return issue(target, shape, OpType::COALESCED, outputs, [&] {
    return averaged(
        target, OpType::COALESCED, opts, inputs[0], outputs, [&](const auto& options) -> WorkPtr {
          return target.backend->reduce_scatter_tensor_coalesced(outputs, inputs, options);
        });
  });
}

WorkPtr ReftBackend::reduce_scatter_single_coalesced(TensorList& outputs, TensorList& inputs,
                                                     const c10d::ReduceScatterOptions& opts) {
  const Target target = targetOf(firstOf(inputs));
  const OpShape shape = shapeOf(OpKind::kReduceScatterCoalesced, inputs, opts);
  return issue(target, shape, OpType::COALESCED, outputs, [&] {
    return averaged(target, OpType::COALESCED, opts, inputs[0], outputs,
                    [&](const auto& options) -> WorkPtr {
                      return REFT_FORWARD(target.backend, reduce_scatter_single_coalesced, outputs,
                                          inputs, options);
                    });
  });
}

WorkPtr ReftBackend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                   std::vector<int64_t>& output_splits,
                                   std::vector<int64_t>& input_splits,
                                   const c10d::AllToAllOptions& opts) {
  const Target target = targetOf(input);
  const OpShape shape = shapeOf(OpKind::kAlltoallBase, input, opts).agreedOn(0);
  return issue(target, shape, OpType::ALLTOALL_BASE, output, [&] {
    return target.backend->alltoall_base(output, input, output_splits, input_splits, opts);
  });
}

WorkPtr ReftBackend::all_to_all_single(at::Tensor& output, at::Tensor& input,
                                       std::vector<int64_t>& output_splits,
                                       std::vector<int64_t>& input_splits,
                                       const c10d::AllToAllOptions& opts) {
  const Target target = targetOf(input);
  const OpShape shape = shapeOf(OpKind::kAlltoallBase, input, opts).agreedOn(0);
  return issue(target, shape, OpType::ALLTOALL_BASE, output, [&]() -> WorkPtr {
    return REFT_FORWARD(target.backend, all_to_all_single, output, input, output_splits,
                        input_splits, opts);
  });
}

WorkPtr ReftBackend::alltoall(TensorList& outputs, TensorList& inputs,
                              const c10d::AllToAllOptions& opts) {
  const Target target = targetOf(firstOf(inputs));
  const OpShape shape = shapeOf(OpKind::kAlltoall, inputs, opts).agreedOn(0);
  return issue(target, shape, OpType::ALLTOALL, outputs, [&]() -> WorkPtr {
    if (target.where == ReftWork::Where::kDevice) {
      return target.backend->alltoall(outputs, inputs, opts);
    }
    // gloo has no list form, or one that needs equal shapes: one flat buffer each way.
    TORCH_CHECK_VALUE(
        inputs.size() == static_cast<size_t>(size_) && outputs.size() == inputs.size(),
        "all_to_all needs one tensor per rank (", size_, "), got ", inputs.size(), " to send and ",
        outputs.size(), " to receive");
    std::vector<int64_t> input_splits;
    std::vector<int64_t> output_splits;
    for (const TensorList* list : {&inputs, &outputs}) {
      for (const at::Tensor& tensor : *list) {
        TORCH_CHECK_TYPE(tensor.scalar_type() == inputs[0].scalar_type(),
                         "all_to_all on CPU needs tensors of one dtype");
        (list == &inputs ? input_splits : output_splits).push_back(tensor.numel());
      }
    }
    at::NoGradGuard no_grad;
    TensorList flat;
    for (const at::Tensor& tensor : inputs) {
      flat.push_back(tensor.detach().reshape({-1}));
    }
    at::Tensor sent = at::cat(flat);
    at::Tensor received = at::empty({elements(outputs)}, sent.options());
    WorkPtr work = target.backend->alltoall_base(received, sent, output_splits, input_splits, opts);
    auto scatter = [received, outputs] {
      at::NoGradGuard no_grad;
      int64_t offset = 0;
      for (const at::Tensor& output : outputs) {
        output.detach().copy_(received.narrow(0, offset, output.numel()).view(output.sizes()));
        offset += output.numel();
      }
    };
    if (!work) {
      scatter();
      return work;
    }
    return c10::make_intrusive<FinishingWork>(std::move(work), std::move(scatter), outputs, rank_,
                                              OpType::ALLTOALL);
  });
}

WorkPtr ReftBackend::barrier(const c10d::BarrierOptions& opts) {
  // The dispatcher drops the device: ids, or a bound device, mean the accelerator.
  const bool on_device =
      parts_.cuda && (!parts_.cpu || !opts.device_ids.empty() || bound_device_id_.has_value() ||
                      (opts.device.has_value() && !opts.device->is_cpu()));
  if (on_device) {
    syncLazyState();
  }
  const Target target =
      on_device ? Target{parts_.cuda.get(), ReftWork::Where::kDevice} : hostTarget();
  return issue(target, OpShape{.kind = OpKind::kBarrier}, OpType::BARRIER, TensorList{},
               [&] { return target.backend->barrier(opts); });
}

void ReftBackend::monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) {
  const Target target = hostTarget();
  // Synchronous: there is no Work.
  issue(target, OpShape{.kind = OpKind::kMonitoredBarrier}, OpType::BARRIER, TensorList{},
        [&]() -> WorkPtr {
          target.backend->monitoredBarrier(opts, wait_all_ranks);
          return nullptr;
        });
}

// -- messages

namespace {

// What a message of this rank to itself is refused for, in the words of gloo, which never sees it:
// it speaks of send where it receives, too.
void checkMessage(const TensorList& tensors, int tag) {
  TORCH_CHECK(tensors.size() == 1, "ProcessGroupGloo::send takes a single tensor");
  TORCH_CHECK(tag >= 0, "Tag must be nonnegative");
}

}  // namespace

// Without this, gloo reads beyond the table of its pairs.
void ReftBackend::checkPeer(const char* name, int peer) const {
  TORCH_CHECK_VALUE(peer >= 0 && peer < size_, name, ": rank ", peer, " is not in this group of ",
                    size_, " ranks");
}

WorkPtr ReftBackend::send(TensorList& tensors, int destination, int tag) {
  checkPeer("send", destination);
  const Target target = targetOf(firstOf(tensors));
  const OpShape shape = messageOf(OpKind::kSend, tensors, destination, tag);
  return issue(target, shape, OpType::SEND, TensorList{}, [&] {
    if (destination == rank_ && target.where == ReftWork::Where::kHost) {
      checkMessage(tensors, tag);
      return loopback_.send(tensors[0], tag);
    }
    return target.backend->send(tensors, destination, tag);
  });
}

WorkPtr ReftBackend::recv(TensorList& tensors, int source, int tag) {
  checkPeer("recv", source);
  const Target target = targetOf(firstOf(tensors));
  const OpShape shape = messageOf(OpKind::kRecv, tensors, source, tag);
  return issue(target, shape, OpType::RECV, tensors, [&] {
    if (source == rank_ && target.where == ReftWork::Where::kHost) {
      checkMessage(tensors, tag);
      return loopback_.recv(tensors[0], tag, hostTimeout());
    }
    return target.backend->recv(tensors, source, tag);
  });
}

WorkPtr ReftBackend::recvAnysource(TensorList& tensors, int tag) {
  const Target target = targetOf(firstOf(tensors));
  const OpShape shape = messageOf(OpKind::kRecvAnysource, tensors, -1, tag);
  return issue(target, shape, OpType::RECVANYSOURCE, tensors,
               [&] { return target.backend->recvAnysource(tensors, tag); });
}

}  // namespace reft

#include "c10d_backend/backend.h"

#include <algorithm>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "c10d_backend/call_site.h"
#include "c10d_backend/gil.h"
#include "c10d_backend/live_backends.h"
#include "c10d_backend/stream_wait.h"
#include "intercept/base/fault.h"
#include "intercept/base/log.h"
#include "intercept/record/cut.h"

namespace reft {

using c10d::OpType;

namespace {

constexpr uint8_t kNone = 255;

inline uint64_t mix(uint64_t hash, uint64_t value) {
  hash = (hash ^ value) * 0x9E3779B97F4A7C15ULL;
  return hash ^ (hash >> 32);
}

int64_t elements(const TensorList& tensors) {
  int64_t sum = 0;
  for (const at::Tensor& tensor : tensors) {
    sum += tensor.numel();
  }
  return sum;
}

uint64_t byteCount(const TensorList& tensors) {
  uint64_t sum = 0;
  for (const at::Tensor& tensor : tensors) {
    sum += static_cast<uint64_t>(tensor.numel()) * tensor.element_size();
  }
  return sum;
}

uint64_t byteCount(const at::Tensor& tensor) {
  return static_cast<uint64_t>(tensor.numel()) * tensor.element_size();
}

uint8_t dtypeOf(const TensorList& tensors) {
  if (tensors.empty()) {
    return kNone;
  }
  const auto type = tensors[0].scalar_type();
  for (const at::Tensor& tensor : tensors) {
    if (tensor.scalar_type() != type) {
      return kNone;
    }
  }
  return static_cast<uint8_t>(type);
}

uint8_t dtypeOf(const at::Tensor& tensor) {
  return static_cast<uint8_t>(tensor.scalar_type());
}

const at::Tensor& firstOf(const TensorList& some, const TensorLists& lists) {
  for (const TensorList& list : lists) {
    if (!list.empty()) {
      return list[0];
    }
  }
  TORCH_CHECK_VALUE(!some.empty(), "a collective needs at least one tensor");
  return some[0];
}

const at::Tensor& firstOf(const TensorList& tensors) {
  TORCH_CHECK_VALUE(!tensors.empty(), "a collective needs at least one tensor");
  return tensors[0];
}

}  // namespace

// `agreed`: the number that all ranks of a correct program have in common, 0 where there is none
// (splits of all_to_all).
struct ReftBackend::Shape {
  OpKind kind;
  uint64_t bytes = 0;
  int64_t agreed = 0;
  uint8_t dtype = kNone;
  uint8_t reduce_op = kNone;
  int32_t peer = -1;
  uint32_t tag = 0;
  // On a device: NCCL puts such an op on the stream that trains, which stands still in it; nobody
  // waits for it later.
  bool on_current_stream = false;
};

ReftBackend::ReftBackend(Parts parts, int rank, int size, OpLog& log)
    : Backend(rank, size),
      parts_(std::move(parts)),
      log_(log),
      group_(log.addGroup(parts_.group_name, rank, size)),
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
    region_.works.clear();
    parts_.cuda.reset();
    parts_.cpu.reset();
    parts_.store.reset();
  });
}

// -- which inner backend
// -------------------------------------------------------------------------------------------------

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

template <typename Body>
void ReftBackend::each(Body body) const {
  if (parts_.cuda) {
    body(*parts_.cuda);
  }
  if (parts_.cpu) {
    body(*parts_.cpu);
  }
}

// See Note [lazy state].
void ReftBackend::syncLazyState() {
  const bool description_due =
      !description_synced_.load(std::memory_order_acquire) && !pg_desc_.empty();
  if (!description_due && device_synced_ == bound_device_id_) {
    return;
  }
  const std::lock_guard<std::mutex> lock(lazy_mutex_);
  if (description_due) {
    each([this](c10d::Backend& inner) { inner.setGroupDesc(pg_desc_); });
    description_synced_.store(true, std::memory_order_release);
  }
  if (device_synced_ != bound_device_id_) {
    if (parts_.cuda) {
      parts_.cuda->setBoundDeviceId(bound_device_id_);
    }
    device_synced_ = bound_device_id_;
  }
}

// -- one op
// --------------------------------------------------------------------------------------------------------------

void ReftBackend::countForCut(const Shape& shape, OpType type) const {
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

template <typename Call>
WorkPtr ReftBackend::issue(const Target& target, const Shape& shape, OpType type, Call&& call) {
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
  // The two sides of a message agree, whatever they are called.
  uint64_t signature = c10d::isP2POp(type) ? static_cast<uint64_t>(OpKind::kSend)
                                           : static_cast<uint64_t>(shape.kind);
  signature = mix(signature, (uint64_t{shape.dtype} << 8) | shape.reduce_op);
  op.signature = mix(signature, static_cast<uint64_t>(shape.agreed));
  const uint64_t ticket = log_.begin(op);
  countForCut(shape, type);
  faultPoint(FaultPoint::collective, faultStep());
  const bool coalescing = coalescing_.load(std::memory_order_relaxed);
  WorkPtr work;
  try {
    if (coalescing) {
      openRegion(target);
    }
    // A large one on the stream itself is work of that stream, and tensor parallelism has hundreds
    // of them.
    const bool stands_in_it = shape.on_current_stream && target.where == ReftWork::Where::kDevice &&
                              !coalescing && op.bytes <= kLatencyBytes;
    const StreamWait marked(stands_in_it ? &log_ : nullptr, ticket);
    work = call();
  } catch (...) {
    log_.markDone(ticket, /*failed=*/true);
    if (coalescing) {
      // The caller's `with` block will not reach endCoalescing().
      const std::lock_guard<std::mutex> lock(region_mutex_);
      if (!region_.on_device) {
        coalescing_.store(false, std::memory_order_relaxed);
        region_ = Region{};
      }
    }
    throw;
  }
  log_.markEnqueued(ticket);
  if (coalescing) {
    return intoRegion(target, std::move(work), ticket, type);
  }
  if (!work) {
    // Null is an answer: on a device the op is on the caller's stream, on the host it is over.
    if (target.where == ReftWork::Where::kHost) {
      log_.markDone(ticket);
    }
    return work;
  }
  return c10::make_intrusive<ReftWork>(std::move(work), log_, ticket, target.where, rank_, type);
}

// -- coalescing: see Note [coalescing]
// --------------------------------------------------------------------------------------

bool ReftBackend::supportsCoalescing() const {
  return parts_.cuda && parts_.cuda->supportsCoalescing();
}

void ReftBackend::startCoalescing() {
  const std::lock_guard<std::mutex> lock(region_mutex_);
  region_ = Region{};
  coalescing_.store(true, std::memory_order_relaxed);
}

void ReftBackend::openRegion(const Target& target) {
  const std::lock_guard<std::mutex> lock(region_mutex_);
  if (target.where == ReftWork::Where::kDevice && !region_.on_device) {
    target.backend->startCoalescing();
    region_.on_device = true;
  }
}

WorkPtr ReftBackend::intoRegion(const Target& target, WorkPtr work, uint64_t ticket, OpType type) {
  const std::lock_guard<std::mutex> lock(region_mutex_);
  if (target.where == ReftWork::Where::kDevice) {
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
  const std::lock_guard<std::mutex> lock(region_mutex_);
  Region region = std::move(region_);
  region_ = Region{};
  coalescing_.store(false, std::memory_order_relaxed);
  if (region.on_device) {
    if (WorkPtr work = parts_.cuda->endCoalescing()) {
      const uint64_t first = region.device_tickets.empty() ? 0 : region.device_tickets.front();
      if (!region.device_tickets.empty()) {
        region.device_tickets.erase(region.device_tickets.begin());
      }
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
// ---------------------------------------------------------------------------------------------------------

bool ReftBackend::integerAverage(const Target& target, const c10d::ReduceOp& op,
                                 const at::Tensor& tensor) const {
  return target.where == ReftWork::Where::kHost && op.op_ == c10d::ReduceOp::AVG &&
         at::isIntegralType(tensor.scalar_type(), /*includeBool=*/false);
}

WorkPtr ReftBackend::divided(WorkPtr sum, TensorList tensors, OpType type) const {
  if (!sum) {
    return sum;
  }
  auto divide = [tensors, size = size_] {
    at::NoGradGuard no_grad;
    for (const at::Tensor& tensor : tensors) {
      tensor.detach().div_(size, "trunc");
    }
  };
  return c10::make_intrusive<FinishingWork>(std::move(sum), std::move(divide), TensorList{}, rank_,
                                            type);
}

// -- collectives
// -------------------------------------------------------------------------------------------------------------

WorkPtr ReftBackend::broadcast(TensorList& tensors, const c10d::BroadcastOptions& opts) {
  const Target target = targetOf(firstOf(tensors));
  const Shape shape{.kind = OpKind::kBroadcast,
                    .bytes = byteCount(tensors),
                    .agreed = elements(tensors),
                    .dtype = dtypeOf(tensors),
                    .peer = static_cast<int32_t>(opts.rootRank),
                    .on_current_stream = !opts.asyncOp};
  return issue(target, shape, OpType::BROADCAST,
               [&] { return target.backend->broadcast(tensors, opts); });
}

WorkPtr ReftBackend::allreduce(TensorList& tensors, const c10d::AllreduceOptions& opts) {
  const Target target = targetOf(firstOf(tensors));
  const Shape shape{.kind = OpKind::kAllreduce,
                    .bytes = byteCount(tensors),
                    .agreed = elements(tensors),
                    .dtype = dtypeOf(tensors),
                    .reduce_op = opts.reduceOp.op_,
                    .on_current_stream = !opts.asyncOp};
  return issue(target, shape, OpType::ALLREDUCE, [&] {
    if (integerAverage(target, opts.reduceOp, tensors[0])) {
      c10d::AllreduceOptions sum = opts;
      sum.reduceOp = c10d::ReduceOp::SUM;
      return divided(target.backend->allreduce(tensors, sum), tensors, OpType::ALLREDUCE);
    }
    return target.backend->allreduce(tensors, opts);
  });
}

WorkPtr ReftBackend::allreduce_sparse(TensorList& tensors, const c10d::AllreduceOptions& opts) {
  const Target target = targetOf(firstOf(tensors));
  const Shape shape{.kind = OpKind::kAllreduceSparse,
                    .agreed = elements(tensors),
                    .dtype = dtypeOf(tensors),
                    .reduce_op = opts.reduceOp.op_,
                    .on_current_stream = !opts.asyncOp};
  return issue(target, shape, OpType::_ALLREDUCE_SPARSE,
               [&] { return target.backend->allreduce_sparse(tensors, opts); });
}

WorkPtr ReftBackend::allreduce_coalesced(TensorList& tensors,
                                         const c10d::AllreduceCoalescedOptions& opts) {
  const Target target = targetOf(firstOf(tensors));
  const Shape shape{.kind = OpKind::kAllreduceCoalesced,
                    .bytes = byteCount(tensors),
                    .agreed = elements(tensors),
                    .dtype = dtypeOf(tensors),
                    .reduce_op = opts.reduceOp.op_,
                    .on_current_stream = !opts.asyncOp};
  return issue(target, shape, OpType::ALLREDUCE_COALESCED, [&] {
    if (integerAverage(target, opts.reduceOp, tensors[0])) {
      c10d::AllreduceCoalescedOptions sum = opts;
      sum.reduceOp = c10d::ReduceOp::SUM;
      return divided(target.backend->allreduce_coalesced(tensors, sum), tensors,
                     OpType::ALLREDUCE_COALESCED);
    }
    return target.backend->allreduce_coalesced(tensors, opts);
  });
}

WorkPtr ReftBackend::reduce(TensorList& tensors, const c10d::ReduceOptions& opts) {
  const Target target = targetOf(firstOf(tensors));
  const Shape shape{.kind = OpKind::kReduce,
                    .bytes = byteCount(tensors),
                    .agreed = elements(tensors),
                    .dtype = dtypeOf(tensors),
                    .reduce_op = opts.reduceOp.op_,
                    .peer = static_cast<int32_t>(opts.rootRank),
                    .on_current_stream = !opts.asyncOp};
  return issue(target, shape, OpType::REDUCE, [&] {
    if (integerAverage(target, opts.reduceOp, tensors[0])) {
      c10d::ReduceOptions sum = opts;
      sum.reduceOp = c10d::ReduceOp::SUM;
      WorkPtr work = target.backend->reduce(tensors, sum);
      // Elsewhere the tensor is scratch, as with NCCL.
      return opts.rootRank == rank_ ? divided(std::move(work), tensors, OpType::REDUCE) : work;
    }
    return target.backend->reduce(tensors, opts);
  });
}

WorkPtr ReftBackend::allgather(TensorLists& outputs, TensorList& inputs,
                               const c10d::AllgatherOptions& opts) {
  const Target target = targetOf(firstOf(inputs));
  const Shape shape{.kind = OpKind::kAllgather,
                    .bytes = byteCount(inputs),
                    .agreed = outputs.empty() ? 0 : elements(outputs[0]),
                    .dtype = dtypeOf(inputs),
                    .on_current_stream = !opts.asyncOp};
  return issue(target, shape, OpType::ALLGATHER,
               [&] { return target.backend->allgather(outputs, inputs, opts); });
}

WorkPtr ReftBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                     const c10d::AllgatherOptions& opts) {
  const Target target = targetOf(input);
  const Shape shape{.kind = OpKind::kAllgatherBase,
                    .bytes = byteCount(input),
                    .agreed = output.numel(),
                    .dtype = dtypeOf(input),
                    .on_current_stream = !opts.asyncOp};
  return issue(target, shape, OpType::_ALLGATHER_BASE,
               [&] { return target.backend->_allgather_base(output, input, opts); });
}

WorkPtr ReftBackend::all_gather_single(at::Tensor& output, at::Tensor& input,
                                       const c10d::AllgatherOptions& opts) {
  const Target target = targetOf(input);
  const Shape shape{.kind = OpKind::kAllgatherBase,
                    .bytes = byteCount(input),
                    .agreed = output.numel(),
                    .dtype = dtypeOf(input),
                    .on_current_stream = !opts.asyncOp};
  return issue(target, shape, OpType::_ALLGATHER_BASE, [&]() -> WorkPtr {
    return REFT_FORWARD(target.backend, all_gather_single, output, input, opts);
  });
}

WorkPtr ReftBackend::allgather_coalesced(TensorLists& outputs, TensorList& inputs,
                                         const c10d::AllgatherOptions& opts) {
  const Target target = targetOf(firstOf(inputs));
  const Shape shape{.kind = OpKind::kAllgatherCoalesced,
                    .bytes = byteCount(inputs),
                    .agreed = elements(inputs),
                    .dtype = dtypeOf(inputs),
                    .on_current_stream = !opts.asyncOp};
  return issue(target, shape, OpType::ALLGATHER_COALESCED,
               [&] { return target.backend->allgather_coalesced(outputs, inputs, opts); });
}

WorkPtr ReftBackend::allgather_into_tensor_coalesced(TensorList& outputs, TensorList& inputs,
                                                     const c10d::AllgatherOptions& opts) {
  const Target target = targetOf(firstOf(inputs));
  const Shape shape{.kind = OpKind::kAllgatherCoalesced,
                    .bytes = byteCount(inputs),
                    .agreed = elements(outputs),
                    .dtype = dtypeOf(inputs),
                    .on_current_stream = !opts.asyncOp};
  return issue(target, shape, OpType::ALLGATHER_COALESCED, [&] {
    return target.backend->allgather_into_tensor_coalesced(outputs, inputs, opts);
  });
}

WorkPtr ReftBackend::all_gather_single_coalesced(TensorList& outputs, TensorList& inputs,
                                                 const c10d::AllgatherOptions& opts) {
  const Target target = targetOf(firstOf(inputs));
  const Shape shape{.kind = OpKind::kAllgatherCoalesced,
                    .bytes = byteCount(inputs),
                    .agreed = elements(outputs),
                    .dtype = dtypeOf(inputs),
                    .on_current_stream = !opts.asyncOp};
  return issue(target, shape, OpType::ALLGATHER_COALESCED, [&]() -> WorkPtr {
    return REFT_FORWARD(target.backend, all_gather_single_coalesced, outputs, inputs, opts);
  });
}

WorkPtr ReftBackend::gather(TensorLists& outputs, TensorList& inputs,
                            const c10d::GatherOptions& opts) {
  const Target target = targetOf(firstOf(inputs));
  const Shape shape{.kind = OpKind::kGather,
                    .bytes = byteCount(inputs),
                    .agreed = elements(inputs),
                    .dtype = dtypeOf(inputs),
                    .peer = static_cast<int32_t>(opts.rootRank),
                    .on_current_stream = !opts.asyncOp};
  return issue(target, shape, OpType::GATHER,
               [&] { return target.backend->gather(outputs, inputs, opts); });
}

WorkPtr ReftBackend::gather_single(at::Tensor& output, at::Tensor& input,
                                   const c10d::GatherOptions& opts) {
  const Target target = targetOf(input);
  const Shape shape{.kind = OpKind::kGatherSingle,
                    .bytes = byteCount(input),
                    .agreed = input.numel(),
                    .dtype = dtypeOf(input),
                    .peer = static_cast<int32_t>(opts.rootRank),
                    .on_current_stream = !opts.asyncOp};
  return issue(target, shape, OpType::GATHER, [&]() -> WorkPtr {
    return REFT_FORWARD(target.backend, gather_single, output, input, opts);
  });
}

WorkPtr ReftBackend::gather_into_tensor(at::Tensor& output, at::Tensor& input,
                                        const c10d::GatherOptions& opts) {
  const Target target = targetOf(input);
  const Shape shape{.kind = OpKind::kGatherSingle,
                    .bytes = byteCount(input),
                    .agreed = input.numel(),
                    .dtype = dtypeOf(input),
                    .peer = static_cast<int32_t>(opts.rootRank),
                    .on_current_stream = !opts.asyncOp};
  return issue(target, shape, OpType::GATHER, [&]() -> WorkPtr {
    return REFT_FORWARD(target.backend, gather_into_tensor, output, input, opts);
  });
}

WorkPtr ReftBackend::scatter(TensorList& outputs, TensorLists& inputs,
                             const c10d::ScatterOptions& opts) {
  const Target target = targetOf(firstOf(outputs));
  const Shape shape{.kind = OpKind::kScatter,
                    .bytes = inputs.empty() ? 0 : byteCount(inputs[0]),
                    .agreed = elements(outputs),
                    .dtype = dtypeOf(outputs),
                    .peer = static_cast<int32_t>(opts.rootRank),
                    .on_current_stream = !opts.asyncOp};
  return issue(target, shape, OpType::SCATTER,
               [&] { return target.backend->scatter(outputs, inputs, opts); });
}

WorkPtr ReftBackend::reduce_scatter(TensorList& outputs, TensorLists& inputs,
                                    const c10d::ReduceScatterOptions& opts) {
  const Target target = targetOf(firstOf(outputs, inputs));
  const Shape shape{.kind = OpKind::kReduceScatter,
                    .bytes = inputs.empty() ? 0 : byteCount(inputs[0]),
                    .agreed = inputs.empty() ? 0 : elements(inputs[0]),
                    .dtype = dtypeOf(outputs),
                    .reduce_op = opts.reduceOp.op_,
                    .on_current_stream = !opts.asyncOp};
  return issue(target, shape, OpType::REDUCE_SCATTER, [&] {
    if (integerAverage(target, opts.reduceOp, outputs[0])) {
      c10d::ReduceScatterOptions sum = opts;
      sum.reduceOp = c10d::ReduceOp::SUM;
      return divided(target.backend->reduce_scatter(outputs, inputs, sum), outputs,
                     OpType::REDUCE_SCATTER);
    }
    return target.backend->reduce_scatter(outputs, inputs, opts);
  });
}

WorkPtr ReftBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                          const c10d::ReduceScatterOptions& opts) {
  const Target target = targetOf(input);
  const Shape shape{.kind = OpKind::kReduceScatterBase,
                    .bytes = byteCount(input),
                    .agreed = input.numel(),
                    .dtype = dtypeOf(input),
                    .reduce_op = opts.reduceOp.op_,
                    .on_current_stream = !opts.asyncOp};
  return issue(target, shape, OpType::_REDUCE_SCATTER_BASE, [&] {
    if (integerAverage(target, opts.reduceOp, output)) {
      c10d::ReduceScatterOptions sum = opts;
      sum.reduceOp = c10d::ReduceOp::SUM;
      return divided(target.backend->_reduce_scatter_base(output, input, sum), {output},
                     OpType::_REDUCE_SCATTER_BASE);
    }
    return target.backend->_reduce_scatter_base(output, input, opts);
  });
}

WorkPtr ReftBackend::reduce_scatter_single(at::Tensor& output, at::Tensor& input,
                                           const c10d::ReduceScatterOptions& opts) {
  const Target target = targetOf(input);
  const Shape shape{.kind = OpKind::kReduceScatterBase,
                    .bytes = byteCount(input),
                    .agreed = input.numel(),
                    .dtype = dtypeOf(input),
                    .reduce_op = opts.reduceOp.op_,
                    .on_current_stream = !opts.asyncOp};
  return issue(target, shape, OpType::_REDUCE_SCATTER_BASE, [&]() -> WorkPtr {
    if (integerAverage(target, opts.reduceOp, output)) {
      c10d::ReduceScatterOptions sum = opts;
      sum.reduceOp = c10d::ReduceOp::SUM;
      return divided(REFT_FORWARD(target.backend, reduce_scatter_single, output, input, sum),
                     {output}, OpType::_REDUCE_SCATTER_BASE);
    }
    return REFT_FORWARD(target.backend, reduce_scatter_single, output, input, opts);
  });
}

WorkPtr ReftBackend::reduce_scatter_tensor_coalesced(TensorList& outputs, TensorList& inputs,
                                                     const c10d::ReduceScatterOptions& opts) {
  const Target target = targetOf(firstOf(inputs));
  const Shape shape{.kind = OpKind::kReduceScatterCoalesced,
                    .bytes = byteCount(inputs),
                    .agreed = elements(inputs),
                    .dtype = dtypeOf(inputs),
                    .reduce_op = opts.reduceOp.op_,
                    .on_current_stream = !opts.asyncOp};
  return issue(target, shape, OpType::COALESCED, [&] {
    if (integerAverage(target, opts.reduceOp, inputs[0])) {
      c10d::ReduceScatterOptions sum = opts;
      sum.reduceOp = c10d::ReduceOp::SUM;
      return divided(target.backend->reduce_scatter_tensor_coalesced(outputs, inputs, sum), outputs,
                     OpType::COALESCED);
    }
    return target.backend->reduce_scatter_tensor_coalesced(outputs, inputs, opts);
  });
}

WorkPtr ReftBackend::reduce_scatter_single_coalesced(TensorList& outputs, TensorList& inputs,
                                                     const c10d::ReduceScatterOptions& opts) {
  const Target target = targetOf(firstOf(inputs));
  const Shape shape{.kind = OpKind::kReduceScatterCoalesced,
                    .bytes = byteCount(inputs),
                    .agreed = elements(inputs),
                    .dtype = dtypeOf(inputs),
                    .reduce_op = opts.reduceOp.op_,
                    .on_current_stream = !opts.asyncOp};
  return issue(target, shape, OpType::COALESCED, [&]() -> WorkPtr {
    if (integerAverage(target, opts.reduceOp, inputs[0])) {
      c10d::ReduceScatterOptions sum = opts;
      sum.reduceOp = c10d::ReduceOp::SUM;
      return divided(
          REFT_FORWARD(target.backend, reduce_scatter_single_coalesced, outputs, inputs, sum),
          outputs, OpType::COALESCED);
    }
    return REFT_FORWARD(target.backend, reduce_scatter_single_coalesced, outputs, inputs, opts);
  });
}

WorkPtr ReftBackend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                   std::vector<int64_t>& output_splits,
                                   std::vector<int64_t>& input_splits,
                                   const c10d::AllToAllOptions& opts) {
  const Target target = targetOf(input);
  const Shape shape{.kind = OpKind::kAlltoallBase,
                    .bytes = byteCount(input),
                    .dtype = dtypeOf(input),
                    .on_current_stream = !opts.asyncOp};
  return issue(target, shape, OpType::ALLTOALL_BASE, [&] {
    return target.backend->alltoall_base(output, input, output_splits, input_splits, opts);
  });
}

WorkPtr ReftBackend::all_to_all_single(at::Tensor& output, at::Tensor& input,
                                       std::vector<int64_t>& output_splits,
                                       std::vector<int64_t>& input_splits,
                                       const c10d::AllToAllOptions& opts) {
  const Target target = targetOf(input);
  const Shape shape{.kind = OpKind::kAlltoallBase,
                    .bytes = byteCount(input),
                    .dtype = dtypeOf(input),
                    .on_current_stream = !opts.asyncOp};
  return issue(target, shape, OpType::ALLTOALL_BASE, [&]() -> WorkPtr {
    return REFT_FORWARD(target.backend, all_to_all_single, output, input, output_splits,
                        input_splits, opts);
  });
}

WorkPtr ReftBackend::alltoall(TensorList& outputs, TensorList& inputs,
                              const c10d::AllToAllOptions& opts) {
  const Target target = targetOf(firstOf(inputs));
  const Shape shape{.kind = OpKind::kAlltoall,
                    .bytes = byteCount(inputs),
                    .dtype = dtypeOf(inputs),
                    .on_current_stream = !opts.asyncOp};
  return issue(target, shape, OpType::ALLTOALL, [&]() -> WorkPtr {
    if (target.where == ReftWork::Where::kDevice) {
      return target.backend->alltoall(outputs, inputs, opts);
    }
    // gloo has no list form, or one that wants equal shapes: one flat buffer each way.
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
  return issue(target, Shape{.kind = OpKind::kBarrier}, OpType::BARRIER,
               [&] { return target.backend->barrier(opts); });
}

void ReftBackend::monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) {
  const Target target = hostTarget();
  // Runs to its end: nobody gets a Work.
  issue(target, Shape{.kind = OpKind::kMonitoredBarrier}, OpType::BARRIER, [&]() -> WorkPtr {
    target.backend->monitoredBarrier(opts, wait_all_ranks);
    return nullptr;
  });
}

// -- messages
// ----------------------------------------------------------------------------------------------------------------

WorkPtr ReftBackend::send(TensorList& tensors, int destination, int tag) {
  const Target target = targetOf(firstOf(tensors));
  const Shape shape{.kind = OpKind::kSend,
                    .bytes = byteCount(tensors),
                    .agreed = elements(tensors),
                    .dtype = dtypeOf(tensors),
                    .peer = destination,
                    .tag = static_cast<uint32_t>(tag)};
  return issue(target, shape, OpType::SEND, [&] {
    if (destination == rank_ && target.where == ReftWork::Where::kHost) {
      return loopback_.send(tensors[0], tag);
    }
    return target.backend->send(tensors, destination, tag);
  });
}

WorkPtr ReftBackend::recv(TensorList& tensors, int source, int tag) {
  const Target target = targetOf(firstOf(tensors));
  const Shape shape{.kind = OpKind::kRecv,
                    .bytes = byteCount(tensors),
                    .agreed = elements(tensors),
                    .dtype = dtypeOf(tensors),
                    .peer = source,
                    .tag = static_cast<uint32_t>(tag)};
  return issue(target, shape, OpType::RECV, [&] {
    if (source == rank_ && target.where == ReftWork::Where::kHost) {
      return loopback_.recv(tensors[0], tag, hostTimeout());
    }
    return target.backend->recv(tensors, source, tag);
  });
}

WorkPtr ReftBackend::recvAnysource(TensorList& tensors, int tag) {
  const Target target = targetOf(firstOf(tensors));
  const Shape shape{.kind = OpKind::kRecvAnysource,
                    .bytes = byteCount(tensors),
                    .agreed = elements(tensors),
                    .dtype = dtypeOf(tensors),
                    .tag = static_cast<uint32_t>(tag)};
  return issue(target, shape, OpType::RECVANYSOURCE,
               [&] { return target.backend->recvAnysource(tensors, tag); });
}

std::chrono::milliseconds ReftBackend::hostTimeout() {
  int64_t timeout = host_timeout_ms_.load(std::memory_order_relaxed);
  if (timeout == 0) {
    try {
      timeout = parts_.cpu->getBackendOptions()->timeout.count();
    } catch (...) {  // an inner backend without options
      timeout = kBackendDefaultTimeout.count();
    }
    host_timeout_ms_.store(timeout, std::memory_order_relaxed);
  }
  return std::chrono::milliseconds(timeout);
}

// -- the group
// ---------------------------------------------------------------------------------------------------------------

bool ReftBackend::supportsSplitting() const {
  return main().supportsSplitting();
}
bool ReftBackend::supportsTimeEstimation() const {
  return parts_.cuda && parts_.cuda->supportsTimeEstimation();
}
bool ReftBackend::supportsShrinking() const {
  return parts_.cuda && parts_.cuda->supportsShrinking();
}

// split_group() copies them deeply and hands them back to split(): they must be of the type that
// the inner split() wants.
OptionsPtr ReftBackend::getBackendOptions() {
  return main().getBackendOptions();
}

void ReftBackend::setTimeout(std::chrono::milliseconds timeout) {
  host_timeout_ms_.store(timeout.count(), std::memory_order_relaxed);
  each([&](c10d::Backend& inner) { inner.setTimeout(timeout); });
}

void ReftBackend::setSequenceNumberForGroup() {
#if !REFT_TORCH_AT_LEAST(2, 14)  // later ones only warn that it does nothing
  each([](c10d::Backend& inner) { inner.setSequenceNumberForGroup(); });
#endif
}

uint64_t ReftBackend::getSequenceNumberForGroup() {
  uint64_t sum = 0;
  each([&](c10d::Backend& inner) { sum += inner.getSequenceNumberForGroup(); });
  return sum;
}

void ReftBackend::registerOnCompletionHook(
    std::function<void(std::shared_ptr<c10d::WorkInfo>)>&& hook) {
  auto copy = hook;
  main().registerOnCompletionHook(std::move(hook));
  onCompletionHook_ = std::move(copy);  // hasHooks() is not virtual
}

void ReftBackend::waitForPendingWorks() {
  main().waitForPendingWorks();
}
void ReftBackend::enableCollectivesTiming() {
  main().enableCollectivesTiming();
}

void ReftBackend::setGroupUid(const std::string& uid) {
  Backend::setGroupUid(uid);
  each([&](c10d::Backend& inner) { inner.setGroupUid(uid); });
}

void ReftBackend::setBoundDeviceId(std::optional<at::Device> device) {
  Backend::setBoundDeviceId(device);
  syncLazyState();
}

void ReftBackend::eagerConnectSingleDevice(at::Device device) {
  syncLazyState();
  if (parts_.cuda && !device.is_cpu()) {
    parts_.cuda->eagerConnectSingleDevice(device);
  } else if (parts_.cpu) {
    parts_.cpu->eagerConnectSingleDevice(device);
  }
}

c10d::ErrorType ReftBackend::getError() {
  return main().getError();
}
std::shared_ptr<c10::Allocator> ReftBackend::getMemAllocator() {
  return main().getMemAllocator();
}
at::Tensor ReftBackend::allocateTensor(long size, at::TensorOptions options) {
  return main().allocateTensor(size, options);
}
bool ReftBackend::supportsTensorAlloc(c10::DeviceIndex device) {
  return main().supportsTensorAlloc(device);
}

BackendPtr ReftBackend::child(BackendPtr cpu, BackendPtr cuda, int rank, int size, StorePtr store,
                              const std::string& name) const {
  Parts parts;
  parts.cpu = std::move(cpu);
  parts.cuda = std::move(cuda);
  parts.store = std::move(store);
  parts.store_prefix = parts_.store_prefix;
  parts.group_name = name;
  parts.make_cpu = parts_.make_cpu;
  return c10::make_intrusive<ReftBackend>(std::move(parts), rank, size, log_);
}

// Called once per device type that the group serves, with the same group name.
BackendPtr ReftBackend::split(const StorePtr& store, const std::vector<int>& ranks,
                              const OptionsPtr& opts) {
  syncLazyState();
  const std::string name = opts ? opts->group_name : std::string();
  const std::lock_guard<std::mutex> lock(children_mutex_);
  if (const auto found = children_.find(name); found != children_.end() && !name.empty()) {
    if (BackendPtr known = found->second.lock()) {
      return known;
    }
  }
  const StorePtr own = c10::make_intrusive<c10d::PrefixStore>(prefixed("split/" + name), store);
  const auto place = std::find(ranks.begin(), ranks.end(), rank_);
  const bool member = place != ranks.end();
  const int rank = static_cast<int>(place - ranks.begin());
  const int size = static_cast<int>(ranks.size());
  BackendPtr cuda;
  BackendPtr cpu;
  if (parts_.cuda) {
    // Every rank of the parent takes part in NCCL's split, members or not.
    cuda = parts_.cuda->split(c10::make_intrusive<c10d::PrefixStore>("cuda", own), ranks, opts);
  }
  if (parts_.cpu && member) {
    const StorePtr cpu_store = c10::make_intrusive<c10d::PrefixStore>("cpu", own);
    if (parts_.cuda && parts_.make_cpu) {  // `opts` are NCCL's
      cpu = parts_.make_cpu(cpu_store, rank, size, opts ? opts->timeout : hostTimeout(), name);
    } else {
      cpu = parts_.cpu->split(cpu_store, ranks, opts);
    }
  }
  split_count_.fetch_add(1);
  if (!cuda && !cpu) {
    return nullptr;
  }
  BackendPtr made = child(std::move(cpu), std::move(cuda), rank, size, own, name);
  if (!name.empty()) {
    children_.insert_or_assign(name, c10::weak_intrusive_ptr<c10d::Backend>(made));
  }
  return made;
}

BackendPtr ReftBackend::merge(const StorePtr& store, const OptionsPtr& opts, const int& rank,
                              const int& size) {
  const std::string name = opts ? opts->group_name : std::string();
  const StorePtr own = c10::make_intrusive<c10d::PrefixStore>(prefixed("merge/" + name), store);
  BackendPtr cuda;
  BackendPtr cpu;
  if (parts_.cuda) {
    cuda =
        parts_.cuda->merge(c10::make_intrusive<c10d::PrefixStore>("cuda", own), opts, rank, size);
  }
  if (parts_.cpu) {
    const StorePtr cpu_store = c10::make_intrusive<c10d::PrefixStore>("cpu", own);
    cpu = parts_.make_cpu
              ? parts_.make_cpu(cpu_store, rank, size, opts ? opts->timeout : hostTimeout(), name)
              : parts_.cpu->merge(cpu_store, opts, rank, size);
  }
  return child(std::move(cpu), std::move(cuda), rank, size, own, name);
}

BackendPtr ReftBackend::shrink(const std::vector<int64_t>& ranks_to_exclude, int shrink_flags,
                               const OptionsPtr& opts_override) {
  TORCH_CHECK(parts_.cuda, "Backend reft does not support shrink without NCCL");
  syncLazyState();
  BackendPtr cuda = parts_.cuda->shrink(ranks_to_exclude, shrink_flags, opts_override);
  const std::string name =
      parts_.group_name + ":shrunk:" + std::to_string(shrink_count_.fetch_add(1));
  const int rank = cuda->getRank();
  const int size = cuda->getSize();
  BackendPtr cpu;
  StorePtr own = parts_.store;
  if (parts_.cpu && parts_.make_cpu && parts_.store) {
    own = c10::make_intrusive<c10d::PrefixStore>(name, parts_.store);
    cpu = parts_.make_cpu(c10::make_intrusive<c10d::PrefixStore>("cpu", own), rank, size,
                          hostTimeout(), name);
  }
  return child(std::move(cpu), std::move(cuda), rank, size, std::move(own), name);
}

void ReftBackend::abort() {
  closed_.store(true);
  std::exception_ptr failure;
  each([&](c10d::Backend& inner) {
    try {
      inner.abort();
    } catch (...) {
      failure = std::current_exception();
    }
  });
  if (failure) {
    std::rethrow_exception(failure);
  }
}

void ReftBackend::shutdown() {
  if (closed_.exchange(true)) {
    return;
  }
  std::exception_ptr failure;
  each([&](c10d::Backend& inner) {
    try {
      inner.shutdown();
    } catch (...) {
      failure = std::current_exception();
    }
  });
  if (failure) {
    std::rethrow_exception(failure);
  }
}

// -- newer torch
// -------------------------------------------------------------------------------------------------------------

void ReftBackend::suspend() {
  REFT_FORWARD(&main(), suspend);
}
void ReftBackend::resume() {
  REFT_FORWARD(&main(), resume);
}
std::unordered_map<std::string, uint64_t> ReftBackend::getMemoryStats() {
  return REFT_FORWARD(&main(), getMemoryStats);
}
bool ReftBackend::isInitialized() {
  return REFT_FORWARD(&main(), isInitialized);
}
void ReftBackend::startTimeEstimate() {
  REFT_FORWARD(&main(), startTimeEstimate);
}
float ReftBackend::endTimeEstimate() {
  return REFT_FORWARD(&main(), endTimeEstimate);
}

void ReftBackend::addEphemeralTimeout(const std::chrono::milliseconds& timeout) {
  each([&](c10d::Backend& inner) { REFT_FORWARD(&inner, addEphemeralTimeout, timeout); });
}

bool ReftBackend::supportsAbortHooks() const {
  bool all = true;
  each([&](c10d::Backend& inner) { all = all && REFT_FORWARD(&inner, supportsAbortHooks); });
  return all;
}

#ifdef C10D_BACKEND_HAS_RECONFIGURE
// Rank and size would change under the wrapper and its other inner backend.
bool ReftBackend::supportsReconfigure() const {
  return false;
}
c10d::ReconfigureHandle ReftBackend::get_reconfigure_handle() const {
  return main().get_reconfigure_handle();
}
WorkPtr ReftBackend::reconfigure(const c10d::ReconfigureOptions& opts) {
  return main().reconfigure(opts);
}
#endif

#ifdef C10D_BACKEND_HAS_WINDOW
bool ReftBackend::supportsWindow() const {
  return main().supportsWindow();
}
c10::intrusive_ptr<c10d::Window> ReftBackend::new_window(const std::optional<at::Tensor>& tensor) {
  return main().new_window(tensor);
}
#endif

#ifdef C10D_BACKEND_HAS_HOOKS
void ReftBackend::registerAbortHook(int64_t id, c10d::AbortHook hook) {
  each([&](c10d::Backend& inner) { inner.registerAbortHook(id, hook); });
}
void ReftBackend::unregisterAbortHook(int64_t id) {
  each([&](c10d::Backend& inner) { inner.unregisterAbortHook(id); });
}
#endif

#if REFT_TORCH_HAS_COMPLETION_HOOKS
bool ReftBackend::supportsCompletionHooks() const {
  bool all = true;
  each([&](c10d::Backend& inner) { all = all && inner.supportsCompletionHooks(); });
  return all;
}
void ReftBackend::registerCompletionHook(int64_t id, c10d::CompletionHook hook) {
  each([&](c10d::Backend& inner) { inner.registerCompletionHook(id, hook); });
}
void ReftBackend::unregisterCompletionHook(int64_t id) {
  each([&](c10d::Backend& inner) { inner.unregisterCompletionHook(id); });
}
#endif

}  // namespace reft

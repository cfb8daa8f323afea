#include "tests/fakes/cuda/device.h"

#include <pthread.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <utility>

#include "tests/fakes/cuda/calls.h"
#include "tests/fakes/cuda/device_access.h"

namespace reft::fake {

namespace {

thread_local int t_device = -1;
thread_local CaptureMode t_mode = kModeGlobal;

uint64_t setting(const char* name, uint64_t otherwise) {
  const char* text = std::getenv(name);
  return text == nullptr ? otherwise : std::strtoull(text, nullptr, 10);
}

uint64_t nextStreamId() {
  static std::atomic<uint64_t> next{1};
  return next.fetch_add(1);
}

void sleepUntil(int64_t ns) {
  const int64_t left = ns - nowNs();
  if (left > 0) {
    std::this_thread::sleep_for(std::chrono::nanoseconds(left));
  }
}

// As a DMA engine: piece by piece, at `rate` bytes per second (0: as fast as memory), so that
// whoever writes the source meanwhile is seen in the copy.
void moveBytes(char* to, const char* from, size_t bytes, uint64_t rate) {
  constexpr size_t kPiece = size_t{64} << 10;
  const int64_t begin = nowNs();
  const DeviceAccess access;
  for (size_t at = 0; at < bytes; at += kPiece) {
    const size_t part = std::min(kPiece, bytes - at);
    std::memmove(to + at, from + at, part);
    if (rate != 0) {
      sleepUntil(begin + static_cast<int64_t>(static_cast<double>(at + part) * 1e9 /
                                              static_cast<double>(rate)));
    }
  }
}

// What streams did, for whoever set FAKE_CUDA_TRACE. Written at the end of the process, or when
// much has come together.
void trace(const Stream& stream, Kind kind, int64_t begin, int64_t end, uint64_t bytes) {
  static std::FILE* const file = [] {
    const char* const name = std::getenv("FAKE_CUDA_TRACE");
    return name == nullptr
               ? nullptr
               : std::fopen((std::string(name) + "." + std::to_string(::getpid())).c_str(), "w");
  }();
  if (file != nullptr) {
    std::fprintf(file, "%d %" PRIu64 " %c %" PRId64 " %" PRId64 " %" PRIu64 "\n", stream.device,
                 stream.id, static_cast<char>(kind), begin, end, bytes);
  }
}

}  // namespace

int64_t nowNs() {
  return std::chrono::steady_clock::now().time_since_epoch().count();
}

// -- Completion
// -----------------------------------------------------------------------------------------------------------

void Completion::set() {
  {
    const std::lock_guard lock(mutex_);
    done_ = true;
    at_ns_ = nowNs();
  }
  changed_.notify_all();
}
void Completion::wait() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return done_; });
}
bool Completion::done() const {
  const std::lock_guard lock(mutex_);
  return done_;
}
int64_t Completion::atNs() const {
  const std::lock_guard lock(mutex_);
  return at_ns_;
}

// -- Stream
// ---------------------------------------------------------------------------------------------------------------

Stream::Stream(int d, unsigned f, int p, bool is_default_stream)
    : device(d), flags(f), priority(p), is_default(is_default_stream), id(nextStreamId()) {}

Done Stream::push(Work work, std::vector<Done> after, Kind kind, uint64_t bytes) {
  auto done = std::make_shared<Completion>();
  {
    const std::lock_guard lock(mutex_);
    queue_.push_back({std::move(work), std::move(after), done, kind, bytes});
    newest_ = done;
    if (!started_) {
      started_ = true;
      std::thread([self = shared_from_this()] { self->run(); }).detach();
    }
  }
  changed_.notify_one();
  return done;
}

Done Stream::newest() const {
  const std::lock_guard lock(mutex_);
  return newest_;
}

void Stream::close() {
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
  }
  changed_.notify_one();
}

void Stream::run() {
  ::pthread_setname_np(::pthread_self(), "fake-cuda");
  // A kernel's time is slept, and 50 us more each time would not be the same device.
  ::prctl(PR_SET_TIMERSLACK, 1000UL);
  while (true) {
    Item item;
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return closed_ || !queue_.empty(); });
      if (queue_.empty()) {
        return;
      }
      item = std::move(queue_.front());
      queue_.pop_front();
    }
    const int64_t came = nowNs();
    for (const Done& earlier : item.after) {
      earlier->wait();
    }
    machine().pause();
    const int64_t begin = nowNs();
    if (!item.after.empty()) {
      trace(*this, Kind::kWait, came, begin, 0);
    }
    if (item.work && calls().stuck() == kSuccess) {  // a context that has failed runs nothing more
      item.work();
      trace(*this, item.kind, begin, nowNs(), item.bytes);
    }
    item.work = nullptr;  // what it holds goes before anybody learns that it is done
    item.done->set();
  }
}

// -- Machine
// --------------------------------------------------------------------------------------------------------------

Machine::Machine()
    : devices_(static_cast<int>(std::min<uint64_t>(setting("FAKE_CUDA_DEVICES", 1), 64))),
      memory_(devices_, setting("FAKE_CUDA_MEMORY_MB", 4096) << 20),
      copy_rate_(setting("FAKE_CUDA_COPY_MB_PER_SEC", 0) << 20),
      kernel_us_(setting("FAKE_CUDA_KERNEL_US", 0)) {
  setContention(static_cast<unsigned>(setting("FAKE_CUDA_CONTENTION_PERCENT", 0)));
  setJitter(setting("FAKE_CUDA_JITTER_US", 0), setting("FAKE_CUDA_SEED", 1));
  if (const char* text = std::getenv("FAKE_CUDA_FAIL")) {
    std::string function(text);
    uint64_t after = 1;
    int code = kLaunchFailure;
    bool sticky = false;
    if (const size_t colon = function.find(':'); colon != std::string::npos) {
      char* rest = nullptr;
      after = std::strtoull(text + colon + 1, &rest, 10);
      code = *rest == ':' ? static_cast<int>(std::strtol(rest + 1, &rest, 10)) : code;
      sticky = std::strcmp(rest, ":sticky") == 0;
      function.resize(colon);
    }
    calls().fail(function, after, code, sticky);
  }
}

Machine& machine() {
  static Machine* const one = new Machine;
  return *one;
}

int Machine::current() {
  return t_device;
}
void Machine::setCurrent(int device) {
  t_device = device;
}
int Machine::use() {
  if (t_device < 0) {
    t_device = 0;
  }
  activate(t_device);
  return t_device;
}
void Machine::activate(int device) {
  const std::lock_guard lock(mutex_);
  contexts_ |= uint64_t{1} << device;
}
bool Machine::active(int device) const {
  return (contexts() >> device & 1) != 0;
}
uint64_t Machine::contexts() const {
  const std::lock_guard lock(mutex_);
  return contexts_;
}

Result Machine::createStream(unsigned flags, int priority, void** stream) {
  if (t_device < 0) {
    return kInvalidContext;
  }
  auto made = std::make_shared<Stream>(t_device, flags, priority, /*is_default=*/false);
  *stream = made.get();
  const std::lock_guard lock(mutex_);
  streams_[made.get()] = std::move(made);
  return kSuccess;
}

Result Machine::destroyStream(void* handle) {
  StreamPtr gone;
  {
    const std::lock_guard lock(mutex_);
    const auto found = streams_.find(handle);
    if (found == streams_.end()) {
      return kInvalidHandle;
    }
    gone = std::move(found->second);
    streams_.erase(found);
  }
  gone->close();
  return kSuccess;
}

Result Machine::createEvent(unsigned flags, void** event) {
  if (t_device < 0) {
    return kInvalidContext;
  }
  auto made = std::make_shared<Event>(t_device, flags);
  *event = made.get();
  const std::lock_guard lock(mutex_);
  events_[made.get()] = std::move(made);
  return kSuccess;
}

Result Machine::destroyEvent(void* event) {
  const std::lock_guard lock(mutex_);
  return events_.erase(event) == 1 ? kSuccess : kInvalidHandle;
}

StreamPtr Machine::defaultStream(int device) {
  StreamPtr& found = default_[device];
  if (found == nullptr) {
    found = std::make_shared<Stream>(device, 0, 0, /*is_default=*/true);
  }
  return found;
}

StreamPtr Machine::stream(void* handle) {
  const std::lock_guard lock(mutex_);
  if (reinterpret_cast<uintptr_t>(handle) <= 2) {  // default, legacy, per thread
    return t_device < 0 ? nullptr : defaultStream(t_device);
  }
  const auto found = streams_.find(handle);
  return found == streams_.end() ? nullptr : found->second;
}

std::shared_ptr<Event> Machine::event(void* handle) {
  const std::lock_guard lock(mutex_);
  const auto found = events_.find(handle);
  return found == events_.end() ? nullptr : found->second;
}

// What the default stream's rules make a piece of work wait for. Under the mutex.
std::vector<Done> Machine::legacyOrder(const Stream& stream) {
  std::vector<Done> after;
  const auto add = [&](const StreamPtr& other) {
    if (const Done newest = other->newest(); newest != nullptr && !newest->done()) {
      after.push_back(newest);
    }
  };
  if (stream.is_default) {
    for (const auto& [handle, other] : streams_) {
      if (other->device == stream.device && (other->flags & kFlagNonBlocking) == 0) {
        add(other);
      }
    }
  } else if ((stream.flags & kFlagNonBlocking) == 0) {
    if (const auto found = default_.find(stream.device); found != default_.end()) {
      add(found->second);
    }
  }
  return after;
}

Result Machine::enqueue(void* handle, Work work, Done* done, Kind kind, uint64_t bytes) {
  const StreamPtr to = stream(handle);
  if (to == nullptr) {
    return kInvalidHandle;
  }
  const std::lock_guard lock(mutex_);
  if (to->capture != nullptr) {
    if (to->capture->invalid) {
      return kCaptureInvalidated;
    }
    to->capture->graph.nodes.push_back(std::move(work));
    captured(*to);
    return kSuccess;
  }
  Done made = to->push(std::move(work), legacyOrder(*to), kind, bytes);
  if (done != nullptr) {
    *done = std::move(made);
  }
  return kSuccess;
}

Result Machine::enqueueKernel(void* handle, Work body) {
  const StreamPtr on = stream(handle);
  const int device = on == nullptr ? 0 : on->device;
  auto work = [this, device, us = kernel_us_.load(), body = std::move(body)] {
    const int64_t begin = nowNs();
    if (body) {
      body();
    }
    // What the host needs to compute the results is a part of the kernel's time, not on top of it.
    const auto spent = static_cast<uint64_t>((nowNs() - begin) / 1000);
    spend(device, us > spent ? us - spent : 0);
  };
  return enqueue(handle, std::move(work), nullptr, Kind::kKernel);
}

void Machine::spend(int device, uint64_t us) {
  constexpr int64_t kSliceNs = 200'000;
  thread_local int64_t late_ns =
      0;  // the sleep before ended so much too late; the next kernel makes up for it
  thread_local int64_t ended_ns = 0;
  int64_t last = nowNs();
  auto left = static_cast<double>(us) * 1e3 -
              (last - ended_ns < kSliceNs ? static_cast<double>(late_ns) : 0.0);
  while (left > 0) {
    const double speed = copies_[static_cast<size_t>(device)].load() > 0
                             ? 1 - contention_percent_.load() / 100.0
                             : 1.0;
    sleepUntil(last + std::min(kSliceNs, static_cast<int64_t>(left / speed)));
    const int64_t now = nowNs();
    left -= static_cast<double>(now - last) * speed;
    last = now;
  }
  late_ns = us == 0 ? 0 : std::min(kSliceNs, static_cast<int64_t>(-left));
  ended_ns = last;
}

Result Machine::copy(const Copy& copy, void* handle, bool blocking) {
  if (copy.bytes == 0 || copy.rows == 0) {
    return kSuccess;
  }
  const auto to = memory_.find(copy.to);
  const auto from = memory_.find(copy.from);
  if ((to && !memory_.contains(copy.to, copy.to_pitch * (copy.rows - 1) + copy.bytes)) ||
      (from && !memory_.contains(copy.from, copy.from_pitch * (copy.rows - 1) + copy.bytes))) {
    return kInvalidValue;
  }
  const StreamPtr on = stream(handle);
  if (on == nullptr) {
    return kInvalidHandle;
  }
  Copy at = copy;
  at.to = memory_.shadow(copy.to);
  at.from = memory_.shadow(copy.from);
  std::shared_ptr<std::vector<char>> staged;
  if (!from && to && !blocking) {  // pageable: the driver reads it before the call returns
    staged = std::make_shared<std::vector<char>>(copy.bytes * copy.rows);
    for (size_t row = 0; row < copy.rows; ++row) {
      std::memcpy(staged->data() + row * copy.bytes,
                  static_cast<const char*>(copy.from) + row * copy.from_pitch, copy.bytes);
    }
    at.from = staged->data();
    at.from_pitch = copy.bytes;
  }
  const uint64_t rate = copy_rate_.load();
  Done done;
  const Result result = enqueue(
      handle,
      [this, at, rate, staged, device = on->device] {
        std::atomic<int>& copies = copies_[static_cast<size_t>(device)];
        copies.fetch_add(1);
        for (size_t row = 0; row < at.rows; ++row) {
          moveBytes(static_cast<char*>(at.to) + row * at.to_pitch,
                    static_cast<const char*>(at.from) + row * at.from_pitch, at.bytes, rate);
        }
        copies.fetch_sub(1);
      },
      &done,
      from && from->kind == MemoryKind::kDevice && !(to && to->kind == MemoryKind::kDevice)
          ? Kind::kCopyToHost
          : Kind::kCopy,
      copy.bytes * copy.rows);
  if (result == kSuccess && done != nullptr && (blocking || !to)) {
    done->wait();
  }
  return result == kSuccess ? calls().stuck() : result;
}

Result Machine::fill(void* to, unsigned value, size_t width, size_t count, void* handle,
                     bool blocking) {
  if (count == 0) {
    return kSuccess;
  }
  if (!memory_.contains(to, width * count)) {
    return kInvalidValue;
  }
  Done done;
  const Result result = enqueue(
      handle,
      [at = memory_.shadow(to), value, width, count] {
        const DeviceAccess access;
        for (size_t i = 0; i < count; ++i) {
          std::memcpy(at + i * width, &value, width);
        }
      },
      &done);
  if (result == kSuccess && blocking && done != nullptr) {
    done->wait();
  }
  return result;
}

// -- events
// -----------------------------------------------------------------------------------------------------------------

Result Machine::record(void* event_handle, void* stream_handle) {
  const auto recorded = event(event_handle);
  const StreamPtr on = stream(stream_handle);
  if (recorded == nullptr || on == nullptr || recorded->device != on->device) {
    return kInvalidHandle;
  }
  std::shared_ptr<Capture> capture;
  uint64_t captured_at = 0;
  {
    const std::lock_guard lock(mutex_);
    capture = on->capture;
    if (capture != nullptr && capture->invalid) {
      return kCaptureInvalidated;
    }
    if (capture != nullptr && capture->unjoined.contains(on.get())) {
      captured_at = capture->unjoined[on.get()];
    }
  }
  Done done;
  if (capture == nullptr) {
    if (const Result result = enqueue(stream_handle, nullptr, &done); result != kSuccess) {
      return result;
    }
  }
  const std::lock_guard lock(recorded->mutex);
  recorded->recorded = std::move(done);
  recorded->capture = std::move(capture);
  recorded->captured_on = on.get();
  recorded->captured_at = captured_at;
  return kSuccess;
}

Result Machine::waitFor(void* stream_handle, void* event_handle) {
  const auto awaited = event(event_handle);
  const StreamPtr on = stream(stream_handle);
  if (awaited == nullptr || on == nullptr) {
    return kInvalidHandle;
  }
  Done done;
  std::shared_ptr<Capture> capture;
  const void* captured_on = nullptr;
  uint64_t captured_at = 0;
  {
    const std::lock_guard lock(awaited->mutex);
    done = awaited->recorded;
    capture = awaited->capture;
    captured_on = awaited->captured_on;
    captured_at = awaited->captured_at;
  }
  if (capture != nullptr) {  // the stream joins the capture
    const std::lock_guard lock(mutex_);
    if (capture->invalid) {
      return kCaptureInvalidated;
    }
    if (on->is_default) {
      capture->invalid = true;
      return kCaptureUnsupported;
    }
    on->capture = capture;
    if (const auto other = capture->unjoined.find(captured_on); other != capture->unjoined.end() &&
                                                                other->second == captured_at &&
                                                                captured_on != on.get()) {
      capture->unjoined.erase(other);
      captured(*on);  // work of the other that only this stream's end stands for now
    }
    return kSuccess;
  }
  {
    const std::lock_guard lock(mutex_);
    if (on->capture != nullptr) {
      if (done == nullptr) {
        return kSuccess;
      }
      on->capture->invalid = true;
      return kCaptureIsolation;
    }
  }
  return done == nullptr || done->done()
             ? kSuccess
             : enqueue(
                   stream_handle, [done] { done->wait(); }, nullptr, Kind::kWait);
}

Result Machine::query(void* handle) {
  const auto asked = event(handle);
  if (asked == nullptr) {
    return kInvalidHandle;
  }
  if (const Result result = unsafeCall(); result != kSuccess) {
    return result;
  }
  const std::lock_guard lock(asked->mutex);
  if (asked->capture != nullptr) {
    return kCapturedEvent;
  }
  return asked->recorded == nullptr || asked->recorded->done() ? kSuccess : kNotReady;
}

Result Machine::synchronizeEvent(void* handle) {
  const auto asked = event(handle);
  if (asked == nullptr) {
    return kInvalidHandle;
  }
  if (const Result result = unsafeCall(); result != kSuccess) {
    return result;
  }
  Done done;
  {
    const std::lock_guard lock(asked->mutex);
    if (asked->capture != nullptr) {
      return kCapturedEvent;
    }
    done = asked->recorded;
  }
  if (done != nullptr) {
    done->wait();
  }
  return calls().stuck();
}

Result Machine::elapsed(void* begin, void* end, float* ms) {
  const auto a = event(begin);
  const auto b = event(end);
  if (a == nullptr || b == nullptr || ((a->flags | b->flags) & kFlagDisableTiming) != 0) {
    return kInvalidHandle;
  }
  const auto newest = [](Event& of) {
    const std::lock_guard lock(of.mutex);
    return of.recorded;
  };
  const Done first = newest(*a);
  const Done second = newest(*b);
  if (first == nullptr || second == nullptr) {
    return kInvalidHandle;
  }
  if (!first->done() || !second->done()) {
    return kNotReady;
  }
  *ms = static_cast<float>(static_cast<double>(second->atNs() - first->atNs()) / 1e6);
  return kSuccess;
}

// -- waiting
// ----------------------------------------------------------------------------------------------------------------

Result Machine::queryStream(void* handle) {
  const StreamPtr asked = stream(handle);
  if (asked == nullptr) {
    return kInvalidHandle;
  }
  {
    const std::lock_guard lock(mutex_);
    if (asked->capture != nullptr) {
      asked->capture->invalid = true;
      return kCaptureUnsupported;
    }
  }
  const Done newest = asked->newest();
  return newest == nullptr || newest->done() ? calls().stuck() : kNotReady;
}

Result Machine::synchronizeStream(void* handle) {
  const StreamPtr asked = stream(handle);
  if (asked == nullptr) {
    return kInvalidHandle;
  }
  {
    const std::lock_guard lock(mutex_);
    if (asked->capture != nullptr) {
      asked->capture->invalid = true;
      return kCaptureUnsupported;
    }
  }
  if (const Done newest = asked->newest(); newest != nullptr) {
    newest->wait();
  }
  return calls().stuck();
}

Result Machine::synchronizeDevice(int device) {
  std::vector<Done> all;
  {
    const std::lock_guard lock(mutex_);
    if (const Result result = unsafeLocked(); result != kSuccess) {
      return result;
    }
    const auto add = [&](const StreamPtr& one) {
      if (const Done newest = one->newest(); one->device == device && newest != nullptr) {
        all.push_back(newest);
      }
    };
    for (const auto& [handle, one] : streams_) {
      add(one);
    }
    for (const auto& [owner, one] : default_) {
      add(one);
    }
  }
  for (const Done& done : all) {
    done->wait();
  }
  return calls().stuck();
}

// -- capture
// ----------------------------------------------------------------------------------------------------------------

Result Machine::beginCapture(void* handle, int mode) {
  const StreamPtr on = stream(handle);
  if (on == nullptr) {
    return kInvalidHandle;
  }
  const std::lock_guard lock(mutex_);
  if (on->is_default) {
    return kCaptureUnsupported;
  }
  if (on->capture != nullptr) {
    return kIllegalState;
  }
  on->capture = std::make_shared<Capture>();
  on->capture->id = next_id_++;
  on->capture->mode = static_cast<CaptureMode>(mode);
  on->capture->thread = std::this_thread::get_id();
  on->capture->origin = handle;
  on->capture->origin_stream = on.get();
  captures_.push_back(on->capture);
  return kSuccess;
}

Result Machine::endCapture(void* handle, Graph** graph) {
  *graph = nullptr;
  const StreamPtr on = stream(handle);
  if (on == nullptr) {
    return kInvalidHandle;
  }
  const std::lock_guard lock(mutex_);
  const auto capture = on->capture;
  if (capture == nullptr || capture->origin != handle) {
    return kIllegalState;
  }
  for (const auto& [other, one] : streams_) {
    if (one->capture == capture) {
      one->capture = nullptr;
    }
  }
  std::erase(captures_, capture);
  if (capture->invalid) {
    return kCaptureInvalidated;
  }
  if (!capture->unjoined.empty()) {
    return kCaptureUnjoined;
  }
  *graph = new Graph(std::move(capture->graph));
  return kSuccess;
}

// Under the mutex: an op of that stream is in its capture.
void Machine::captured(const Stream& on) {
  if (on.capture->origin_stream != &on) {
    ++on.capture->unjoined[&on];
  }
}

Result Machine::captureStatus(void* handle, int* status, uint64_t* id) {
  const StreamPtr asked = stream(handle);
  if (asked == nullptr) {
    return kInvalidHandle;
  }
  const std::lock_guard lock(mutex_);
  const auto& capture = asked->capture;
  *status = capture == nullptr ? kNotCapturing : capture->invalid ? kInvalidated : kCapturing;
  if (id != nullptr) {
    *id = capture == nullptr ? 0 : capture->id;
  }
  return kSuccess;
}

int Machine::exchangeMode(int mode) {
  return std::exchange(t_mode, static_cast<CaptureMode>(mode));
}

Result Machine::unsafeCall() {
  const std::lock_guard lock(mutex_);
  return unsafeLocked();
}

Result Machine::unsafeLocked() {
  if (t_mode == kModeRelaxed) {
    return kSuccess;
  }
  Result result = kSuccess;
  for (const auto& capture : captures_) {
    const bool own = capture->thread == std::this_thread::get_id();
    if (own ? capture->mode != kModeRelaxed
            : capture->mode == kModeGlobal && t_mode == kModeGlobal) {
      capture->invalid = true;
      result = kCaptureUnsupported;
    }
  }
  return result;
}

Result Machine::launchGraph(const Graph& graph, void* handle) {
  return enqueue(handle, [nodes = graph.nodes] {
    for (const Work& node : nodes) {
      if (node) {
        node();
      }
    }
  });
}

// -- pace
// -------------------------------------------------------------------------------------------------------------------

void Machine::setJitter(uint64_t max_us, uint64_t seed) {
  const std::lock_guard lock(pace_mutex_);
  jitter_us_ = max_us;
  random_.seed(seed);
}

void Machine::hold(bool on) {
  {
    const std::lock_guard lock(pace_mutex_);
    held_ = on;
  }
  unheld_.notify_all();
}

void Machine::pause() {
  uint64_t us = 0;
  {
    std::unique_lock lock(pace_mutex_);
    unheld_.wait(lock, [&] { return !held_; });
    us = jitter_us_ == 0 ? 0 : random_() % (jitter_us_ + 1);
  }
  if (us != 0) {
    std::this_thread::sleep_for(std::chrono::microseconds(us));
  }
}

}  // namespace reft::fake

#include "snapshot/device/device_xor.h"

#include <algorithm>
#include <array>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "intercept/base/hash.h"
#include "intercept/base/mutex.h"
#include "snapshot/vault/xor.h"

namespace reft {

namespace {

constexpr unsigned kThreads = 256;      // of a block
constexpr unsigned kMostBlocks = 1024;  // a thread goes on to the next place until all are done
constexpr size_t kLine = 16;            // bytes that one thread adds at a time, if all is aligned

// By table of functions and device: whether the kernel can be had, which is tried once, and what
// nobody uses now.
class Known {
 public:
  using Key = std::pair<const CudaApi*, int>;
  std::optional<std::string> why(const Key& key) EXCLUDES(mutex_) {
    const MutexLock lock(mutex_);
    const auto at = why_.find(key);
    return at == why_.end() ? std::nullopt : std::optional(at->second);
  }
  void note(const Key& key, const std::string& why) EXCLUDES(mutex_) {
    const MutexLock lock(mutex_);
    std::string& noted = why_[key];
    noted = noted.empty() ? why : noted;
  }
  std::unique_ptr<DeviceXor> take(const Key& key) EXCLUDES(mutex_) {
    const MutexLock lock(mutex_);
    auto& unused = unused_[key];
    if (unused.empty()) {
      return nullptr;
    }
    std::unique_ptr<DeviceXor> one = std::move(unused.back());
    unused.pop_back();
    return one;
  }
  void give(const Key& key, std::unique_ptr<DeviceXor> one) EXCLUDES(mutex_) {
    const MutexLock lock(mutex_);
    unused_[key].push_back(std::move(one));
  }

 private:
  Mutex mutex_;
  std::map<Key, std::string> why_ GUARDED_BY(mutex_);
  std::map<Key, std::vector<std::unique_ptr<DeviceXor>>> unused_ GUARDED_BY(mutex_);
};

Known& known() {
  static auto* const one = new Known;
  return *one;
}

}  // namespace

// reft_xor(into, with, bytes): into[i] ^= with[i]. Threads take lines, words or bytes, the largest
// that both addresses and the length are multiples of.
const char* const DeviceXor::kPtx = R"(
.version 6.0
.target sm_50
.address_size 64

.visible .entry reft_xor(.param .u64 p_into, .param .u64 p_with, .param .u64 p_bytes)
{
  .reg .pred %last, %odd;
  .reg .b16 %byte, %other;
  .reg .b32 %block, %size, %thread, %blocks, %a0, %a1, %a2, %a3, %b0, %b1, %b2, %b3;
  .reg .b64 %into, %with, %bytes, %at, %step, %to, %from, %mixed;

  ld.param.u64 %into, [p_into];
  ld.param.u64 %with, [p_with];
  ld.param.u64 %bytes, [p_bytes];
  cvta.to.global.u64 %into, %into;
  cvta.to.global.u64 %with, %with;
  mov.u32 %block, %ctaid.x;
  mov.u32 %size, %ntid.x;
  mov.u32 %thread, %tid.x;
  mov.u32 %blocks, %nctaid.x;
  mul.wide.u32 %at, %block, %size;
  cvt.u64.u32 %step, %thread;
  add.u64 %at, %at, %step;
  mul.wide.u32 %step, %blocks, %size;
  or.b64 %mixed, %into, %with;
  or.b64 %mixed, %mixed, %bytes;
  and.b64 %to, %mixed, 3;
  setp.ne.u64 %odd, %to, 0;
  @%odd bra BYTES;
  and.b64 %to, %mixed, 15;
  setp.ne.u64 %odd, %to, 0;
  @%odd bra WORDS_BEGIN;

  shl.b64 %at, %at, 4;
  shl.b64 %step, %step, 4;
LINES:
  setp.ge.u64 %last, %at, %bytes;
  @%last bra DONE;
  add.u64 %to, %into, %at;
  add.u64 %from, %with, %at;
  ld.global.v4.u32 {%a0, %a1, %a2, %a3}, [%to];
  ld.global.v4.u32 {%b0, %b1, %b2, %b3}, [%from];
  xor.b32 %a0, %a0, %b0;
  xor.b32 %a1, %a1, %b1;
  xor.b32 %a2, %a2, %b2;
  xor.b32 %a3, %a3, %b3;
  st.global.v4.u32 [%to], {%a0, %a1, %a2, %a3};
  add.u64 %at, %at, %step;
  bra LINES;

WORDS_BEGIN:
  shl.b64 %at, %at, 2;
  shl.b64 %step, %step, 2;
WORDS:
  setp.ge.u64 %last, %at, %bytes;
  @%last bra DONE;
  add.u64 %to, %into, %at;
  add.u64 %from, %with, %at;
  ld.global.u32 %a0, [%to];
  ld.global.u32 %b0, [%from];
  xor.b32 %a0, %a0, %b0;
  st.global.u32 [%to], %a0;
  add.u64 %at, %at, %step;
  bra WORDS;

BYTES:
  setp.ge.u64 %last, %at, %bytes;
  @%last bra DONE;
  add.u64 %to, %into, %at;
  add.u64 %from, %with, %at;
  ld.global.u8 %byte, [%to];
  ld.global.u8 %other, [%from];
  xor.b16 %byte, %byte, %other;
  st.global.u8 [%to], %byte;
  add.u64 %at, %at, %step;
  bra BYTES;

DONE:
  ret;
}
)";

std::string DeviceXor::hindrance(const CudaApi& api, std::span<const int> devices) {
  int device = -1;
  for (const int one : devices) {
    if (one >= 0 && device >= 0 && one != device) {
      return "this rank has state on CUDA devices " + std::to_string(std::min(device, one)) +
             " and " + std::to_string(std::max(device, one));
    }
    device = std::max(device, one);
  }
  if (device < 0) {
    return "";
  }
  if (!api.available()) {
    return api.why;
  }
  const Known::Key key{&api, device};
  if (const auto why = known().why(key)) {
    return *why;
  }
  cuda::Context context = nullptr;
  cuda::Context before = nullptr;
  int mode = cuda::kCaptureModeRelaxed;  // a capture of another thread goes on
  if (const cuda::Result result = api.devicePrimaryCtxRetain(&context, device);
      result != cuda::kSuccess) {
    known().note(key, "cuDevicePrimaryCtxRetain: " + api.describe(result));
  } else {
    api.ctxGetCurrent(&before);
    api.ctxSetCurrent(context);
    api.threadExchangeCaptureMode(&mode);
    giveBack(on(api, device));
    api.threadExchangeCaptureMode(&mode);
    api.ctxSetCurrent(before);
    api.devicePrimaryCtxRelease(device);
  }
  return known().why(key).value_or("");
}

std::unique_ptr<DeviceXor> DeviceXor::on(const CudaApi& api, int device) {
  const Known::Key key{&api, device};
  if (auto unused = known().take(key)) {
    return unused;
  }
  std::unique_ptr<DeviceXor> made(new DeviceXor(api, device));
  std::string why = made->load();
  if (why.empty()) {
    why = made->tryOut();
  }
  cuda::Context context = nullptr;
  if (why.empty() && api.devicePrimaryCtxRetain(&context, device) != cuda::kSuccess) {
    why = "its context cannot be kept";  // for good: what was made lies in it
  }
  if (!why.empty()) {
    made->unload();
    why = "CUDA device " + std::to_string(device) + ": " + why;
    made.reset();
  }
  known().note(key, why);
  return made;
}

void DeviceXor::giveBack(std::unique_ptr<DeviceXor> unused) {
  if (unused != nullptr) {
    const Known::Key key{&unused->api_, unused->device_};
    known().give(key, std::move(unused));
  }
}

std::string DeviceXor::load() {
  std::string why;
  const auto fine = [&](cuda::Result result, const char* call) {
    why = result == cuda::kSuccess ? "" : std::string(call) + ": " + api_.describe(result);
    return why.empty();
  };
  fine(api_.moduleLoadData(&module_, kPtx), "cuModuleLoadData") &&
      fine(api_.moduleGetFunction(&kernel_, module_, "reft_xor"), "cuModuleGetFunction") &&
      fine(api_.memAlloc(&sum_, 2 * kSumBytes), "cuMemAlloc");
  cell_ = sum_ + kSumBytes;
  return why;
}

void DeviceXor::unload() {
  if (sum_ != 0) {
    api_.memFree(sum_);
  }
  if (module_ != nullptr) {
    api_.moduleUnload(module_);
  }
}

// All three ways of the kernel: lines, words, bytes; and all that is asked of it later.
std::string DeviceXor::tryOut() {
  struct Part {
    size_t at, bytes;
  };
  static constexpr size_t kBytes = size_t{64} << 10;
  static constexpr std::array<Part, 4> kParts = {
      {{0, 16'384}, {16'388, 10'000}, {32'769, 1'001}, {40'000, 20'007}}};
  std::vector<std::byte> bytes(kBytes), sum(kBytes), found(kBytes);
  uint64_t random = kGoldenRatio;
  for (std::byte& byte : bytes) {
    random = splitmix64(random);
    byte = static_cast<std::byte>(random);
  }
  cuda::Stream stream = nullptr;
  cuda::Result result = api_.streamCreate(&stream, cuda::kStreamNonBlocking, 0);
  const bool has_stream = result == cuda::kSuccess;
  const auto also = [&](auto call) { result = result == cuda::kSuccess ? call() : result; };
  const cuda::Pointer source = cell_ + kBytes;  // where nothing is put
  also([&] { return clear(kBytes, stream); });
  also([&] { return api_.memcpyHtoDAsync(source, bytes.data(), kBytes, stream); });
  for (const size_t shift : {size_t{0}, size_t{7}}) {  // two cells
    for (const Part& part : kParts) {
      const size_t from = part.at + shift;
      also([&] { return put(part.at, source + from, part.bytes, stream); });
      also([&] { return add(part.at, part.bytes, stream); });
      xorInto(sum.data() + part.at, bytes.data() + from, part.bytes);
    }
  }
  also([&] { return take(found.data(), kBytes, stream); });
  if (has_stream) {  // also after a failure: what was enqueued uses these buffers
    const cuda::Result end = api_.streamSynchronize(stream);
    also([&] { return end; });
    api_.streamDestroy(stream);
  }
  if (result != cuda::kSuccess) {
    return "XOR of a few bytes: " + api_.describe(result);
  }
  return found == sum ? "" : "its XOR of a few bytes differs from the host's";
}

cuda::Result DeviceXor::clear(size_t bytes, cuda::Stream stream) {
  return api_.memsetD8Async(sum_, 0, bytes, stream);
}

cuda::Result DeviceXor::put(size_t at, cuda::Pointer from, size_t bytes, cuda::Stream stream) {
  return api_.memcpyDtoDAsync(cell_ + at, from, bytes, stream);
}

// Sum and cell have the same alignment at the same place: all but the ends are whole lines.
cuda::Result DeviceXor::add(size_t at, size_t bytes, cuda::Stream stream) {
  const size_t end = at + bytes;
  const size_t lines_begin = std::min(end, (at + kLine - 1) / kLine * kLine);
  const size_t lines_end = std::max(lines_begin, end / kLine * kLine);
  for (const auto& [from, to] :
       {std::pair(at, lines_begin), std::pair(lines_begin, lines_end), std::pair(lines_end, end)}) {
    if (from == to) {
      continue;
    }
    if (const cuda::Result result = launch(from, to - from, stream); result != cuda::kSuccess) {
      return result;
    }
  }
  return cuda::kSuccess;
}

cuda::Result DeviceXor::launch(size_t at, size_t bytes, cuda::Stream stream) {
  cuda::Pointer into = sum_ + at;
  cuda::Pointer with = cell_ + at;
  uint64_t length = bytes;
  const uint64_t mixed = into | with | length;
  const size_t unit = mixed % kLine == 0 ? kLine : mixed % 4 == 0 ? 4 : 1;
  const auto blocks = static_cast<unsigned>(
      std::min<size_t>(kMostBlocks, (bytes / unit + kThreads - 1) / kThreads));
  std::array<void*, 3> arguments = {&into, &with, &length};
  return api_.launchKernel(kernel_, blocks, 1, 1, kThreads, 1, 1, 0, stream, arguments.data(),
                           nullptr);
}

cuda::Result DeviceXor::take(std::byte* to, size_t bytes, cuda::Stream stream) {
  return api_.memcpyDtoHAsync(to, sum_, bytes, stream);
}

}  // namespace reft

// What a snapshot costs: copy with hash against plain memcpy, samples, capture, and a record of the
// op log.
//
//   snapshot_benchmark --benchmark_repetitions=5 --benchmark_report_aggregates_only=true
#include <benchmark/benchmark.h>
#include <sys/mman.h>

#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "intercept/record/op_log.h"
#include "snapshot/engine/engine.h"
#include "snapshot/vault/copy.h"
#include "snapshot/vault/hash.h"
#include "snapshot/vault/live_reader.h"

namespace reft {
namespace {

// Memory of the kind that a vault is made of, touched.
class Shared {
 public:
  explicit Shared(size_t bytes) : bytes_(bytes) {
    data_ = static_cast<std::byte*>(::mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                                           MAP_SHARED | MAP_ANONYMOUS | MAP_POPULATE, -1, 0));
    std::memset(data_, 1, bytes);
  }
  ~Shared() { ::munmap(data_, bytes_); }
  std::byte* data() const { return data_; }

 private:
  size_t bytes_;
  std::byte* data_;
};

constexpr size_t kBytes = size_t{256} << 20;
constexpr size_t kChunk = size_t{4} << 20;

void setRate(benchmark::State& state) {
  state.SetBytesProcessed(static_cast<int64_t>(state.iterations()) * static_cast<int64_t>(kBytes));
}

void memcpyWarm(benchmark::State& state) {
  const Shared from(kBytes);
  const Shared to(kBytes);
  for (auto _ : state) {
    std::memcpy(to.data(), from.data(), kBytes);
    benchmark::ClobberMemory();
  }
  setRate(state);
}
BENCHMARK(memcpyWarm)->Unit(benchmark::kMillisecond)->UseRealTime();

void memcpyByChunks(benchmark::State& state) {
  const Shared from(kBytes);
  const Shared to(kBytes);
  for (auto _ : state) {
    for (size_t at = 0; at < kBytes; at += kChunk) {
      std::memcpy(to.data() + at, from.data() + at, kChunk);
    }
    benchmark::ClobberMemory();
  }
  setRate(state);
}
BENCHMARK(memcpyByChunks)->Unit(benchmark::kMillisecond)->UseRealTime();

void chunkHasherCopy(benchmark::State& state) {
  const Shared from(kBytes);
  const Shared to(kBytes);
  ChunkHasher hasher;
  for (auto _ : state) {
    for (size_t at = 0; at < kBytes; at += kChunk) {
      hasher.reset();
      hasher.copy(to.data() + at, from.data() + at, kChunk);
      benchmark::DoNotOptimize(hasher.digest());
    }
  }
  setRate(state);
}
BENCHMARK(chunkHasherCopy)->Unit(benchmark::kMillisecond)->UseRealTime();

// As HostCopier does: a block is copied under guard, then hashed and stored from the cache.
void liveCopy(benchmark::State& state) {
  const Shared from(kBytes);
  const Shared to(kBytes);
  ChunkHasher hasher;
  LiveReader& reader = LiveReader::ofThread();
  for (auto _ : state) {
    for (size_t at = 0; at < kBytes; at += kChunk) {
      hasher.reset();
      for (size_t into = at; into < at + kChunk; into += LiveReader::kMostBytes) {
        const std::byte* const block = reader.read(from.data() + into, LiveReader::kMostBytes);
        if (block == nullptr) {
          state.SkipWithError("not readable");
          return;
        }
        hasher.copy(to.data() + into, block, LiveReader::kMostBytes,
                    {from.data() + into + LiveReader::kMostBytes, LiveReader::kMostBytes});
      }
      benchmark::DoNotOptimize(hasher.digest());
    }
  }
  setRate(state);
}
BENCHMARK(liveCopy)->Unit(benchmark::kMillisecond)->UseRealTime();

void hashOnly(benchmark::State& state) {
  const Shared from(kBytes);
  for (auto _ : state) {
    for (size_t at = 0; at < kBytes; at += kChunk) {
      benchmark::DoNotOptimize(hashBytes(from.data() + at, kChunk));
    }
  }
  setRate(state);
}
BENCHMARK(hashOnly)->Unit(benchmark::kMillisecond)->UseRealTime();

void hashInCache(benchmark::State& state) {
  const std::vector<char> data(64 << 10, 'x');
  for (auto _ : state) {
    benchmark::DoNotOptimize(hashBytes(data.data(), data.size()));
  }
  state.SetBytesProcessed(static_cast<int64_t>(state.iterations()) *
                          static_cast<int64_t>(data.size()));
}
BENCHMARK(hashInCache);

void sampleHashOfManyLines(benchmark::State& state) {
  const Shared data(kBytes);
  uint64_t seed = 0;
  for (auto _ : state) {
    benchmark::DoNotOptimize(
        sampleHash(data.data(), kBytes, static_cast<uint32_t>(state.range(0)), ++seed));
  }
}
BENCHMARK(sampleHashOfManyLines)->Arg(256)->Arg(8192)->Unit(benchmark::kMicrosecond);

// capture() alone, for 600 regions of 64 KB; the copy itself is waited for outside of the timing.
void captureOfRegions(benchmark::State& state) {
  const auto count = static_cast<size_t>(state.range(0));
  constexpr size_t kRegion = size_t{64} << 10;
  const auto vault = Vault::create({"bench", 0, 1}, 2, 64);
  SnapshotEngine* voter = nullptr;
  const auto engine = std::make_unique<SnapshotEngine>(
      EngineOptions{}, *vault, [&](const wire::Ballot& ballot) { voter->outcome(ballot); });
  voter = engine.get();
  const std::vector<char> data(count * kRegion, 'x');
  std::vector<RegionInfo> regions;
  std::vector<const void*> addresses;
  for (size_t i = 0; i < count; ++i) {
    regions.push_back({"module.layer." + std::to_string(i) + ".weight",
                       "float32",
                       {128, 128},
                       kRegion,
                       512,
                       -1,
                       false});
    addresses.push_back(data.data() + i * kRegion);
  }
  engine->setTable(buildTable(0, 1, regions, {}, "none", {}, size_t{1} << 20));
  const std::string objects(20'000, 'o');
  int64_t step = 0;
  for (auto _ : state) {
    if (engine->capture({++step, addresses, nullptr, objects}) != CaptureResult::kTaken) {
      state.SkipWithError("no snapshot was taken");
      break;
    }
    state.PauseTiming();
    engine->gate();
    state.ResumeTiming();
  }
}
BENCHMARK(captureOfRegions)->Arg(10)->Arg(600)->Unit(benchmark::kMicrosecond)->UseRealTime();

void opLogRecord(benchmark::State& state) {
  OpLog log(nullptr, 4096);
  const uint32_t group = log.addGroup("g", 0, 1);
  OpLog::Op op;
  op.kind = OpKind::kAllreduce;
  op.group = group;
  for (auto _ : state) {
    const uint64_t ticket = log.begin(op);
    log.markEnqueued(ticket);
    log.markWaitBegin(ticket);
    log.markWaitEnd(ticket);
    log.markDone(ticket);
  }
}
BENCHMARK(opLogRecord);

}  // namespace
}  // namespace reft

BENCHMARK_MAIN();

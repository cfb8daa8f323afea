// How fast a parity of several cells is made, against the memory's bandwidth and ISA-L.
//
// Rates count the bytes of the cells that are read. tests/bench/xor.py runs it and compares.
#include <benchmark/benchmark.h>
#include <sys/mman.h>
#if defined(REFT_HAVE_ISAL)
#include <isa-l/raid.h>
#endif

#include <algorithm>
#include <cstring>
#include <vector>

#include "snapshot/vault/copy.h"
#include "snapshot/vault/live_reader.h"
#include "snapshot/vault/xor.h"

namespace reft {
namespace {

constexpr size_t kCell = size_t{32} << 20;
constexpr size_t kBlock = size_t{64} << 10;  // as HostCopier

class Memory {
 public:
  explicit Memory(size_t arrays) {
    for (size_t i = 0; i < arrays; ++i) {
      void* const at = ::mmap(nullptr, kCell, PROT_READ | PROT_WRITE,
                              MAP_SHARED | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
      std::memset(at, static_cast<int>(i + 1), kCell);
      arrays_.push_back(static_cast<std::byte*>(at));
    }
  }
  ~Memory() {
    for (std::byte* const at : arrays_) {
      ::munmap(at, kCell);
    }
  }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  std::byte* operator[](size_t i) const { return arrays_[i]; }

 private:
  std::vector<std::byte*> arrays_;
};

void setRate(benchmark::State& state, size_t arrays) {
  state.SetBytesProcessed(static_cast<int64_t>(state.iterations()) *
                          static_cast<int64_t>(arrays * kCell));
}

// STREAM's triad: two reads and one write. Counts all three.
void triad(benchmark::State& state) {
  const Memory memory(3);
  auto* const a = reinterpret_cast<double*>(memory[0]);
  const auto* const b = reinterpret_cast<const double*>(memory[1]);
  const auto* const c = reinterpret_cast<const double*>(memory[2]);
  for (auto _ : state) {
    for (size_t i = 0; i < kCell / sizeof(double); ++i) {
      a[i] = b[i] + 3.0 * c[i];
    }
    benchmark::ClobberMemory();
  }
  setRate(state, 3);
}
BENCHMARK(triad)->Unit(benchmark::kMillisecond)->UseRealTime();

// What a plain copy takes, for as many bytes as the cells have.
void copyOfCells(benchmark::State& state) {
  const auto cells = static_cast<size_t>(state.range(0));
  const Memory memory(cells + 1);
  for (auto _ : state) {
    for (size_t i = 1; i <= cells; ++i) {
      std::memcpy(memory[0], memory[i], kCell);
    }
    benchmark::ClobberMemory();
  }
  setRate(state, cells);
}
BENCHMARK(copyOfCells)->Arg(3)->Arg(7)->Unit(benchmark::kMillisecond)->UseRealTime();

// XOR alone, block by block.
void xorAlone(benchmark::State& state) {
  const auto cells = static_cast<size_t>(state.range(0));
  const Memory memory(cells + 1);
  std::vector<std::byte> sum(kBlock);
  for (auto _ : state) {
    for (size_t at = 0; at < kCell; at += kBlock) {
      std::memcpy(sum.data(), memory[1] + at, kBlock);
      for (size_t i = 2; i <= cells; ++i) {
        const std::byte* const next = i < cells ? memory[i + 1] + at : memory[1] + at + kBlock;
        xorInto(sum.data(), memory[i] + at, kBlock, {next, kBlock});
      }
      std::memcpy(memory[0] + at, sum.data(), kBlock);
    }
    benchmark::ClobberMemory();
  }
  setRate(state, cells);
}
BENCHMARK(xorAlone)->Arg(3)->Arg(7)->Unit(benchmark::kMillisecond)->UseRealTime();

// All cells at once, as Decoding does.
void xorOfAll(benchmark::State& state) {
  const auto cells = static_cast<size_t>(state.range(0));
  const Memory memory(cells + 1);
  std::vector<const std::byte*> with;
  for (size_t i = 1; i <= cells; ++i) {
    with.push_back(memory[i]);
  }
  for (auto _ : state) {
    xorOf(memory[0], with, kCell);
    benchmark::ClobberMemory();
  }
  setRate(state, cells);
}
BENCHMARK(xorOfAll)->Arg(3)->Arg(7)->Unit(benchmark::kMillisecond)->UseRealTime();

// As HostCopier does: blocks are read under guard, added, hashed and stored past the cache.
void parityOfLiveMemory(benchmark::State& state) {
  const auto cells = static_cast<size_t>(state.range(0));
  const Memory memory(cells + 1);
  std::vector<std::byte> sum(kBlock);
  ChunkHasher hasher;
  LiveReader& reader = LiveReader::ofThread();
  for (auto _ : state) {
    hasher.reset();
    for (size_t at = 0; at < kCell; at += kBlock) {
      std::fill(sum.begin(), sum.end(), std::byte{});
      for (size_t i = 1; i <= cells; ++i) {
        const std::byte* const block = reader.read(memory[i] + at, kBlock);
        if (block == nullptr) {
          state.SkipWithError("not readable");
          return;
        }
        const std::byte* const next = i < cells ? memory[i + 1] + at : memory[1] + at + kBlock;
        xorInto(sum.data(), block, kBlock, {next, kBlock});
      }
      hasher.copy(memory[0] + at, sum.data(), kBlock);
    }
    benchmark::DoNotOptimize(hasher.digest());
  }
  setRate(state, cells);
}
BENCHMARK(parityOfLiveMemory)->Arg(3)->Arg(7)->Unit(benchmark::kMillisecond)->UseRealTime();

#if defined(REFT_HAVE_ISAL)
void isalXorGen(benchmark::State& state) {
  const auto cells = static_cast<size_t>(state.range(0));
  const Memory memory(cells + 1);
  std::vector<void*> arrays;
  for (size_t i = 1; i <= cells; ++i) {
    arrays.push_back(memory[i]);
  }
  arrays.push_back(memory[0]);
  for (auto _ : state) {
    if (xor_gen(static_cast<int>(arrays.size()), kCell, arrays.data()) != 0) {
      state.SkipWithError("xor_gen failed");
      return;
    }
    benchmark::ClobberMemory();
  }
  setRate(state, cells);
}
BENCHMARK(isalXorGen)->Arg(3)->Arg(7)->Unit(benchmark::kMillisecond)->UseRealTime();
#endif

}  // namespace
}  // namespace reft

BENCHMARK_MAIN();

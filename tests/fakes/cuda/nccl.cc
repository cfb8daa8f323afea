// libnccl.so.2 of the stand-in: ranks are processes of one machine, a communicator is one file in
// /dev/shm.
//
// Every operation is a list of transfers between pairs of ranks, through one mailbox per ordered
// pair, and a reduction of what came, always in the order of the ranks: results are equal on all of
// them and from run to run. Operations run on the caller's stream; those of one communicator in the
// order of their calls, whatever their streams. A peer that is gone makes the asynchronous error
// ncclRemoteError, and the operation goes on waiting until somebody aborts it, as on a cut wire.
//
// What is missing: reductions of 8-bit floats, symmetric memory and device communicators.
//
// Threads: any. Errors: ncclResult_t.
#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#define NCCL_HOST_ONLY 1
#include <nccl.h>

#include "tests/fakes/cuda/device.h"

#define API extern "C" __attribute__((visibility("default")))

using reft::fake::machine;

namespace {

constexpr int kMaxRanks = 64;
constexpr size_t kBoxBytes = size_t{64} << 10;
constexpr auto kPoll = std::chrono::microseconds(20);
constexpr int kPollsPerLook = 2500;  // for peers that are gone: every 50 ms or so

struct Mailbox {
  std::atomic<uint32_t> full;
  uint32_t bytes;
  char data[kBoxBytes];
};

struct Shared {
  std::atomic<int> attached;
  std::atomic<int> pid[kMaxRanks];
  Mailbox boxes[1];  // [from * ranks + to]
};

size_t widthOf(ncclDataType_t type) {
  switch (type) {
    case ncclInt8:
    case ncclUint8:
    case ncclFloat8e4m3:
    case ncclFloat8e5m2: return 1;
    case ncclFloat16:
    case ncclBfloat16: return 2;
    case ncclInt32:
    case ncclUint32:
    case ncclFloat32: return 4;
    default: return 8;
  }
}

// Also true of a zombie, which a signal still reaches.
bool isGone(int pid) {
  const int fd = static_cast<int>(::syscall(SYS_pidfd_open, pid, 0));
  if (fd < 0) {
    return errno == ESRCH;
  }
  pollfd asked{fd, POLLIN, 0};
  const bool gone = ::poll(&asked, 1, 0) > 0;
  ::close(fd);
  return gone;
}

thread_local std::string t_last_error;

}  // namespace

struct ncclComm {
  std::string name;
  int ranks = 0;
  int rank = 0;
  int device = 0;
  Shared* shared = nullptr;
  size_t bytes = 0;
  int children = 0;
  std::atomic<bool> aborted{false};
  std::atomic<int> error{ncclSuccess};
  std::atomic<uint64_t> issued{0}, finished{0};
  std::vector<double> factors;  // of ncclRedOpCreatePreMulSum

  Mailbox& box(int from, int to) const { return shared->boxes[from * ranks + to]; }
  bool allThere() const { return shared->attached.load() >= ranks; }
  // One turn of a wait. False: aborted.
  bool idle(int& turns) {
    if (aborted.load()) {
      return false;
    }
    if (++turns % kPollsPerLook == 0) {
      for (int r = 0; r < ranks; ++r) {
        const int pid = shared->pid[r].load();
        if (pid != 0 && isGone(pid)) {
          error.store(ncclRemoteError);
        }
      }
    }
    std::this_thread::sleep_for(kPoll);
    return true;
  }
};

namespace {

// -- numbers
// ------------------------------------------------------------------------------------------------------------------

float fromHalf(uint16_t bits) {
  _Float16 value;
  std::memcpy(&value, &bits, sizeof(value));
  return static_cast<float>(value);
}
uint16_t toHalf(float value) {
  const auto half = static_cast<_Float16>(value);
  uint16_t bits = 0;
  std::memcpy(&bits, &half, sizeof(bits));
  return bits;
}
float fromBfloat(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value = 0;
  std::memcpy(&value, &wide, sizeof(value));
  return value;
}
uint16_t toBfloat(float value) {
  uint32_t wide = 0;
  std::memcpy(&wide, &value, sizeof(wide));
  return std::isnan(value) ? 0x7FC0
                           : static_cast<uint16_t>((wide + 0x7FFF + ((wide >> 16) & 1)) >> 16);
}

struct Reduction {
  int op = ncclSum;
  double factor = 1;  // of each contribution
  int ranks = 1;
};

// out[i] = op over all parts, in `Wide`.
template <typename Stored, typename Wide, typename Load, typename Store>
void reduceAs(const Reduction& how, const std::vector<const char*>& parts, char* out, size_t count,
              Load load, Store store) {
  for (size_t i = 0; i < count; ++i) {
    Wide sum{};
    for (size_t part = 0; part < parts.size(); ++part) {
      Stored stored;
      std::memcpy(&stored, parts[part] + i * sizeof(Stored), sizeof(stored));
      Wide value = load(stored);
      if (how.factor != 1) {
        value = static_cast<Wide>(value * how.factor);
      }
      if (part == 0) {
        sum = value;
      } else {
        switch (how.op) {
          case ncclProd: sum = static_cast<Wide>(sum * value); break;
          case ncclMax: sum = std::max(sum, value); break;
          case ncclMin: sum = std::min(sum, value); break;
          default: sum = static_cast<Wide>(sum + value); break;
        }
      }
    }
    if (how.op == ncclAvg) {
      sum = static_cast<Wide>(sum / static_cast<Wide>(how.ranks));
    }
    const Stored stored = store(sum);
    std::memcpy(out + i * sizeof(Stored), &stored, sizeof(stored));
  }
}

template <typename T>
void reducePlain(const Reduction& how, const std::vector<const char*>& parts, char* out,
                 size_t count) {
  reduceAs<T, T>(
      how, parts, out, count, [](T value) { return value; }, [](T value) { return value; });
}

bool reduce(const Reduction& how, ncclDataType_t type, const std::vector<const char*>& parts,
            char* out, size_t count) {
  switch (type) {
    case ncclInt8: reducePlain<int8_t>(how, parts, out, count); return true;
    case ncclUint8: reducePlain<uint8_t>(how, parts, out, count); return true;
    case ncclInt32: reducePlain<int32_t>(how, parts, out, count); return true;
    case ncclUint32: reducePlain<uint32_t>(how, parts, out, count); return true;
    case ncclInt64: reducePlain<int64_t>(how, parts, out, count); return true;
    case ncclUint64: reducePlain<uint64_t>(how, parts, out, count); return true;
    case ncclFloat32: reducePlain<float>(how, parts, out, count); return true;
    case ncclFloat64: reducePlain<double>(how, parts, out, count); return true;
    case ncclFloat16:
      reduceAs<uint16_t, float>(how, parts, out, count, fromHalf, toHalf);
      return true;
    case ncclBfloat16:
      reduceAs<uint16_t, float>(how, parts, out, count, fromBfloat, toBfloat);
      return true;
    default: return false;
  }
}

// -- transfers
// ----------------------------------------------------------------------------------------------------------------

struct Transfer {
  ncclComm_t comm;
  bool send;
  int peer;
  char* at;
  size_t bytes;
  size_t done = 0;

  bool finished() const { return done == bytes; }
  // Moves a part if the mailbox lets it.
  bool advance() {
    Mailbox& box = send ? comm->box(comm->rank, peer) : comm->box(peer, comm->rank);
    if ((box.full.load(std::memory_order_acquire) != 0) == send) {
      return false;
    }
    if (send) {
      box.bytes = static_cast<uint32_t>(std::min(kBoxBytes, bytes - done));
      std::memcpy(box.data, at + done, box.bytes);
      done += box.bytes;
      box.full.store(1, std::memory_order_release);
    } else {
      const size_t part = std::min<size_t>(box.bytes, bytes - done);
      std::memcpy(at + done, box.data, part);
      done += part;
      box.full.store(0, std::memory_order_release);
    }
    return true;
  }
};

// All of them together, those of one direction and pair one after the other. False: aborted.
bool run(std::vector<Transfer>& transfers) {
  int turns = 0;
  while (true) {
    bool left = false;
    bool moved = false;
    for (size_t i = 0; i < transfers.size(); ++i) {
      Transfer& one = transfers[i];
      if (one.finished()) {
        continue;
      }
      left = true;
      const bool first = std::none_of(
          transfers.begin(), transfers.begin() + static_cast<std::ptrdiff_t>(i),
          [&](const Transfer& t) {
            return !t.finished() && t.comm == one.comm && t.send == one.send && t.peer == one.peer;
          });
      moved |= first && one.advance();
    }
    if (!left) {
      return true;
    }
    if (!moved && !transfers.front().comm->idle(turns)) {
      return false;
    }
  }
}

// -- operations
// -----------------------------------------------------------------------------------------------------------------

enum class Kind {
  kAllReduce,
  kReduce,
  kBroadcast,
  kAllGather,
  kReduceScatter,
  kAllToAll,
  kSend,
  kReceive
};

struct Operation {
  Kind kind;
  const char* from;
  char* to;
  size_t count;
  ncclDataType_t type;
  int op;
  int peer;  // root, or the other rank
  ncclComm_t comm;
  cudaStream_t stream;
};

// A collective: what is sent and received, then the reduction, if there is one.
void collective(const Operation& o) {
  ncclComm& comm = *o.comm;
  const size_t bytes = o.count * widthOf(o.type);
  const auto ranks = static_cast<size_t>(comm.ranks);
  const bool pieces =
      o.kind == Kind::kReduceScatter || o.kind == Kind::kAllToAll;  // a piece for each rank
  const bool rooted = o.kind == Kind::kReduce || o.kind == Kind::kBroadcast;
  const bool reduces =
      o.kind == Kind::kAllReduce || o.kind == Kind::kReduce || o.kind == Kind::kReduceScatter;
  const bool sends = o.kind != Kind::kBroadcast || comm.rank == o.peer;
  const bool receives = o.kind == Kind::kReduce ? comm.rank == o.peer
                                                : o.kind != Kind::kBroadcast || comm.rank != o.peer;
  const auto me = static_cast<size_t>(comm.rank);
  // Input and output may be one memory: what is sent is put aside.
  std::vector<char> own(o.from, o.from + (sends ? bytes * (pieces ? ranks : 1) : 0));
  std::vector<std::vector<char>> came(reduces ? ranks : 0);
  std::vector<Transfer> transfers;
  for (size_t peer = 0; peer < ranks; ++peer) {
    if (peer == me) {
      continue;
    }
    const int other = static_cast<int>(peer);
    if (sends && !(o.kind == Kind::kReduce && other != o.peer)) {
      transfers.push_back({&comm, true, other, own.data() + (pieces ? peer * bytes : 0), bytes});
    }
    if (receives && !(o.kind == Kind::kBroadcast && other != o.peer)) {
      if (reduces) {
        came[peer].resize(bytes);
      }
      char* const to = reduces ? came[peer].data() : rooted ? o.to : o.to + peer * bytes;
      transfers.push_back({&comm, false, other, to, bytes});
    }
  }
  if (!run(transfers)) {
    return;
  }
  const char* const mine = own.data() + (pieces ? me * bytes : 0);
  if (!reduces) {
    if (sends) {
      std::memcpy(rooted ? o.to : o.to + me * bytes, mine, bytes);
    }
  } else if (receives) {
    std::vector<const char*> parts;
    for (size_t peer = 0; peer < ranks; ++peer) {
      parts.push_back(peer == me ? mine : came[peer].data());
    }
    Reduction how{o.op, 1, comm.ranks};
    if (o.op >= ncclNumOps) {
      how = {ncclSum, comm.factors[static_cast<size_t>(o.op - ncclNumOps)], comm.ranks};
    }
    if (!reduce(how, o.type, parts, o.to, o.count)) {
      comm.error.store(ncclInvalidArgument);
    }
  }
}

struct Group {
  int depth = 0;
  std::vector<Operation> operations;
};
thread_local Group t_group;

void runOnStream(ncclComm& comm, uint64_t ticket, const std::vector<Operation>& operations) {
  while (comm.finished.load() != ticket && !comm.aborted.load()) {
    std::this_thread::sleep_for(kPoll);
  }
  std::vector<Transfer> pairs;
  for (const Operation& o : operations) {
    if (o.kind == Kind::kSend) {
      pairs.push_back({o.comm, true, o.peer, const_cast<char*>(o.from), o.count * widthOf(o.type)});
    } else if (o.kind == Kind::kReceive) {
      pairs.push_back({o.comm, false, o.peer, o.to, o.count * widthOf(o.type)});
    } else if (!comm.aborted.load()) {
      collective(o);
    }
  }
  if (!pairs.empty() && !comm.aborted.load()) {
    run(pairs);
  }
  comm.finished.fetch_add(1);
}

// One piece of work for each (communicator, stream) of the group.
ncclResult_t flush() {
  std::vector<Operation> all = std::exchange(t_group.operations, {});
  while (!all.empty()) {
    const ncclComm_t comm = all.front().comm;
    const cudaStream_t stream = all.front().stream;
    const auto mine = [&](const Operation& o) { return o.comm == comm && o.stream == stream; };
    std::vector<Operation> together;
    std::copy_if(all.begin(), all.end(), std::back_inserter(together), mine);
    std::erase_if(all, mine);
    const uint64_t ticket = comm->issued.fetch_add(1);
    if (machine().enqueue(
            stream, [comm, ticket, together] { runOnStream(*comm, ticket, together); }, nullptr,
            reft::fake::Kind::kNccl) != 0) {
      comm->finished.fetch_add(1);
      return ncclUnhandledCudaError;
    }
  }
  return ncclSuccess;
}

ncclResult_t add(Operation operation) {
  if (operation.comm == nullptr) {
    return ncclInvalidArgument;
  }
  if (const int error = operation.comm->error.load(); error != ncclSuccess) {
    t_last_error = "the communicator has failed";
    return static_cast<ncclResult_t>(error);
  }
  if (operation.from != nullptr) {
    operation.from = machine().memory().shadow(operation.from);
  }
  if (operation.to != nullptr) {
    operation.to = machine().memory().shadow(operation.to);
  }
  t_group.operations.push_back(operation);
  return t_group.depth > 0 ? ncclSuccess : flush();
}

// -- communicators
// --------------------------------------------------------------------------------------------------------------

ncclResult_t join(ncclComm_t* out, const std::string& name, int ranks, int rank, bool wait) {
  if (ranks > kMaxRanks || rank < 0 || rank >= ranks) {
    return ncclInvalidArgument;
  }
  auto comm = std::make_unique<ncclComm>();
  comm->name = name;
  comm->ranks = ranks;
  comm->rank = rank;
  comm->device = machine().use();
  comm->bytes = sizeof(Shared) + sizeof(Mailbox) * static_cast<size_t>(ranks * ranks);
  const int fd = ::shm_open(name.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (fd < 0 || ::ftruncate(fd, static_cast<off_t>(comm->bytes)) != 0) {
    return ncclSystemError;
  }
  void* address =
      ::mmap(nullptr, comm->bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
  ::close(fd);
  if (address == MAP_FAILED) {
    return ncclSystemError;
  }
  comm->shared = static_cast<Shared*>(address);
  comm->shared->pid[rank].store(::getpid());
  if (comm->shared->attached.fetch_add(1) + 1 == ranks) {
    ::shm_unlink(name.c_str());  // all are in: nothing is left behind, however they end
  }
  int turns = 0;
  while (wait && !comm->allThere()) {
    if (!comm->idle(turns) || comm->error.load() != ncclSuccess) {
      t_last_error = "a peer died while the communicator was made";
      return ncclRemoteError;
    }
  }
  *out = comm.release();
  return ncclSuccess;
}

void drain(const ncclComm& comm) {
  while (comm.finished.load() != comm.issued.load()) {
    std::this_thread::sleep_for(kPoll);
  }
}

ncclResult_t leave(ncclComm_t comm, bool abort) {
  if (comm == nullptr) {
    return ncclSuccess;
  }
  if (abort) {
    comm->aborted.store(true);
  }
  drain(*comm);
  comm->shared->pid[comm->rank].store(0);
  ::munmap(comm->shared, comm->bytes);
  delete comm;
  return ncclSuccess;
}

// Sends a few bytes to every other rank and gets theirs, now, on the calling thread.
template <typename T>
bool exchange(ncclComm& comm, T own, std::vector<T>& all) {
  drain(comm);
  all.assign(static_cast<size_t>(comm.ranks), own);
  std::vector<Transfer> transfers;
  for (int peer = 0; peer < comm.ranks; ++peer) {
    if (peer != comm.rank) {
      transfers.push_back({&comm, true, peer, reinterpret_cast<char*>(&own), sizeof(T)});
      transfers.push_back({&comm, false, peer,
                           reinterpret_cast<char*>(&all[static_cast<size_t>(peer)]), sizeof(T)});
    }
  }
  return transfers.empty() || run(transfers);
}

}  // namespace

API ncclResult_t ncclGetVersion(int* version) {
  *version = NCCL_VERSION_CODE;
  return ncclSuccess;
}
API ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  std::memset(id, 0, sizeof(*id));
  std::random_device random;
  std::snprintf(id->internal, sizeof(id->internal), "/fake-nccl-%08x%08x", random(), random());
  return ncclSuccess;
}
API ncclResult_t ncclCommInitRank(ncclComm_t* comm, int ranks, ncclUniqueId id, int rank) {
  return join(comm, id.internal, ranks, rank, /*wait=*/true);
}
API ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int ranks, ncclUniqueId id, int rank,
                                        ncclConfig_t* /*config*/) {
  return join(comm, id.internal, ranks, rank, /*wait=*/true);
}
API ncclResult_t ncclCommInitRankScalable(ncclComm_t* comm, int ranks, int rank, int /*ids*/,
                                          ncclUniqueId* id, ncclConfig_t* /*config*/) {
  return join(comm, id->internal, ranks, rank, /*wait=*/true);
}
API ncclResult_t ncclCommInitAll(ncclComm_t* comms, int ranks, const int* /*devices*/) {
  ncclUniqueId id;
  ncclGetUniqueId(&id);
  ncclResult_t result = ncclSuccess;
  for (int rank = 0; rank < ranks && result == ncclSuccess; ++rank) {
    result = join(comms + rank, id.internal, ranks, rank, /*wait=*/false);
  }
  return result;
}
API ncclResult_t ncclCommFinalize(ncclComm_t comm) {
  drain(*comm);
  return ncclSuccess;
}
API ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  return leave(comm, /*abort=*/false);
}
API ncclResult_t ncclCommAbort(ncclComm_t comm) {
  return leave(comm, /*abort=*/true);
}
API ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t* out,
                               ncclConfig_t* /*config*/) {
  struct Wish {
    int color, key, rank;
  };
  *out = nullptr;
  std::vector<Wish> all;
  if (!exchange(*comm, Wish{color, key, comm->rank}, all)) {
    return ncclRemoteError;
  }
  const int child = comm->children++;
  if (color < 0) {
    return ncclSuccess;
  }
  std::erase_if(all, [&](const Wish& wish) { return wish.color != color; });
  std::stable_sort(all.begin(), all.end(),
                   [](const Wish& a, const Wish& b) { return a.key < b.key; });
  const auto me = std::find_if(all.begin(), all.end(),
                               [&](const Wish& wish) { return wish.rank == comm->rank; });
  return join(out, comm->name + "-" + std::to_string(child) + "-" + std::to_string(color),
              static_cast<int>(all.size()), static_cast<int>(me - all.begin()), /*wait=*/true);
}
API ncclResult_t ncclCommShrink(ncclComm_t comm, int* excluded, int count, ncclComm_t* out,
                                ncclConfig_t* /*config*/, int flags) {
  if ((flags & NCCL_SHRINK_ABORT) != 0) {
    comm->aborted.store(true);
  }
  drain(*comm);
  int rank = comm->rank;
  for (int i = 0; i < count; ++i) {
    rank -= excluded[i] < comm->rank ? 1 : 0;
  }
  return join(out, comm->name + "-shrunk-" + std::to_string(comm->children++), comm->ranks - count,
              rank,
              /*wait=*/true);
}
API ncclResult_t ncclCommCount(const ncclComm_t comm, int* ranks) {
  *ranks = comm->ranks;
  return ncclSuccess;
}
API ncclResult_t ncclCommUserRank(const ncclComm_t comm, int* rank) {
  *rank = comm->rank;
  return ncclSuccess;
}
API ncclResult_t ncclCommCuDevice(const ncclComm_t comm, int* device) {
  *device = comm->device;
  return ncclSuccess;
}
API ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* error) {
  *error = static_cast<ncclResult_t>(comm->error.load());
  return ncclSuccess;
}
API const char* ncclGetErrorString(ncclResult_t result) {
  switch (result) {
    case ncclSuccess: return "no error";
    case ncclUnhandledCudaError: return "unhandled cuda error";
    case ncclSystemError: return "unhandled system error";
    case ncclInvalidArgument: return "invalid argument";
    case ncclInvalidUsage: return "invalid usage";
    case ncclRemoteError: return "remote process exited or there was a network error";
    default: return "internal error";
  }
}
API const char* ncclGetLastError(ncclComm_t /*comm*/) {
  return t_last_error.c_str();
}
API ncclResult_t ncclGroupStart() {
  ++t_group.depth;
  return ncclSuccess;
}
API ncclResult_t ncclGroupEnd() {
  return --t_group.depth > 0 ? ncclSuccess : flush();
}
API ncclResult_t ncclGroupSimulateEnd(ncclSimInfo_t* /*info*/) {
  --t_group.depth;
  t_group.operations.clear();
  return ncclSuccess;
}
API ncclResult_t ncclMemAlloc(void** address, size_t bytes) {
  return machine().memory().allocate(machine().use(), bytes, address) == 0 ? ncclSuccess
                                                                           : ncclUnhandledCudaError;
}
API ncclResult_t ncclMemFree(void* address) {
  return machine().memory().free(address) == 0 ? ncclSuccess : ncclUnhandledCudaError;
}
API ncclResult_t ncclCommRegister(const ncclComm_t /*comm*/, void* address, size_t /*bytes*/,
                                  void** handle) {
  *handle = address;
  return ncclSuccess;
}
API ncclResult_t ncclCommDeregister(const ncclComm_t /*comm*/, void* /*handle*/) {
  return ncclSuccess;
}
API ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t* op, void* scalar, ncclDataType_t type,
                                          ncclScalarResidence_t /*where*/, ncclComm_t comm) {
  const char* const at = machine().memory().shadow(scalar);
  double factor = 1;
  if (type == ncclFloat64) {
    std::memcpy(&factor, at, sizeof(factor));
  } else if (type == ncclFloat32) {
    float value = 1;
    std::memcpy(&value, at, sizeof(value));
    factor = value;
  } else if (type == ncclFloat16 || type == ncclBfloat16) {
    uint16_t bits = 0;
    std::memcpy(&bits, at, sizeof(bits));
    factor = type == ncclFloat16 ? fromHalf(bits) : fromBfloat(bits);
  } else {
    return ncclInvalidArgument;
  }
  comm->factors.push_back(factor);
  *op = static_cast<ncclRedOp_t>(ncclNumOps + comm->factors.size() - 1);
  return ncclSuccess;
}
API ncclResult_t ncclRedOpDestroy(ncclRedOp_t /*op*/, ncclComm_t /*comm*/) {
  return ncclSuccess;
}

#define IN(address) static_cast<const char*>(address)
#define OUT(address) static_cast<char*>(address)
API ncclResult_t ncclAllReduce(const void* from, void* to, size_t count, ncclDataType_t type,
                               ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
  return add({Kind::kAllReduce, IN(from), OUT(to), count, type, op, 0, comm, stream});
}
API ncclResult_t ncclReduce(const void* from, void* to, size_t count, ncclDataType_t type,
                            ncclRedOp_t op, int root, ncclComm_t comm, cudaStream_t stream) {
  return add({Kind::kReduce, IN(from), OUT(to), count, type, op, root, comm, stream});
}
API ncclResult_t ncclBroadcast(const void* from, void* to, size_t count, ncclDataType_t type,
                               int root, ncclComm_t comm, cudaStream_t stream) {
  return add({Kind::kBroadcast, IN(from), OUT(to), count, type, 0, root, comm, stream});
}
API ncclResult_t ncclBcast(void* both, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                           cudaStream_t stream) {
  return add({Kind::kBroadcast, IN(both), OUT(both), count, type, 0, root, comm, stream});
}
API ncclResult_t ncclAllGather(const void* from, void* to, size_t count, ncclDataType_t type,
                               ncclComm_t comm, cudaStream_t stream) {
  return add({Kind::kAllGather, IN(from), OUT(to), count, type, 0, 0, comm, stream});
}
API ncclResult_t ncclReduceScatter(const void* from, void* to, size_t count, ncclDataType_t type,
                                   ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
  return add({Kind::kReduceScatter, IN(from), OUT(to), count, type, op, 0, comm, stream});
}
API ncclResult_t ncclAlltoAll(const void* from, void* to, size_t count, ncclDataType_t type,
                              ncclComm_t comm, cudaStream_t stream) {
  return add({Kind::kAllToAll, IN(from), OUT(to), count, type, 0, 0, comm, stream});
}
API ncclResult_t ncclSend(const void* from, size_t count, ncclDataType_t type, int peer,
                          ncclComm_t comm, cudaStream_t stream) {
  return add({Kind::kSend, IN(from), nullptr, count, type, 0, peer, comm, stream});
}
API ncclResult_t ncclRecv(void* to, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                          cudaStream_t stream) {
  return add({Kind::kReceive, nullptr, OUT(to), count, type, 0, peer, comm, stream});
}

// Symmetric memory and device communicators are refused.
API ncclResult_t ncclCommWindowRegister(ncclComm_t /*comm*/, void* /*address*/, size_t /*bytes*/,
                                        ncclWindow_t* window, int /*flags*/) {
  *window = nullptr;
  return ncclInvalidUsage;
}
API ncclResult_t ncclCommWindowDeregister(ncclComm_t /*comm*/, ncclWindow_t /*window*/) {
  return ncclSuccess;
}
API ncclResult_t ncclDevCommCreate() {
  return ncclInvalidUsage;
}
API ncclResult_t ncclDevCommDestroy() {
  return ncclInvalidUsage;
}

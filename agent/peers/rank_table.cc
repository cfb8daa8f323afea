#include "agent/peers/rank_table.h"

#include <dirent.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/stat.h>
#include <sys/syscall.h>

#include <algorithm>
#include <charconv>
#include <csignal>

#include "hang_detect/evidence/oom_kills.h"
#include "intercept/base/error.h"
#include "intercept/base/log.h"
#include "intercept/base/proc_stat.h"

namespace reft::agent {

namespace {

bool sameFile(int fd, const std::string& path) {
  struct stat open_file {};
  struct stat there {};
  return ::fstat(fd, &open_file) == 0 && ::lstat(path.c_str(), &there) == 0 &&
         S_ISREG(there.st_mode) && open_file.st_ino == there.st_ino &&
         open_file.st_dev == there.st_dev;
}

// 0: not visible from here.
int parentOf(int pid) {
  const auto stat = procStat(pid);
  return stat ? stat->parent : 0;
}

bool processEnded(const UniqueFd& pidfd) {
  pollfd poller{pidfd.get(), POLLIN, 0};
  return ::poll(&poller, 1, 0) > 0;
}

}  // namespace

int64_t RankState::oomKillsSince() const {
  const int64_t now = oomKills(oom_counter);
  return now >= 0 && oom_kills_before >= 0 ? now - oom_kills_before : -1;
}

const VaultReader* RankState::readable() {
  if (!vault) {
    return nullptr;
  }
  try {
    vault->refresh();
    return vault.get();
  } catch (const Error& error) {
    logWarn("agent", "rank ", hello.rank, " vault is not readable any more: ", error.what());
    vault.reset();
    vault_fd.reset();
    return nullptr;
  }
}

RankTable::RankTable(std::string job, std::string vault_dir)
    : job_(std::move(job)), vault_dir_(std::move(vault_dir)) {}

std::string RankTable::pathOf(int rank) const {
  return vault_dir_ + "/" + job_ + "/rank-" + std::to_string(rank) + ".vault";
}

void RankTable::adoptVaultFiles() {
  if (vault_dir_.empty()) {
    return;
  }
  const auto directory = vault_dir_ + "/" + job_;
  const std::unique_ptr<DIR, int (*)(DIR*)> entries(::opendir(directory.c_str()), ::closedir);
  while (entries) {
    const auto* entry = ::readdir(entries.get());
    if (entry == nullptr) {
      break;
    }
    const std::string name = entry->d_name;
    constexpr std::string_view kPrefix = "rank-";
    constexpr std::string_view kSuffix = ".vault";
    int rank = -1;
    const auto* digits_end = name.data() + name.size() - std::min(name.size(), kSuffix.size());
    if (name.size() <= kPrefix.size() + kSuffix.size() || name.rfind(kPrefix, 0) != 0 ||
        std::string_view(digits_end) != kSuffix ||
        std::from_chars(name.data() + kPrefix.size(), digits_end, rank).ptr != digits_end ||
        rank < 0 || rank > kMaxRank) {
      continue;
    }
    std::string path = directory;
    path.append("/").append(name);
    try {
      UniqueFd fd(::open(path.c_str(), O_RDWR | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
      if (!fd) {
        throw SystemError("open");
      }
      struct stat info {};
      if (::fstat(fd.get(), &info) != 0 || !S_ISREG(info.st_mode) || info.st_uid != ::geteuid()) {
        throw Corruption("not a regular file of this user");
      }
      auto reader = std::make_unique<VaultReader>(fd.get());
      if (reader->identity().job != job_ || reader->identity().rank != rank) {
        throw Corruption("belongs to rank " + std::to_string(reader->identity().rank) + " of job " +
                         reader->identity().job);
      }
      auto& state = ranks_[rank];
      state.hello.rank = rank;
      state.hello.world = reader->identity().world;
      state.vault_fd = std::move(fd);
      state.vault = std::move(reader);
      state.vault_path = path;
    } catch (const Error& error) {
      logWarn("agent", "vault file ", path, " is left alone: ", error.what());
    }
  }
}

bool RankTable::ended(const RankState& rank) {
  if (rank.pidfd) {
    return processEnded(rank.pidfd);
  }
  return rank.pid <= 0 || (::kill(rank.pid, 0) != 0 && errno == ESRCH);
}

RankState& RankTable::join(const Hello& hello, int pid, uint64_t connection) {
  auto& state = ranks_[hello.rank];
  if (state.live() && state.pid != pid && state.hello.incarnation != hello.incarnation &&
      !ended(state)) {
    throw InvalidArgument("job id '" + job_ + "'",
                          "already used by a live job (pid " + std::to_string(state.pid) +
                              " is its rank " + std::to_string(hello.rank) + ")",
                          "another name: set REFT_JOB_ID");
  }
  incarnation_ = hello.incarnation;
  local_world_ = hello.local_world;
  state.hello = hello;
  state.connection = connection;
  state.said_bye = false;
  if (state.pid != pid || !state.pidfd) {
    state.pid = pid;
    state.pidfd.reset(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
    const int parent = parentOf(pid);
    state.oom_counter = oomCounterOf(pid);
    state.oom_kills_before = oomKills(state.oom_counter);
    state.launcher.reset(parent > 0 ? static_cast<int>(::syscall(SYS_pidfd_open, parent, 0)) : -1);
  }
  state.alive = !ended(state);
  return state;
}

void RankTable::putVault(RankState& rank, const VaultPut& put, UniqueFd fd) {
  if (put.rank != rank.hello.rank) {
    throw InvalidArgument("rank", std::to_string(put.rank),
                          std::to_string(rank.hello.rank) + ", as in hello");
  }
  if (!fd) {
    throw InvalidArgument("vault", "without a descriptor", "a memfd or file");
  }
  auto reader = std::make_unique<VaultReader>(fd.get());
  if (reader->identity().rank != put.rank || reader->identity().job != job_) {
    throw Corruption("vault: belongs to rank " + std::to_string(reader->identity().rank) +
                     " of another job or rank");
  }
  rank.vault_path.clear();
  if (!vault_dir_.empty() && sameFile(fd.get(), pathOf(put.rank))) {
    rank.vault_path = pathOf(put.rank);
  }
  rank.vault_fd = std::move(fd);
  rank.vault = std::move(reader);
}

RankState* RankTable::find(int rank) {
  const auto found = ranks_.find(rank);
  return found == ranks_.end() ? nullptr : &found->second;
}

RankState* RankTable::ofConnection(uint64_t connection) {
  for (auto& [number, state] : ranks_) {
    if (connection != 0 && state.connection == connection) {
      return &state;
    }
  }
  return nullptr;
}

bool RankTable::anyLive() const {
  return std::any_of(ranks_.begin(), ranks_.end(),
                     [](const auto& entry) { return entry.second.live(); });
}

bool RankTable::allSaidBye() const {
  const auto gone = std::count_if(ranks_.begin(), ranks_.end(), [this](const auto& entry) {
    return entry.second.pid > 0 && entry.second.said_bye &&
           entry.second.hello.incarnation == incarnation_;
  });
  return local_world_ > 0 && gone >= local_world_ && !anyLive();
}

bool RankTable::mayComeBack() const {
  return std::any_of(ranks_.begin(), ranks_.end(), [this](const auto& entry) {
    const RankState& rank = entry.second;
    return rank.hello.incarnation == incarnation_ && rank.hello.restarts_left > 0 &&
           rank.launcher && !processEnded(rank.launcher);
  });
}

int RankTable::world() const {
  const auto newest = std::find_if(ranks_.begin(), ranks_.end(), [this](const auto& entry) {
    return entry.second.pid > 0 && entry.second.hello.incarnation == incarnation_;
  });
  return newest == ranks_.end() ? 0 : newest->second.hello.world;
}

int RankTable::nodes() const {
  for (const auto& [number, rank] : ranks_) {
    if (rank.pid > 0 && rank.hello.incarnation == incarnation_) {
      return (rank.hello.world + rank.hello.local_world - 1) / rank.hello.local_world;
    }
  }
  return 1;
}

std::vector<std::pair<CommitKey, CommitLedger::Held>> RankTable::sealed(RankState& rank) {
  std::vector<std::pair<CommitKey, CommitLedger::Held>> keys;
  if (const auto* vault = rank.readable()) {
    for (const RawSlot& slot : vault->rawSlots()) {
      if (slot.state == SlotState::kSealed) {
        keys.push_back({{slot.step, slot.incarnation}, {true, slot.cut, slot.proposal}});
      }
    }
  }
  return keys;
}

void RankTable::deleteVaultFiles() {
  for (auto& [number, state] : ranks_) {
    if (state.vault_path.empty() || !state.vault_fd ||
        !sameFile(state.vault_fd.get(), state.vault_path)) {
      continue;
    }
    if (::unlink(state.vault_path.c_str()) == 0) {
      logWarn("agent", "rank ", number, " ended cleanly: deleted ", state.vault_path);
    } else {
      logWarn("agent", "rank ", number, " cannot delete ", state.vault_path, ": ",
              std::strerror(errno));
    }
    state.vault_path.clear();
  }
  if (!vault_dir_.empty()) {
    ::rmdir((vault_dir_ + "/" + job_).c_str());  // stays if anything else is in it
  }
}

}  // namespace reft::agent

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

constexpr std::string_view kOfWorld = "-of-";

std::optional<int> numberOf(std::string_view digits) {
  int number = -1;
  const auto* end = digits.data() + digits.size();
  const auto parsed = std::from_chars(digits.data(), end, number);
  const bool valid = !digits.empty() && parsed.ec == std::errc() && parsed.ptr == end;
  return valid && number >= 0 && number <= kMaxRank ? std::optional(number) : std::nullopt;
}

bool sameFile(int fd, int other) {
  struct stat one {};
  struct stat two {};
  return ::fstat(fd, &one) == 0 && ::fstat(other, &two) == 0 && one.st_ino == two.st_ino &&
         one.st_dev == two.st_dev;
}

// Deletes the file of a vault that is no longer needed, if it still is that vault.
void deleteFile(int rank, HeldVault& vault) {
  if (vault.path.empty() || !vault.fd || !sameFile(vault.fd.get(), vault.path)) {
    return;
  }
  if (::unlink(vault.path.c_str()) == 0) {
    logWarn("agent", "rank ", rank, " deleted ", vault.path);
  } else {
    logWarn("agent", "rank ", rank, " cannot delete ", vault.path, ": ", std::strerror(errno));
  }
  vault.path.clear();
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

const VaultReader* HeldVault::readable(int rank) {
  if (!reader) {
    return nullptr;
  }
  try {
    reader->refresh();
    return reader.get();
  } catch (const Error& error) {
    logWarn("agent", "rank ", rank, " vault is not readable any more: ", error.what());
    reader.reset();
    fd.reset();
    return nullptr;
  }
}

HeldVault& RankState::vaultFor(int world) {
  const auto aside = set_aside.find(world);
  const bool fits = vault && vault.reader->identity().world == world;
  return world == 0 || fits || aside == set_aside.end() ? vault : aside->second;
}

RankTable::RankTable(std::string job, std::string vault_dir)
    : job_(std::move(job)), vault_dir_(std::move(vault_dir)) {}

std::string RankTable::pathOf(int rank, int set_aside_world) const {
  const std::string of =
      set_aside_world == 0 ? "" : std::string(kOfWorld) + std::to_string(set_aside_world);
  return vault_dir_ + "/" + job_ + "/rank-" + std::to_string(rank) + of + ".vault";
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
    adoptVaultFile(entry->d_name);
  }
}

// "rank-<rank>.vault", or "rank-<rank>-of-<world>.vault" for one that is set aside.
void RankTable::adoptVaultFile(const std::string& name) {
  constexpr std::string_view kPrefix = "rank-";
  constexpr std::string_view kSuffix = ".vault";
  std::string_view middle = name;
  if (!middle.starts_with(kPrefix) || !middle.ends_with(kSuffix) ||
      middle.size() <= kPrefix.size() + kSuffix.size()) {
    return;
  }
  middle = middle.substr(kPrefix.size(), middle.size() - kPrefix.size() - kSuffix.size());
  const auto of = middle.find(kOfWorld);
  const bool aside = of != std::string_view::npos;
  const auto rank = numberOf(middle.substr(0, of));
  const auto world = aside ? numberOf(middle.substr(of + kOfWorld.size())) : std::optional(1);
  if (!rank || !world || *world < 1) {
    return;
  }
  const std::string path = vault_dir_ + "/" + job_ + "/" + name;
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
    const VaultIdentity& identity = reader->identity();
    if (identity.job != job_ || identity.rank != *rank || (aside && identity.world != *world)) {
      throw Corruption("belongs to rank " + std::to_string(identity.rank) + " of " +
                       std::to_string(identity.world) + " of job " + identity.job);
    }
    auto& state = ranks_[*rank];
    state.hello.rank = *rank;
    if (!aside || state.hello.world == 0) {
      state.hello.world = identity.world;
    }
    HeldVault& place = aside ? state.set_aside[*world] : state.vault;
    place = {std::move(fd), std::move(reader), path};
  } catch (const Error& error) {
    logWarn("agent", "vault file ", path, " is left alone: ", error.what());
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
  const int world = reader->identity().world;
  const HeldVault& before = rank.vaultFor(world);
  rank.resumed = before && sameFile(before.fd.get(), fd.get());
  if (rank.vault && rank.vault.reader->identity().world != world) {
    const int other = rank.vault.reader->identity().world;
    if (!rank.vault.path.empty()) {
      rank.vault.path = pathOf(put.rank, other);  // where the rank has moved it
    }
    logInfo("agent", "rank ", put.rank, " vault of ", other, " ranks is set aside");
    rank.set_aside.insert_or_assign(other, std::move(rank.vault));
  }
  rank.set_aside.erase(world);
  std::string path = vault_dir_.empty() ? "" : pathOf(put.rank);
  if (path.empty() || !sameFile(fd.get(), path)) {
    path.clear();
  }
  rank.vault = {std::move(fd), std::move(reader), std::move(path)};
}

void RankTable::dropSetAside() {
  for (auto& [number, rank] : ranks_) {
    if (rank.set_aside.empty() || !rank.resumed || rank.hello.incarnation != incarnation_) {
      continue;
    }
    for (auto aside = rank.set_aside.begin();
         aside != rank.set_aside.end() && aside->first < rank.hello.world;
         aside = rank.set_aside.erase(aside)) {
      logInfo("agent", "rank ", number, " vault of ", aside->first, " ranks is no longer needed");
      deleteFile(number, aside->second);
    }
  }
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
      return rank.hello.nodes;
    }
  }
  return 1;
}

std::vector<std::pair<CommitKey, CommitLedger::Held>> RankTable::sealed(RankState& rank) {
  std::vector<std::pair<CommitKey, CommitLedger::Held>> keys;
  if (const auto* vault = rank.readable()) {
    for (const RawSlot& slot : vault->rawSlots()) {
      if (slot.state == SlotState::kSealed) {
        keys.push_back({{slot.step, slot.incarnation},
                        {true, slot.cut, slot.proposal, slot.replicas, slot.plan_anew}});
      }
    }
  }
  return keys;
}

void RankTable::deleteVaultFiles() {
  for (auto& [number, state] : ranks_) {
    deleteFile(number, state.vault);
    for (auto& [world, aside] : state.set_aside) {
      deleteFile(number, aside);
    }
  }
  if (!vault_dir_.empty()) {
    ::rmdir((vault_dir_ + "/" + job_).c_str());  // stays if anything else is in it
  }
}

}  // namespace reft::agent

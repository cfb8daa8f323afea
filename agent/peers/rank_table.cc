#include "agent/peers/rank_table.h"

#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <set>
#include <utility>

#include "hang_detect/evidence/oom_kills.h"
#include "intercept/base/error.h"
#include "intercept/base/log.h"
#include "intercept/base/proc_stat.h"
#include "intercept/base/safe_files.h"

namespace reft::agent {

namespace {

// 0: not visible from here.
int parentOf(int pid) {
  const auto stat = procStat(pid);
  return stat ? stat->parent : 0;
}

bool sameFile(int fd, int other) {
  struct stat one {};
  struct stat two {};
  return ::fstat(fd, &one) == 0 && ::fstat(other, &two) == 0 && one.st_ino == two.st_ino &&
         one.st_dev == two.st_dev;
}

// Deletes the file of a vault that is no longer needed, if it still is that vault.
void deleteFile(int rank, HeldVault& vault) {
  if (vault.path.empty() || !vault.fd || !isAt(vault.fd.get(), vault.path)) {
    return;
  }
  if (::unlink(vault.path.c_str()) == 0) {
    logWarn("agent", "rank ", rank, " deleted ", vault.path);
  } else {
    logWarn("agent", "rank ", rank, " cannot delete ", vault.path, ": ", std::strerror(errno));
  }
  vault.path.clear();
}

}  // namespace

int64_t RankState::oomKillsSince() const {
  const int64_t now = oomKills(oom_counter);
  return now >= 0 && oom_kills_before >= 0 ? now - oom_kills_before : -1;
}

const VaultReader* HeldVault::readable(int rank) {
  if (!fd) {
    return nullptr;
  }
  try {
    if (reader) {
      reader->refresh();
    } else {
      reader = std::make_unique<VaultReader>(fd.get());
    }
    warned_ = false;
    return reader.get();
  } catch (const SystemError& error) {  // no memory or no descriptor: that may pass
    if (!std::exchange(warned_, true)) {
      logWarn("agent", "rank ", rank, " vault cannot be mapped now, and is kept: ", error.what());
    }
  } catch (const Error& error) {
    logWarn("agent", "rank ", rank, " vault is not readable any more: ", error.what());
    reader.reset();
    fd.reset();
    lost = true;
  }
  return nullptr;
}

HeldVault* RankState::vaultOf(int world) {
  if (world == 0 || (vault && vault.identity.world == world)) {
    return &vault;
  }
  const auto aside = set_aside.find(world);
  return aside == set_aside.end() ? nullptr : &aside->second;
}

std::vector<HeldVault*> RankState::vaults() {
  std::vector<HeldVault*> all{&vault};
  for (auto& [world, aside] : set_aside) {
    all.push_back(&aside);
  }
  return all;
}

RankTable::RankTable(std::string job, std::string vault_dir)
    : job_(job), files_(std::move(job), std::move(vault_dir)) {}

void RankTable::adoptVaultFiles() {
  for (auto& file : files_.find()) {
    auto& state = ranks_[file.identity.rank];
    state.hello.rank = file.identity.rank;
    if (!file.aside || state.hello.world == 0) {
      state.hello.world = file.identity.world;
    }
    HeldVault& place = file.aside ? state.set_aside[file.identity.world] : state.vault;
    place.fd = std::move(file.fd);
    place.identity = std::move(file.identity);
    place.path = std::move(file.path);
  }
}

bool RankTable::ended(const RankState& rank) {
  return rank.pidfd ? processEnded(rank.pidfd) : rank.connection == 0;
}

int RankTable::readablePid(const RankState& rank) {
  return rank.pid_is_own && rank.pidfd && !processEnded(rank.pidfd) ? rank.pid : 0;
}

RankState& RankTable::join(const Hello& hello, PeerProcess& process, uint64_t connection) {
  auto& state = ranks_[hello.rank];
  const int pid = process.pid > 0 ? process.pid : hello.pid;
  if (state.live() && (state.pid != pid || !state.pid_is_own) &&
      state.hello.incarnation != hello.incarnation && !ended(state)) {
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
  // Equal numbers of two namespaces are two processes.
  const bool same = state.pid == pid && state.pid_is_own && process.pid > 0 && state.pidfd &&
                    !processEnded(state.pidfd);
  state.pid = pid;
  state.pid_is_own = process.pid > 0;
  state.pidfd = std::move(process.pidfd);
  if (!same) {
    const int visible = readablePid(state);
    const int parent = visible > 0 ? parentOf(visible) : 0;
    state.oom_counter = visible > 0 ? oomCounterOf(visible) : "";
    state.oom_kills_before = oomKills(state.oom_counter);
    state.ending = {};
    state.frames = FaultFrames::kNone;
    state.launcher_pid = parent;
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
  VaultIdentity identity = VaultReader::identityOf(fd.get());
  if (identity.rank != put.rank || identity.job != job_) {
    throw Corruption("vault: belongs to rank " + std::to_string(identity.rank) +
                     " of another job or rank");
  }
  const int world = identity.world;
  const HeldVault* const before = rank.vaultOf(world);
  rank.resumed = before != nullptr && *before && sameFile(before->fd.get(), fd.get());
  rank.resumes_world = put.resumes_world;
  std::set<int> refused_by = rank.resumed ? before->refused_by : std::set<int>();
  if (rank.vault && rank.vault.identity.world != world) {
    const int other = rank.vault.identity.world;
    if (!rank.vault.path.empty()) {
      rank.vault.path = files_.pathOf(put.rank, other);  // where the rank has moved it
    }
    logInfo("agent", "rank ", put.rank, " vault of ", other, " ranks is set aside");
    rank.set_aside.insert_or_assign(other, std::move(rank.vault));
  }
  rank.set_aside.erase(world);
  std::string path = files_.pathOf(put.rank);
  if (path.empty() || !isAt(fd.get(), path)) {
    path.clear();
  }
  rank.vault = HeldVault();
  rank.vault.fd = std::move(fd);
  rank.vault.identity = std::move(identity);
  rank.vault.path = std::move(path);
  rank.vault.refused_by = std::move(refused_by);
  rank.readable();
}

void RankTable::dropSetAside() {
  const auto hasResumed = [](RankState& rank) {
    const VaultReader* const vault = rank.readable();
    return vault != nullptr && vault->stats().restore_ns.load() > 0;
  };
  // Numbers of ranks whose vaults the job has resumed from; and of those that it was to resume
  // from, but the script had not built what they hold, and started from its beginning.
  std::set<int> continued, refused;
  for (auto& [number, rank] : ranks_) {
    if (rank.hello.incarnation == incarnation_ && rank.resumes_world > 0 &&
        rank.resumes_world != rank.hello.world) {
      (hasResumed(rank) ? continued : refused).insert(rank.resumes_world);
    }
  }
  // Not one with a step that the rank could not resume from, as of a job with other parts.
  const auto isBehind = [](HeldVault& held, int number, RankState& rank) {
    const VaultReader* const there = held.readable(number);
    const VaultReader* const own = rank.readable();
    if (there == nullptr || own == nullptr) {
      return false;
    }
    const std::vector<RawSlot> slots = there->rawSlots();
    const auto from = static_cast<int64_t>(own->stats().restored_step.load());
    return std::all_of(slots.begin(), slots.end(), [from](const RawSlot& slot) {
      return slot.state != SlotState::kSealed || slot.step <= from;
    });
  };
  const auto drop = [](int number, HeldVault& held) {
    logInfo("agent", "rank ", number, " vault of ", held.identity.world,
            " ranks is no longer needed");
    deleteFile(number, held);
  };
  for (auto& [number, rank] : ranks_) {
    const bool lives = rank.hello.incarnation == incarnation_;
    const bool own = lives && rank.resumed && hasResumed(rank);
    for (HeldVault* const held : rank.vaults()) {
      if (*held && refused.contains(held->identity.world)) {
        held->refused_by.insert(world());
      } else if (*held && held->identity.world == world()) {
        held->refused_by.insert(refused.begin(), refused.end());  // nor will it be the other way
      }
    }
    for (auto aside = rank.set_aside.begin(); aside != rank.set_aside.end();) {
      const bool smaller =
          own && aside->first < rank.hello.world && isBehind(aside->second, number, rank);
      if (!smaller && !continued.contains(aside->first)) {
        ++aside;
        continue;
      }
      drop(number, aside->second);
      aside = rank.set_aside.erase(aside);
    }
    if (!lives && rank.vault && continued.contains(rank.vault.identity.world)) {
      drop(number, rank.vault);
      rank.vault = HeldVault();
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

const RankState* RankTable::restartingRank() const {
  const auto found = std::find_if(ranks_.begin(), ranks_.end(), [this](const auto& entry) {
    const RankState& rank = entry.second;
    return rank.hello.incarnation == incarnation_ && rank.hello.restarts_left > 0 &&
           rank.launcher && !processEnded(rank.launcher);
  });
  return found == ranks_.end() ? nullptr : &found->second;
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
  files_.removeFolder();
}

}  // namespace reft::agent

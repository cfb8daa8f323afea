#include "agent/peers/vault_files.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <chrono>
#include <memory>
#include <optional>
#include <string_view>
#include <thread>
#include <utility>

#include "agent/peers/messages.h"
#include "intercept/base/clock.h"
#include "intercept/base/error.h"
#include "intercept/base/log.h"
#include "intercept/base/safe_files.h"
#include "snapshot/vault/reader.h"

namespace reft::agent {

namespace {

constexpr std::string_view kOfWorld = "-of-";
constexpr int64_t kTouchNs = 60 * kSecond;
constexpr int kLockTries = 200;
constexpr std::chrono::milliseconds kLockPause{10};

std::optional<int> numberOf(std::string_view digits) {
  int number = -1;
  const auto* end = digits.data() + digits.size();
  const auto parsed = std::from_chars(digits.data(), end, number);
  const bool valid = !digits.empty() && parsed.ec == std::errc() && parsed.ptr == end;
  return valid && number >= 0 && number <= kMaxRank ? std::optional(number) : std::nullopt;
}

struct Name {
  int rank = 0;
  int aside_world = 0;  // 0: not set aside
};

// "rank-<rank>.vault", or "rank-<rank>-of-<world>.vault" for one that is set aside.
std::optional<Name> parsed(std::string_view name) {
  constexpr std::string_view kPrefix = "rank-";
  constexpr std::string_view kSuffix = ".vault";
  if (!name.starts_with(kPrefix) || !name.ends_with(kSuffix) ||
      name.size() <= kPrefix.size() + kSuffix.size()) {
    return std::nullopt;
  }
  const auto middle = name.substr(kPrefix.size(), name.size() - kPrefix.size() - kSuffix.size());
  const auto of = middle.find(kOfWorld);
  const bool aside = of != std::string_view::npos;
  const auto rank = numberOf(middle.substr(0, of));
  const auto world = aside ? numberOf(middle.substr(of + kOfWorld.size())) : std::optional(0);
  return rank && world && (!aside || *world >= 1) ? std::optional(Name{*rank, *world})
                                                  : std::nullopt;
}

}  // namespace

VaultFiles::VaultFiles(std::string job, std::string vault_dir)
    : job_(std::move(job)), vault_dir_(std::move(vault_dir)) {}

std::string VaultFiles::pathOf(int rank, int set_aside_world) const {
  if (vault_dir_.empty()) {
    return "";
  }
  const std::string of =
      set_aside_world == 0 ? "" : std::string(kOfWorld) + std::to_string(set_aside_world);
  return folder() + "/rank-" + std::to_string(rank) + of + ".vault";
}

bool VaultFiles::open() {
  if (folder_ && isAt(folder_.get(), folder())) {
    return true;
  }
  folder_.reset();
  if (vault_dir_.empty()) {
    return false;
  }
  UniqueFd fd(::open(folder().c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
  if (!fd && errno == ENOENT) {
    return false;  // no rank has made it yet
  }
  std::string problem;
  try {
    struct stat info {};
    if (!fd || ::fstat(fd.get(), &info) != 0) {
      throw SystemError("open");
    }
    problem = info.st_uid != ::geteuid() ? "belongs to user " + std::to_string(info.st_uid)
                                         : chainProblem(folder());
  } catch (const Error& error) {
    problem = error.what();
  }
  if (!problem.empty()) {
    if (!std::exchange(refused_, true)) {
      logWarn("agent", "vault files in ", folder(), " are left alone: ", problem);
    }
    return false;
  }
  folder_ = std::move(fd);
  locked_ = false;
  return true;
}

// Only `reft gc` has the lock for itself, and only while it looks and deletes.
bool VaultFiles::lock() {
  locked_ = locked_ || ::flock(folder_.get(), LOCK_SH | LOCK_NB) == 0;
  return locked_;
}

bool VaultFiles::awaitLock() {
  for (int i = 0; i < kLockTries && !lock() && errno == EWOULDBLOCK; ++i) {
    std::this_thread::sleep_for(kLockPause);
  }
  // Without locks (some network file systems), age alone tells `reft gc` that a job is dead.
  return locked_ || errno != EWOULDBLOCK;
}

std::vector<VaultFiles::Found> VaultFiles::find() {
  std::vector<Found> found;
  if (!open()) {
    return found;
  }
  if (!awaitLock()) {
    logWarn("agent", "vault files in ", folder(), " are left alone: another process locks them");
    return found;
  }
  const int again = ::openat(folder_.get(), ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  const std::unique_ptr<DIR, int (*)(DIR*)> entries(again < 0 ? nullptr : ::fdopendir(again),
                                                    ::closedir);
  while (const dirent* entry = entries ? ::readdir(entries.get()) : nullptr) {
    consider(entry->d_name, found);
  }
  return found;
}

void VaultFiles::consider(const std::string& name, std::vector<Found>& found) {
  const auto wanted = parsed(name);
  if (!wanted) {
    return;
  }
  const std::string path = folder() + "/" + name;
  try {
    UniqueFd fd = openBeneath(folder_.get(), name, O_RDWR | O_NONBLOCK);
    if (!fd) {
      throw SystemError("open");
    }
    if (const auto problem = ownFileProblem(fd.get()); !problem.empty()) {
      throw Corruption(problem);
    }
    VaultIdentity identity = VaultReader::identityOf(fd.get());
    const bool aside = wanted->aside_world != 0;
    if (identity.job != job_ || identity.rank != wanted->rank ||
        (aside && identity.world != wanted->aside_world)) {
      throw Corruption("belongs to rank " + std::to_string(identity.rank) + " of " +
                       std::to_string(identity.world) + " of job " + identity.job);
    }
    found.push_back({std::move(identity), aside, std::move(fd), path});
  } catch (const Error& error) {
    logWarn("agent", "vault file ", path, " is left alone: ", error.what());
  }
}

void VaultFiles::tend(int64_t now_ns) {
  if (!vault_dir_.empty() && (touched_ns_ == 0 || now_ns - touched_ns_ >= kTouchNs) && open()) {
    touched_ns_ = now_ns;
    ::futimens(folder_.get(), nullptr);
  }
  if (folder_) {
    lock();
  }
}

void VaultFiles::removeFolder() {
  if (!vault_dir_.empty()) {
    ::rmdir(folder().c_str());
  }
}

}  // namespace reft::agent

// The vault files of one job, in <REFT_VAULT_DIR>/<job>: which of them are this job's, and their
// removal.
//
// Others may have prepared the folder, so its path is checked as sshd checks one (safe_files.h),
// and a file in it is read before it is mapped.
//
// While an agent lives, it holds a shared lock on the folder and touches it every minute. `reft gc`
// takes the folder of a job for dead if it gets the lock and the folder is long unchanged.
//
// Threads: one at a time. Errors: none: what is refused is logged in one line.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "intercept/base/unique_fd.h"
#include "snapshot/vault/identity.h"

namespace reft::agent {

class VaultFiles {
 public:
  // `vault_dir` "": there are no files.
  VaultFiles(std::string job, std::string vault_dir);

  struct Found {
    VaultIdentity identity;
    bool aside = false;  // of a job with another number of ranks than the newest
    UniqueFd fd;
    std::string path;
  };
  // Vaults that an earlier agent left. Foreign ones stay and are logged.
  std::vector<Found> find();

  // Where the vault of a rank is; `set_aside_world`: of how many ranks the job was that has left
  // it, 0: the present one. "" without files.
  std::string pathOf(int rank, int set_aside_world = 0) const;
  // Call each tick.
  void tend(int64_t now_ns);
  // Removes the folder, unless anything is in it.
  void removeFolder();

 private:
  std::string folder() const { return vault_dir_ + "/" + job_; }
  // Opens the folder if it is there and safe. False if not.
  bool open();
  bool lock();
  bool awaitLock();
  void consider(const std::string& name, std::vector<Found>& found);

  std::string job_, vault_dir_;
  UniqueFd folder_;
  bool locked_ = false;  // folder_ has the shared lock
  bool refused_ = false;
  int64_t touched_ns_ = 0;
};

}  // namespace reft::agent

#include "agent/log_file.h"

#include <fcntl.h>
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

#include "intercept/base/safe_files.h"
#include "intercept/base/unique_fd.h"

namespace reft::agent {

void LogFile::tend(int directory) {
  struct stat info {};
  if (active_ && ::fstat(STDERR_FILENO, &info) == 0 && S_ISREG(info.st_mode) &&
      info.st_size > kMostBytes) {
    ::renameat(directory, "agent.log", directory, "agent.log.1");
    open(directory);
    // A log that could not be moved is emptied: it never grows without limit.
    if (::fstat(STDERR_FILENO, &info) == 0 && S_ISREG(info.st_mode) && info.st_size > kMostBytes) {
      [[maybe_unused]] const int cut = ::ftruncate(STDERR_FILENO, 0);
    }
  }
}

void LogFile::open(int directory) {
  const UniqueFd log = active_ ? openBeneath(directory, "agent.log",
                                             O_WRONLY | O_CREAT | O_APPEND | O_NONBLOCK, 0600)
                               : UniqueFd();
  if (log && ownFileProblem(log.get()).empty()) {
    ::dup2(log.get(), STDERR_FILENO);
  }
}

}  // namespace reft::agent

#include "agent/hang/launcher_terminal.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <fstream>
#include <string>

#include "agent/peers/peer_process.h"
#include "intercept/base/log.h"

namespace reft::agent {

namespace {

constexpr int kStderr = 2;

// Whether the process has the descriptor open for appending.
bool appends(const std::string& process) {
  std::ifstream info(process + "/fdinfo/" + std::to_string(kStderr));
  for (std::string field; info >> field;) {
    unsigned flags = 0;
    if (field == "flags:" && info >> std::oct >> flags) {
      return (flags & O_APPEND) != 0;
    }
  }
  return false;
}

bool mayBeWritten(int file, const std::string& process) {
  struct stat what {};
  if (::fstat(file, &what) != 0) {
    return false;
  }
  return S_ISFIFO(what.st_mode) || (S_ISCHR(what.st_mode) && ::isatty(file) != 0) ||
         (S_ISREG(what.st_mode) && appends(process));
}

}  // namespace

bool writeToStderrOf(int pid, const UniqueFd& pidfd, std::string_view text) {
  const std::string process = "/proc/" + std::to_string(pid);
  const UniqueFd file(::open((process + "/fd/" + std::to_string(kStderr)).c_str(),
                             O_WRONLY | O_APPEND | O_NONBLOCK | O_NOCTTY | O_CLOEXEC));
  // The number belonged to the launcher until now, if that still lives.
  if (!file || processEnded(pidfd) || !mayBeWritten(file.get(), process)) {
    logInfo("agent", "the launcher's error output cannot be written to");
    return false;
  }
  // One write, so that lines of others do not come in between; SIGPIPE is ignored.
  const ssize_t written = ::write(file.get(), text.data(), text.size());
  return written == static_cast<ssize_t>(text.size());
}

}  // namespace reft::agent

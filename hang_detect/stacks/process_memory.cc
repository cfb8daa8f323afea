#include "hang_detect/stacks/process_memory.h"

#include <fcntl.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cinttypes>
#include <cstdio>

namespace reft {

namespace {

constexpr size_t kMaxMaps = 16u << 20;  // bytes of text
constexpr size_t kMaxStatus = 16384;

}  // namespace

std::string procPath(int pid, const std::string& name) {
  return "/proc/" + std::to_string(pid) + "/" + name;
}

std::string readProcText(const std::string& path, size_t limit, int& problem) {
  std::string text;
  const UniqueFd file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  problem = file ? 0 : errno;
  while (file && text.size() < limit) {
    char chunk[16384];
    const ssize_t got = ::read(file.get(), chunk, sizeof(chunk));
    if (got <= 0) {
      problem = got < 0 ? errno : 0;
      break;
    }
    text.append(chunk, static_cast<size_t>(got));
  }
  return text;
}

std::string statusField(const std::string& status_path, const std::string& name) {
  int problem = 0;
  const std::string status = "\n" + readProcText(status_path, kMaxStatus, problem);
  const size_t at = status.find("\n" + name + ":");
  if (at == std::string::npos) {
    return "";
  }
  const size_t from = at + name.size() + 2;
  const std::string line = status.substr(from, status.find('\n', from) - from);
  const size_t first = line.find_first_not_of(" \t");
  return first == std::string::npos ? ""
                                    : line.substr(first, line.find_last_not_of(" \t") + 1 - first);
}

bool ProcessMemory::read(uint64_t address, void* into, size_t bytes) {
  if (!file_) {
    iovec local{into, bytes};
    iovec remote{reinterpret_cast<void*>(address), bytes};  // an address of the other process
    const ssize_t got = ::process_vm_readv(pid_, &local, 1, &remote, 1, 0);
    if (got == static_cast<ssize_t>(bytes)) {
      return true;
    }
    if (got >= 0 || (errno != EPERM && errno != ENOSYS && errno != EACCES)) {
      problem_ = got >= 0 ? EFAULT : errno;
      return false;
    }
    problem_ = errno;  // a container may forbid this call but not the file
    file_.reset(::open(procPath(pid_, "mem").c_str(), O_RDONLY | O_CLOEXEC));
    if (!file_) {
      return false;
    }
  }
  if (address > INT64_MAX) {
    return false;
  }
  const ssize_t got = ::pread(file_.get(), into, bytes, static_cast<off_t>(address));
  problem_ = got < 0 ? errno : 0;
  return got == static_cast<ssize_t>(bytes);
}

bool ProcessMemory::forbidden() const {
  return problem_ == EPERM || problem_ == EACCES || problem_ == ENOSYS;
}

std::string noRightToRead(int pid) {
  int problem = 0;
  std::string text = "no right to read the memory of process " + std::to_string(pid) +
                     ": be its user, or have CAP_SYS_PTRACE (of a container: --cap-add=SYS_PTRACE)";
  const std::string scope = readProcText("/proc/sys/kernel/yama/ptrace_scope", 8, problem);
  if (!scope.empty() && scope[0] != '0') {
    text += "; kernel.yama.ptrace_scope is " + scope.substr(0, 1) + ", which allows it for " +
            (scope[0] == '1'   ? "its parents only"
             : scope[0] == '2' ? "administrators only"
                               : "no process");
  }
  return text;
}

std::vector<MappedRange> parseMaps(const std::string& maps) {
  std::vector<MappedRange> ranges;
  for (size_t at = 0; at < maps.size();) {
    const size_t end = std::min(maps.find('\n', at), maps.size());
    const std::string line = maps.substr(at, end - at);
    at = end + 1;
    MappedRange range;
    char rights[5] = "";
    int path_at = 0;
    if (std::sscanf(line.c_str(), "%" SCNx64 "-%" SCNx64 " %4s %" SCNx64 " %*s %" SCNu64 " %n",
                    &range.begin, &range.end, rights, &range.offset, &range.inode, &path_at) != 5 ||
        range.begin >= range.end) {
      continue;
    }
    range.executable = rights[2] == 'x';
    if (path_at > 0 && static_cast<size_t>(path_at) < line.size()) {
      range.path = line.substr(static_cast<size_t>(path_at));
    }
    ranges.push_back(std::move(range));
  }
  return ranges;
}

std::vector<MappedRange> mapsOf(int pid, int& problem) {
  return parseMaps(readProcText(procPath(pid, "maps"), kMaxMaps, problem));
}

UniqueFd openMapped(int pid, const std::string& path) {
  UniqueFd file(::open(procPath(pid, "root" + path).c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (!file) {
    file.reset(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  }
  return file;
}

}  // namespace reft

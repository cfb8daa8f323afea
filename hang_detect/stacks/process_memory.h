// Another process as /proc shows it: its memory, and what is mapped there.
//
// Threads: re-entrant; a ProcessMemory belongs to one thread at a time. May block if a page of the
//          process is not in memory and its file system does not answer.
// Errors:  none: a failed read returns false; unreadable text is empty.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "intercept/base/unique_fd.h"

namespace reft {

// /proc/<pid>/<name>
std::string procPath(int pid, const std::string& name);

// At most `limit` bytes; `problem`: errno, 0 = none.
std::string readProcText(const std::string& path, size_t limit, int& problem);

// One field of /proc/<pid>/status or /proc/<pid>/task/<tid>/status, trimmed; "" if absent.
std::string statusField(const std::string& status_path, const std::string& name);

// The memory of a process, by process_vm_readv or /proc/<pid>/mem, whichever the kernel allows.
class ProcessMemory {
 public:
  explicit ProcessMemory(int pid) : pid_(pid) {}

  // Reads exactly `bytes`; false on failure.
  bool read(uint64_t address, void* into, size_t bytes);
  // True if the last failure was a lack of permission.
  bool forbidden() const;

 private:
  int pid_;
  UniqueFd file_;
  int problem_ = 0;
};

// Why this process may not read that one, and how to permit it.
std::string noRightToRead(int pid);

struct MappedRange {
  uint64_t begin = 0, end = 0;
  uint64_t offset = 0;  // in the file
  uint64_t inode = 0;
  bool executable = false;
  std::string path;  // as the kernel prints it: "" anonymous, "[vdso]", "… (deleted)"
};

std::vector<MappedRange> parseMaps(const std::string& maps);
std::vector<MappedRange> mapsOf(int pid, int& problem);

// Opens a file that a process has mapped, through that process's own root directory.
UniqueFd openMapped(int pid, const std::string& path);

}  // namespace reft

// Another process as /proc shows it: its memory, and what is mapped there.
//
// Threads: re-entrant; a ProcessMemory belongs to one thread at a time. May block, where a page of
// the process is not in memory
//          and its file system does not answer.
// Errors:  none: a read that fails says so; text that cannot be read is empty.
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

// One field of /proc/<pid>/status or /proc/<pid>/task/<tid>/status, without blanks around it. "" if
// it is not there.
std::string statusField(const std::string& status_path, const std::string& name);

// The memory of a process, by whichever of the two ways the kernel allows.
class ProcessMemory {
 public:
  explicit ProcessMemory(int pid) : pid_(pid) {}

  // Exactly `bytes`; false if that is not possible.
  bool read(uint64_t address, void* into, size_t bytes);
  // The last failure was for lack of the right to read.
  bool forbidden() const;

 private:
  int pid_;
  UniqueFd file_;
  int problem_ = 0;
};

// Why there is no right to read a process, and what would give it.
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

// A file that a process has mapped, opened through the process's own root, as it may have another
// one than this process.
UniqueFd openMapped(int pid, const std::string& path);

}  // namespace reft

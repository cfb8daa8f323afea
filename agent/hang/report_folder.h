// The folder `verdicts` in the agent's directory: a report of each hang, named by a number that
// only grows and by the time, so that no step of the clock overwrites one. Bounded: the oldest
// reports go first.
//
// Threads: one at a time. Errors: none: what cannot be written is logged.
#pragma once

#include <cstdint>
#include <string>

#include "intercept/base/unique_fd.h"

namespace reft::agent {

class ReportFolder {
 public:
  struct Limits {
    uint64_t reports = 200;
    uint64_t bytes = 64u << 20;
  };

  // `directory`: of the agent, open; `path`: how people find it.
  ReportFolder(int directory, std::string path, Limits limits);
  // Where the folder is from now on.
  void move(int directory, std::string path);

  // Writes <name>.json and <name>.txt. Returns <path>/verdicts/<name>; `on_disk` is whether the
  // JSON is whole and, with `durably`, on disk.
  std::string write(const std::string& json, const std::string& text, bool durably, bool& on_disk);

 private:
  void open();
  void makeRoom();

  int directory_;
  std::string path_;
  Limits limits_;
  UniqueFd folder_;
  uint64_t last_ = 0;  // number of the newest report
};

}  // namespace reft::agent

// The Xid errors in the kernel's log (/dev/kmsg), where this process may read it: from its
// construction on.
//
// Only lines of the kernel itself count, not those that a process wrote to /dev/kmsg, and what they
// hold is only data: a number, a PCI address and a process id.
//
// Threads: one. Errors: none; readable() is false if there is no log to read.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "hang_detect/evidence/hardware_sample.h"
#include "intercept/base/unique_fd.h"

namespace reft {

// Of one record of /dev/kmsg, "4,1234,98765,-;NVRM: Xid (PCI:0000:3b:00): 79, pid=42, ...".
std::optional<XidSample> xidOfRecord(std::string_view record);

// Counts `xid` in `xids`: with an equal one, if there is one, and not beyond kMaxXids kinds.
void addXid(std::vector<XidSample>& xids, const XidSample& xid);

class KernelLog {
 public:
  // `path`: of the log. One that is a regular file, as in tests, is read from its start.
  explicit KernelLog(const std::string& path);
  bool readable() const { return static_cast<bool>(log_); }
  // Adds the Xids that came since the last call. Reads at most kMostRecords at a time, so a log
  // that grows without end costs no more.
  void read(std::vector<XidSample>& xids);

  static constexpr int kMostRecords = 20'000;

 private:
  UniqueFd log_;
  bool is_file_ = false;
  std::string left_;  // of a file: the begin of a line
};

}  // namespace reft

#include "hang_detect/health/kernel_log.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>

namespace reft {

namespace {

constexpr size_t kRecordBytes = 8192;  // as much as the kernel gives
constexpr int kMaxXidNumber = 9999;

template <typename Number>
std::optional<Number> numberAt(std::string_view text) {
  Number value = 0;
  const auto [end, problem] = std::from_chars(text.data(), text.data() + text.size(), value);
  return problem == std::errc() && end != text.data() ? std::optional(value) : std::nullopt;
}

}  // namespace

std::optional<XidSample> xidOfRecord(std::string_view record) {
  constexpr std::string_view kXid = "NVRM: Xid (";
  constexpr std::string_view kPid = ", pid=";
  constexpr int kFacilityShift = 3;
  const size_t begin = record.find(';');
  const auto priority = numberAt<uint64_t>(record);
  // The kernel gives what processes write another facility than its own, 0.
  if (begin == record.npos || !priority || (*priority >> kFacilityShift) != 0) {
    return std::nullopt;
  }
  std::string_view text = record.substr(begin + 1);
  text = text.substr(0, text.find('\n'));
  if (!text.starts_with(kXid)) {
    return std::nullopt;
  }
  text.remove_prefix(kXid.size());
  const size_t close = text.find("): ");
  if (close == text.npos) {
    return std::nullopt;
  }
  XidSample xid;
  xid.pci = pciKey(text.substr(0, close));
  text.remove_prefix(close + 3);
  const auto number = numberAt<int>(text);
  if (xid.pci.empty() || !number || *number <= 0 || *number > kMaxXidNumber) {
    return std::nullopt;
  }
  xid.number = *number;
  if (const size_t at = text.find(kPid); at != text.npos) {
    std::string_view pid = text.substr(at + kPid.size());
    pid.remove_prefix(pid.starts_with('\'') ? 1 : 0);
    xid.pid = std::max(0, numberAt<int>(pid).value_or(0));
  }
  xid.from_kernel_log = 1;
  return xid;
}

void addXid(std::vector<XidSample>& xids, const XidSample& xid) {
  const auto same = std::ranges::find_if(xids, [&](const XidSample& known) {
    return known.number == xid.number && known.pci == xid.pci;
  });
  if (same != xids.end()) {
    same->from_nvml += xid.from_nvml;
    same->from_kernel_log += xid.from_kernel_log;
    same->pid = xid.pid > 0 ? xid.pid : same->pid;
  } else if (xids.size() < kMaxXids) {
    xids.push_back(xid);
  }
}

KernelLog::KernelLog(const std::string& path)
    : log_(::open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC | O_NOCTTY)) {
  struct stat status {};
  if (!log_ || ::fstat(log_.get(), &status) != 0) {
    log_.reset();
    return;
  }
  is_file_ = S_ISREG(status.st_mode);
  if (!is_file_ && (!S_ISCHR(status.st_mode) || ::lseek(log_.get(), 0, SEEK_END) < 0)) {
    log_.reset();
  }
}

void KernelLog::read(std::vector<XidSample>& xids) {
  char record[kRecordBytes];
  for (int records = 0; log_ && records < kMostRecords; ++records) {
    const ssize_t got = ::read(log_.get(), record, sizeof(record));
    if (got < 0 && (errno == EPIPE || errno == EINTR)) {
      continue;  // the kernel has overwritten records; the next one is the oldest that is left
    }
    if (got <= 0) {
      return;
    }
    const std::string_view text(record, static_cast<size_t>(got));
    if (!is_file_) {
      if (const auto xid = xidOfRecord(text)) {
        addXid(xids, *xid);
      }
      continue;
    }
    left_ += text;
    size_t begin = 0;
    for (size_t end = 0; (end = left_.find('\n', begin)) != left_.npos; begin = end + 1) {
      if (const auto xid = xidOfRecord(std::string_view(left_).substr(begin, end - begin))) {
        addXid(xids, *xid);
      }
    }
    left_.erase(0, begin);
    left_.resize(std::min(left_.size(), kRecordBytes));
  }
}

}  // namespace reft

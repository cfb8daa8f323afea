#include "agent/hang/report_folder.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "intercept/base/log.h"
#include "intercept/base/safe_files.h"

namespace reft::agent {

namespace {

constexpr size_t kDigits = 6;

// "<number>-<time>.json", or .txt.
std::optional<uint64_t> numberOf(const std::string& name) {
  uint64_t number = 0;
  const auto parsed = std::from_chars(name.data(), name.data() + name.size(), number);
  const bool ours = parsed.ec == std::errc() && parsed.ptr != name.data() + name.size() &&
                    *parsed.ptr == '-' && (name.ends_with(".json") || name.ends_with(".txt"));
  return ours ? std::optional(number) : std::nullopt;
}

struct Report {
  uint64_t bytes = 0;
  std::vector<std::string> files;
};

// The reports in a folder, by number.
std::map<uint64_t, Report> reportsIn(int folder) {
  std::map<uint64_t, Report> found;
  const int again = ::openat(folder, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  const std::unique_ptr<DIR, int (*)(DIR*)> entries(again < 0 ? nullptr : ::fdopendir(again),
                                                    ::closedir);
  while (const dirent* entry = entries ? ::readdir(entries.get()) : nullptr) {
    const std::string name = entry->d_name;
    struct stat info {};
    if (const auto number = numberOf(name);
        number && ::fstatat(folder, name.c_str(), &info, AT_SYMLINK_NOFOLLOW) == 0) {
      found[*number].bytes += static_cast<uint64_t>(info.st_size);
      found[*number].files.push_back(name);
    }
  }
  return found;
}

std::string nameOf(uint64_t number) {
  timespec now{};
  ::clock_gettime(CLOCK_REALTIME, &now);
  tm parts{};
  ::gmtime_r(&now.tv_sec, &parts);
  std::array<char, 48> time{};
  std::strftime(time.data(), time.size(), "%Y%m%dT%H%M%S", &parts);
  std::array<char, 96> text{};
  std::snprintf(text.data(), text.size(), "%0*llu-%s.%03dZ", static_cast<int>(kDigits),
                static_cast<unsigned long long>(number), time.data(),
                static_cast<int>(now.tv_nsec / 1'000'000));
  return text.data();
}

// True if the file was written whole and, with `durably`, is on disk.
bool writeWhole(int folder, const std::string& name, const std::string& text, bool durably) {
  const UniqueFd file = openBeneath(folder, name, O_WRONLY | O_CREAT | O_EXCL, 0600);
  size_t done = 0;
  while (file && done < text.size()) {
    const ssize_t count = ::write(file.get(), text.data() + done, text.size() - done);
    if (count <= 0) {
      break;
    }
    done += static_cast<size_t>(count);
  }
  if (!file || done < text.size() || (durably && ::fsync(file.get()) != 0)) {
    logWarn("agent", "cannot write verdicts/", name, ": ", std::strerror(errno));
    return false;
  }
  return true;
}

}  // namespace

ReportFolder::ReportFolder(int directory, std::string path, Limits limits)
    : directory_(directory), path_(std::move(path)), limits_(limits) {}

void ReportFolder::move(int directory, std::string path) {
  directory_ = directory;
  path_ = std::move(path);
  folder_.reset();
}

void ReportFolder::open() {
  struct stat info {};
  if (folder_ && ::fstat(folder_.get(), &info) == 0 && info.st_nlink > 0) {
    return;
  }
  ::mkdirat(directory_, "verdicts", 0700);
  folder_ = openBeneath(directory_, "verdicts", O_RDONLY | O_DIRECTORY);
  if (folder_) {
    const auto found = reportsIn(folder_.get());
    last_ = found.empty() ? last_ : std::max(last_, found.rbegin()->first);
  }
}

void ReportFolder::makeRoom() {
  auto found = reportsIn(folder_.get());
  uint64_t bytes = 0;
  for (const auto& [number, report] : found) {
    bytes += report.bytes;
  }
  while (!found.empty() && (found.size() > limits_.reports || bytes > limits_.bytes)) {
    const auto oldest = found.begin();
    if (oldest->first == last_) {
      return;  // the newest one stays, even if it exceeds the limit
    }
    for (const auto& file : oldest->second.files) {
      ::unlinkat(folder_.get(), file.c_str(), 0);
      logInfo("agent", "deleted the oldest hang report, verdicts/", file);
    }
    bytes -= oldest->second.bytes;
    found.erase(oldest);
  }
}

std::string ReportFolder::write(const std::string& json, const std::string& text, bool durably,
                                bool& on_disk) {
  open();
  const auto name = nameOf(++last_);
  on_disk = writeWhole(folder_.get(), name + ".json", json, durably);
  writeWhole(folder_.get(), name + ".txt", text, false);
  if (folder_) {
    makeRoom();
  }
  return path_ + "/verdicts/" + name;
}

}  // namespace reft::agent

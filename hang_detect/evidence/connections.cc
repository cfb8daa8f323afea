#include "hang_detect/evidence/connections.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdlib>
#include <memory>
#include <set>

#include <arpa/inet.h>
#include <dirent.h>
#include <fcntl.h>
#include <unistd.h>

#include "intercept/base/unique_fd.h"

namespace reft {

namespace {

constexpr int kTimesResent =
    3;  // healthy networks lose a segment, not the same one again and again
constexpr size_t kMaxAddresses = 512;
constexpr size_t kMaxDead = 64;
constexpr size_t kMaxSockets = 1u << 16;  // of a process
constexpr size_t kMaxTableBytes = 16u << 20;

std::string contentsOf(const std::string& path) {
  const UniqueFd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  std::string text;
  std::array<char, 16384> piece;
  ssize_t got = 0;
  while (fd && text.size() < kMaxTableBytes &&
         (got = ::read(fd.get(), piece.data(), piece.size())) > 0) {
    text.append(piece.data(), static_cast<size_t>(got));
  }
  return text;
}

// Inodes of the sockets that the process has open.
std::set<uint64_t> socketsOf(int pid) {
  std::set<uint64_t> found;
  const std::string folder = "/proc/" + std::to_string(pid) + "/fd";
  const std::unique_ptr<DIR, int (*)(DIR*)> entries(::opendir(folder.c_str()), &::closedir);
  while (const dirent* entry = entries ? ::readdir(entries.get()) : nullptr) {
    std::array<char, 64> target;
    const ssize_t size =
        ::readlinkat(::dirfd(entries.get()), entry->d_name, target.data(), target.size());
    constexpr std::string_view kSocket = "socket:[";
    const std::string_view text(target.data(), static_cast<size_t>(std::max<ssize_t>(size, 0)));
    if (text.starts_with(kSocket) && found.size() < kMaxSockets) {
      uint64_t inode = 0;
      std::from_chars(text.data() + kSocket.size(), text.data() + text.size(), inode);
      found.insert(inode);
    }
  }
  return found;
}

template <typename Number>
bool hexOf(std::string_view text, Number& value) {
  const auto [end, problem] = std::from_chars(text.data(), text.data() + text.size(), value, 16);
  return problem == std::errc() && end == text.data() + text.size();
}

// "0207E70A:A2C4": words of four bytes in the order of this machine, a port in that of readers.
bool addressOf(std::string_view text, std::string& address) {
  const size_t colon = text.find(':');
  uint16_t port = 0;
  if ((colon != 8 && colon != 32) || !hexOf(text.substr(colon + 1), port)) {
    return false;
  }
  std::array<uint32_t, 4> words{};
  for (size_t i = 0; i < colon / 8; ++i) {
    if (!hexOf(text.substr(8 * i, 8), words[i])) {
      return false;
    }
  }
  const bool mapped = colon == 32 && words[0] == 0 && words[1] == 0 && words[2] == htonl(0xFFFF);
  const bool is_v4 = colon == 8 || mapped;
  std::array<char, INET6_ADDRSTRLEN> name;
  if (::inet_ntop(is_v4 ? AF_INET : AF_INET6, mapped ? &words[3] : words.data(), name.data(),
                  name.size()) == nullptr) {
    return false;
  }
  address = is_v4 ? std::string(name.data()) : "[" + std::string(name.data()) + "]";
  address += ":" + std::to_string(port);
  return true;
}

std::vector<std::string_view> wordsOf(std::string_view line) {
  std::vector<std::string_view> words;
  for (size_t at = 0; words.size() < 16;) {
    const size_t begin = line.find_first_not_of(" \t", at);
    if (begin == line.npos) {
      break;
    }
    at = std::min(line.find_first_of(" \t", begin), line.size());
    words.push_back(line.substr(begin, at - begin));
  }
  return words;
}

void addTable(const std::string& table, const std::set<uint64_t>& sockets,
              std::set<std::string>& addresses, std::vector<DeadConnection>& dead) {
  for (size_t begin = 0; begin < table.size();) {
    const size_t end = std::min(table.find('\n', begin), table.size());
    TcpLine line;
    if (parseTcpLine(std::string_view(table).substr(begin, end - begin), line) &&
        sockets.contains(line.inode)) {
      if (addresses.size() < kMaxAddresses) {
        addresses.insert(line.connection.local);
      }
      if (line.connection.resent >= kTimesResent && dead.size() < kMaxDead) {
        dead.push_back(std::move(line.connection));
      }
    }
    begin = end + 1;
  }
}

}  // namespace

bool parseTcpLine(std::string_view line, TcpLine& parsed) {
  // sl local peer state tx:rx timer:when resent uid probes inode …
  const std::vector<std::string_view> words = wordsOf(line);
  if (words.size() < 10 || words[3] != "01" || !addressOf(words[1], parsed.connection.local) ||
      !addressOf(words[2], parsed.connection.peer)) {
    return false;
  }
  uint32_t unacknowledged = 0, resent = 0;
  const std::string_view inode = words[9];
  const auto [end, problem] =
      std::from_chars(inode.data(), inode.data() + inode.size(), parsed.inode);
  if (!hexOf(words[4].substr(0, words[4].find(':')), unacknowledged) || !hexOf(words[6], resent) ||
      problem != std::errc() || end != inode.data() + inode.size()) {
    return false;
  }
  parsed.connection.unacknowledged = unacknowledged;
  const bool sends_again = words[5].starts_with("01:") && unacknowledged > 0;
  parsed.connection.resent = sends_again ? static_cast<int>(std::min(resent, 1000u)) : 0;
  return true;
}

Connections connectionsOf(int pid) noexcept {
  Connections result;
  if (pid <= 0) {
    return result;
  }
  try {
    const std::set<uint64_t> sockets = socketsOf(pid);
    std::set<std::string> addresses;
    for (const char* table : {"tcp", "tcp6"}) {
      addTable(contentsOf("/proc/" + std::to_string(pid) + "/net/" + table), sockets, addresses,
               result.dead);
    }
    result.addresses.assign(addresses.begin(), addresses.end());
  } catch (...) {  // NOLINT(bugprone-empty-catch): no memory left; what was found is something
  }
  return result;
}

}  // namespace reft

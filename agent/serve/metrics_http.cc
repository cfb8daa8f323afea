#include "agent/serve/metrics_http.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include <array>
#include <cerrno>
#include <cstring>

#include "intercept/base/error.h"
#include "intercept/base/log.h"

namespace reft::agent {

namespace {

constexpr uint64_t kListener = 0;  // token
constexpr size_t kMaxClients = 16;
constexpr size_t kMaxRequest = 8192;
constexpr int64_t kDeadlineNs = 5'000'000'000;
constexpr int kAcceptsPerTick = 8;
constexpr int64_t kTextNs = 1'000'000'000;

}  // namespace

MetricsHttp::MetricsHttp(int port, std::function<std::string()> text) : text_(std::move(text)) {
  if (port == 0) {
    return;
  }
  if (!listen(port)) {
    logWarn("agent", "metrics port ", port, " is not served: ", std::strerror(errno));
    return;
  }
  epoll_.reset(::epoll_create1(EPOLL_CLOEXEC));
  if (!epoll_) {
    throw SystemError("epoll_create1");
  }
  watch(listener_.get(), kListener, false, true);
  accepts_left_ = kAcceptsPerTick;
}

bool MetricsHttp::listen(int port) {
  listener_.reset(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  const int on = 1;
  sockaddr_in where{};
  where.sin_family = AF_INET;
  where.sin_port = htons(static_cast<uint16_t>(port));
  where.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  ::setsockopt(listener_.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  return ::bind(listener_.get(), reinterpret_cast<const sockaddr*>(&where), sizeof(where)) == 0 &&
         ::listen(listener_.get(), 16) == 0;
}

void MetricsHttp::watch(int fd, uint64_t token, bool write, bool add) {
  epoll_event event{};
  event.events = write ? EPOLLOUT : EPOLLIN;
  event.data.u64 = token;
  ::epoll_ctl(epoll_.get(), add ? EPOLL_CTL_ADD : EPOLL_CTL_MOD, fd, &event);
}

void MetricsHttp::serve(int64_t now_ns) {
  std::array<epoll_event, 16> events;
  const int count = ::epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()), 0);
  for (int i = 0; i < count; ++i) {
    const auto token = events[static_cast<size_t>(i)].data.u64;
    if (token == kListener) {
      accept(now_ns);
    } else if (const auto client = clients_.find(token);
               client != clients_.end() && !serve(token, client->second, now_ns)) {
      clients_.erase(client);
    }
  }
}

void MetricsHttp::tick(int64_t now_ns) {
  std::erase_if(clients_,
                [now_ns](const auto& entry) { return entry.second.deadline_ns < now_ns; });
  accepts_left_ = kAcceptsPerTick;
  if (paused_) {
    paused_ = false;
    watch(listener_.get(), kListener, false, false);
  }
}

void MetricsHttp::pause() {
  paused_ = true;
  epoll_event nothing{};
  nothing.data.u64 = kListener;
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, listener_.get(), &nothing);
}

void MetricsHttp::accept(int64_t now_ns) {
  if (accepts_left_ == 0 || clients_.size() >= kMaxClients) {
    pause();  // the others wait in the kernel
    return;
  }
  --accepts_left_;
  UniqueFd socket(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (!socket) {
    if (errno == EMFILE || errno == ENFILE) {
      pause();
    }
    return;
  }
  const auto token = next_token_++;
  watch(socket.get(), token, false, true);
  clients_[token] = {std::move(socket), "", "", now_ns + kDeadlineNs};
}

const std::string& MetricsHttp::text(int64_t now_ns) {
  if (newest_text_ns_ == 0 || now_ns - newest_text_ns_ >= kTextNs) {
    newest_text_ = text_();
    newest_text_ns_ = now_ns;
  }
  return newest_text_;
}

bool MetricsHttp::serve(uint64_t token, Client& client, int64_t now_ns) {
  const auto failed = [](ssize_t count) { return count < 0 && errno != EAGAIN && errno != EINTR; };
  if (client.out.empty()) {
    std::array<char, 4096> bytes;
    const ssize_t count = ::recv(client.socket.get(), bytes.data(), bytes.size(), 0);
    if (count == 0 || failed(count)) {
      return false;
    }
    client.in.append(bytes.data(), static_cast<size_t>(count > 0 ? count : 0));
    if (client.in.size() > kMaxRequest) {
      return false;
    }
    if (client.in.find("\r\n\r\n") == std::string::npos) {
      return true;
    }
    const bool known =
        client.in.rfind("GET /metrics ", 0) == 0 || client.in.rfind("GET / ", 0) == 0;
    const auto body = known ? text(now_ns) : std::string("GET /metrics\n");
    client.out =
        std::string("HTTP/1.1 ") + (known ? "200 OK" : "404 Not Found") +
        "\r\nContent-Type: text/plain; version=0.0.4\r\nConnection: close\r\nContent-Length: " +
        std::to_string(body.size()) + "\r\n\r\n" + body;
    watch(client.socket.get(), token, true, false);
  }
  const ssize_t count = ::send(client.socket.get(), client.out.data(), client.out.size(),
                               MSG_NOSIGNAL | MSG_DONTWAIT);
  if (failed(count)) {
    return false;
  }
  client.out.erase(0, static_cast<size_t>(count > 0 ? count : 0));
  return !client.out.empty();
}

}  // namespace reft::agent

#include "intercept/base/wire.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstring>

#include "intercept/base/clock.h"
#include "intercept/base/error.h"

namespace reft::wire {

namespace {

constexpr size_t kMaxFdsPerMessage = 8;
constexpr size_t kCompactAt = size_t{1} << 20;

bool carriesFd(Type type) { return type == Type::kVaultPut || type == Type::kVaultFd; }

}  // namespace

std::string encode(Type type, std::string_view payload) {
  if (payload.size() > kMaxPayload) {
    throw InvalidArgument("payload", std::to_string(payload.size()) + " bytes", "at most " + std::to_string(kMaxPayload));
  }
  const Header header{kMagic, kVersion, static_cast<uint16_t>(type), static_cast<uint32_t>(payload.size()), 0};
  std::string bytes(sizeof(header), '\0');
  std::memcpy(bytes.data(), &header, sizeof(header));
  bytes.append(payload);
  return bytes;
}

std::string encode(Type type, const Ballot& ballot) {
  return encode(type, std::string_view(reinterpret_cast<const char*>(&ballot), sizeof(ballot)));
}

std::optional<Ballot> decodeBallot(std::string_view payload) {
  if (payload.size() != sizeof(Ballot)) {
    return std::nullopt;
  }
  Ballot ballot;
  std::memcpy(&ballot, payload.data(), sizeof(ballot));
  return ballot;
}

void FrameDecoder::feed(const void* data, size_t bytes) {
  if (consumed_ > kCompactAt) {
    buffer_.erase(0, consumed_);
    consumed_ = 0;
  }
  buffer_.append(static_cast<const char*>(data), bytes);
}

std::optional<Frame> FrameDecoder::next() {
  if (buffer_.size() - consumed_ < sizeof(Header)) {
    return std::nullopt;
  }
  Header header;
  std::memcpy(&header, buffer_.data() + consumed_, sizeof(header));
  if (header.magic != kMagic) {
    throw Corruption("frame: the peer does not speak reft's protocol (magic)");
  }
  if (header.version != kVersion) {
    throw Corruption("frame: protocol version " + std::to_string(header.version) + ", this build speaks " +
                     std::to_string(kVersion));
  }
  if (header.payload_bytes > kMaxPayload) {
    throw Corruption("frame: payload of " + std::to_string(header.payload_bytes) + " bytes, at most " +
                     std::to_string(kMaxPayload) + " are allowed");
  }
  if (buffer_.size() - consumed_ - sizeof(header) < header.payload_bytes) {
    return std::nullopt;
  }
  Frame frame{static_cast<Type>(header.type), buffer_.substr(consumed_ + sizeof(header), header.payload_bytes), {}};
  consumed_ += sizeof(header) + header.payload_bytes;
  if (consumed_ == buffer_.size()) {
    buffer_.clear();
    consumed_ = 0;
  }
  if (carriesFd(frame.type) && !fds_.empty()) {
    frame.fd = std::move(fds_.front());
    fds_.pop_front();
  }
  return frame;
}

void sendFrame(int socket, Type type, std::string_view payload, int fd_to_send) {
  const std::string bytes = encode(type, payload);
  size_t sent = 0;
  while (sent < bytes.size()) {
    iovec part{const_cast<char*>(bytes.data()) + sent, bytes.size() - sent};
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
    if (fd_to_send >= 0 && sent == 0) {
      message.msg_control = control;
      message.msg_controllen = sizeof(control);
      cmsghdr* head = CMSG_FIRSTHDR(&message);
      head->cmsg_level = SOL_SOCKET;
      head->cmsg_type = SCM_RIGHTS;
      head->cmsg_len = CMSG_LEN(sizeof(int));
      std::memcpy(CMSG_DATA(head), &fd_to_send, sizeof(int));
    }
    const ssize_t done = ::sendmsg(socket, &message, MSG_NOSIGNAL);
    if (done >= 0) {
      sent += static_cast<size_t>(done);
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      pollfd waiting{socket, POLLOUT, 0};
      if (::poll(&waiting, 1, 1000) == 0) {
        throw Timeout("the other side of the socket does not read");
      }
    } else if (errno == EPIPE || errno == ECONNRESET) {
      throw PeerFailure("the other side of the socket is gone");
    } else if (errno != EINTR) {
      throw SystemError("sendmsg");
    }
  }
}

bool receiveInto(int socket, FrameDecoder& decoder) {
  char buffer[65536];
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int) * kMaxFdsPerMessage)];
  iovec part{buffer, sizeof(buffer)};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  ssize_t got = 0;
  do {
    got = ::recvmsg(socket, &message, MSG_CMSG_CLOEXEC);
  } while (got < 0 && errno == EINTR);
  if (got < 0) {
    if (errno == EAGAIN || errno == EWOULDBLOCK) {
      return true;
    }
    if (errno == ECONNRESET) {
      return false;
    }
    throw SystemError("recvmsg");
  }
  for (cmsghdr* head = CMSG_FIRSTHDR(&message); head != nullptr; head = CMSG_NXTHDR(&message, head)) {
    if (head->cmsg_level != SOL_SOCKET || head->cmsg_type != SCM_RIGHTS) {
      continue;
    }
    for (size_t i = 0; i < (head->cmsg_len - CMSG_LEN(0)) / sizeof(int); ++i) {
      int fd = -1;
      std::memcpy(&fd, CMSG_DATA(head) + i * sizeof(int), sizeof(int));
      decoder.feedFd(UniqueFd(fd));
    }
  }
  if (got == 0) {
    return false;
  }
  decoder.feed(buffer, static_cast<size_t>(got));
  return true;
}

Frame receiveFrame(int socket, FrameDecoder& decoder, std::chrono::milliseconds timeout) {
  const int64_t deadline = SteadyClock::instance().nowNs() + std::chrono::nanoseconds(timeout).count();
  while (true) {
    if (auto frame = decoder.next()) {
      return std::move(*frame);
    }
    const int64_t left_ms = (deadline - SteadyClock::instance().nowNs() + 999'999) / 1'000'000;
    pollfd waiting{socket, POLLIN, 0};
    const int ready = left_ms <= 0 ? 0 : ::poll(&waiting, 1, static_cast<int>(left_ms));
    if (ready == 0) {
      throw Timeout("no answer over the socket in " + std::to_string(timeout.count()) + " ms");
    }
    if (ready > 0 && !receiveInto(socket, decoder)) {
      throw PeerFailure("the other side closed the socket");
    }
  }
}

}  // namespace reft::wire

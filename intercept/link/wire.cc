#include "intercept/link/wire.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <cstring>

#include "intercept/base/clock.h"
#include "intercept/base/error.h"

namespace reft::wire {

namespace {

constexpr size_t kReadBytes = 64 << 10;
// Descriptors that may wait for their frame; more come only from a peer that wants to exhaust ours.
constexpr size_t kMaxWaitingFds = 16;
constexpr size_t kMaxFdsPerRead = 4;
// A peer that is stopped must not stop the sender for longer.
constexpr int kSendTimeoutMs = 1000;

Header headerOf(Type type, size_t payload_bytes) {
  if (payload_bytes > kMaxPayload) {
    throw InvalidArgument("payload of a frame", std::to_string(payload_bytes) + " bytes",
                          "0.." + std::to_string(kMaxPayload));
  }
  return {kMagic, kVersion, static_cast<uint16_t>(type), static_cast<uint32_t>(payload_bytes), 0};
}

bool carriesFd(Type type) {
  return type == Type::kVaultPut || type == Type::kVaultFd;
}

}  // namespace

std::string encode(Type type, std::string_view payload) {
  const Header header = headerOf(type, payload.size());
  std::string frame(reinterpret_cast<const char*>(&header), sizeof(header));
  frame += payload;
  return frame;
}

std::string encode(Type type, const Ballot& ballot) {
  return encode(type, std::string_view(reinterpret_cast<const char*>(&ballot), sizeof(ballot)));
}

std::optional<Ballot> decodeBallot(std::string_view payload) {
  Ballot ballot;
  if (payload.size() != sizeof(ballot)) {
    return std::nullopt;
  }
  std::memcpy(&ballot, payload.data(), sizeof(ballot));
  return ballot;
}

void FrameDecoder::feed(const void* data, size_t bytes) {
  if (consumed_ == buffer_.size()) {
    buffer_.clear();
    consumed_ = 0;
  } else if (consumed_ > kReadBytes) {
    buffer_.erase(0, consumed_);
    consumed_ = 0;
  }
  buffer_.append(static_cast<const char*>(data), bytes);
}

std::optional<Frame> FrameDecoder::next() {
  if (fds_.size() > kMaxWaitingFds) {
    throw Corruption("frame stream: more than " + std::to_string(kMaxWaitingFds) +
                     " descriptors without a frame for them");
  }
  Header header;
  if (buffer_.size() - consumed_ < sizeof(header)) {
    return std::nullopt;
  }
  std::memcpy(&header, buffer_.data() + consumed_, sizeof(header));
  if (header.magic != kMagic) {
    throw Corruption("frame stream: magic is " + std::to_string(header.magic) + ", expected " +
                     std::to_string(kMagic));
  }
  if (header.version != kVersion) {
    throw Corruption("frame stream: version is " + std::to_string(header.version) + ", expected " +
                     std::to_string(kVersion) +
                     "; the agent and the ranks must run the same version of reft");
  }
  if (header.payload_bytes > longest_) {
    throw Corruption("frame stream: payload of " + std::to_string(header.payload_bytes) +
                     " bytes, at most " + std::to_string(longest_) + " expected");
  }
  if (buffer_.size() - consumed_ - sizeof(header) < header.payload_bytes) {
    return std::nullopt;
  }
  Frame frame;
  frame.type = static_cast<Type>(header.type);
  frame.payload.assign(buffer_, consumed_ + sizeof(header), header.payload_bytes);
  consumed_ += sizeof(header) + header.payload_bytes;
  if (carriesFd(frame.type) && !fds_.empty()) {
    frame.fd = std::move(fds_.front());
    fds_.pop_front();
  }
  return frame;
}

void sendFrame(int socket, Type type, std::string_view payload, int fd_to_send) {
  Header header = headerOf(type, payload.size());
  iovec parts[2] = {{&header, sizeof(header)}, {const_cast<char*>(payload.data()), payload.size()}};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = parts;
  message.msg_iovlen = 2;
  if (fd_to_send >= 0) {
    message.msg_control = control;
    message.msg_controllen = sizeof(control);
    cmsghdr* rights = CMSG_FIRSTHDR(&message);
    rights->cmsg_level = SOL_SOCKET;
    rights->cmsg_type = SCM_RIGHTS;
    rights->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(rights), &fd_to_send, sizeof(int));
  }
  size_t left = sizeof(header) + payload.size();
  while (left > 0) {
    const ssize_t sent = ::sendmsg(socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent < 0) {
      if (errno == EINTR) {
        continue;
      }
      if (errno == EPIPE || errno == ECONNRESET) {
        throw PeerFailure("the other end of the socket is closed");
      }
      if (errno == EAGAIN) {
        pollfd poller{socket, POLLOUT, 0};
        if (::poll(&poller, 1, kSendTimeoutMs) == 0) {
          throw Timeout("the other end of the socket does not read");
        }
        continue;
      }
      throw SystemError("sendmsg");
    }
    message.msg_control = nullptr;  // the descriptor rode on the first byte
    message.msg_controllen = 0;
    left -= static_cast<size_t>(sent);
    for (size_t skip = static_cast<size_t>(sent); iovec & part : parts) {
      const size_t taken = std::min(skip, part.iov_len);
      part.iov_base = static_cast<char*>(part.iov_base) + taken;
      part.iov_len -= taken;
      skip -= taken;
    }
  }
}

bool receiveInto(int socket, FrameDecoder& decoder, bool take_fds) {
  thread_local std::vector<char> bytes(kReadBytes);
  alignas(cmsghdr) char control[CMSG_SPACE(kMaxFdsPerRead * sizeof(int))];
  iovec part{bytes.data(), bytes.size()};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  if (take_fds) {
    message.msg_control = control;
    message.msg_controllen = sizeof(control);
  }
  ssize_t count;
  do {
    count = ::recvmsg(socket, &message, MSG_CMSG_CLOEXEC);
  } while (count < 0 && errno == EINTR);
  if (count < 0) {
    if (errno == EAGAIN) {
      return true;
    }
    if (errno == ECONNRESET) {
      return false;
    }
    throw SystemError("recvmsg");
  }
  for (cmsghdr* header = CMSG_FIRSTHDR(&message); header != nullptr;
       header = CMSG_NXTHDR(&message, header)) {
    if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) {
      continue;
    }
    const size_t fds = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < fds; ++i) {
      int fd;
      std::memcpy(&fd, CMSG_DATA(header) + i * sizeof(int), sizeof(int));
      decoder.feedFd(UniqueFd(fd));
    }
  }
  if (count == 0) {
    return false;
  }
  decoder.feed(bytes.data(), static_cast<size_t>(count));
  return true;
}

Frame receiveFrame(int socket, FrameDecoder& decoder, std::chrono::milliseconds timeout) {
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  for (;;) {
    if (auto frame = decoder.next()) {
      return std::move(*frame);
    }
    const auto left =
        std::chrono::ceil<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now());
    pollfd poller{socket, POLLIN, 0};
    const int ready =
        left.count() <= 0
            ? 0
            : ::poll(&poller, 1, static_cast<int>(std::min<int64_t>(left.count(), 1 << 30)));
    if (ready < 0 && errno != EINTR) {
      throw SystemError("poll");
    }
    if (ready == 0) {
      throw Timeout("no answer within " + std::to_string(timeout.count()) + " ms");
    }
    if (ready > 0 && !receiveInto(socket, decoder)) {
      throw PeerFailure("the other end of the socket closed it");
    }
  }
}

}  // namespace reft::wire

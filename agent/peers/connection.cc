#include "agent/peers/connection.h"

#include <fcntl.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstring>

#include "intercept/base/error.h"

namespace reft::agent {

Connection::Connection(uint64_t id, UniqueFd socket, PeerProcess process, int64_t now_ns)
    : id_(id), socket_(std::move(socket)), process_(std::move(process)), heard_ns_(now_ns) {
  decoder_.limitPayload(kLongestHello);
}

void Connection::greet(int rank) {
  greeted_ = true;
  rank_ = rank;
  process_.pidfd.reset();  // the table of ranks has taken that of a rank; a tool is not watched
  decoder_.limitPayload(rank >= 0 ? wire::kMaxPayload : kLongestOfTool);
}

bool Connection::hasBytes() const {
  int bytes = 0;
  return ::ioctl(socket_.get(), FIONREAD, &bytes) == 0 && bytes > 0;
}

bool Connection::receive(int64_t now_ns) {
  heard_ns_ = greeted_ ? now_ns : heard_ns_;  // a hello that drips does not last longer
  try {
    return wire::receiveInto(socket_.get(), decoder_, rank_ >= 0);
  } catch (const SystemError&) {
    return false;
  }
}

int64_t Connection::stalledNs(int64_t now_ns) {
  if (queue_.empty() || sent_bytes_ != sent_bytes_before_) {
    sent_bytes_before_ = sent_bytes_;
    stalled_since_ns_ = 0;
  } else if (stalled_since_ns_ == 0) {
    stalled_since_ns_ = now_ns;
  }
  return stalled_since_ns_ == 0 ? 0 : now_ns - stalled_since_ns_;
}

void Connection::send(wire::Type type, std::string_view payload, int fd) {
  if (payload.size() > wire::kMaxPayload) {
    enqueue(wire::encode(
                wire::Type::kError,
                R"({"what":"the answer is larger than a frame","hint":"ask for fewer ranks"})"),
            -1);
    return;
  }
  enqueue(wire::encode(type, payload), fd);
}

void Connection::send(wire::Type type, const wire::Ballot& ballot) {
  enqueue(wire::encode(type, ballot), -1);
}

void Connection::enqueue(std::string bytes, int fd) {
  if (gone_ || closing_) {
    return;
  }
  if (queued_bytes_ + bytes.size() > kMaxQueued) {
    gone_ = true;
    return;
  }
  queued_bytes_ += bytes.size();
  queue_.push_back({std::move(bytes), 0, UniqueFd(fd >= 0 ? ::fcntl(fd, F_DUPFD_CLOEXEC, 3) : -1)});
  flush();
}

void Connection::flush() {
  while (!queue_.empty() && !gone_) {
    auto& out = queue_.front();
    iovec part{out.bytes.data() + out.sent, out.bytes.size() - out.sent};
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    if (out.fd) {
      const int fd = out.fd.get();
      message.msg_control = control;
      message.msg_controllen = sizeof(control);
      auto* rights = CMSG_FIRSTHDR(&message);
      rights->cmsg_level = SOL_SOCKET;
      rights->cmsg_type = SCM_RIGHTS;
      rights->cmsg_len = CMSG_LEN(sizeof(int));
      std::memcpy(CMSG_DATA(rights), &fd, sizeof(int));
    }
    const ssize_t count = ::sendmsg(socket_.get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (count < 0) {
      if (errno == EINTR) {
        continue;
      }
      gone_ = errno != EAGAIN && errno != EWOULDBLOCK;
      return;
    }
    out.fd.reset();  // rode on the first byte
    out.sent += static_cast<size_t>(count);
    sent_bytes_ += static_cast<uint64_t>(count);
    if (out.sent == out.bytes.size()) {
      queued_bytes_ -= out.bytes.size();
      queue_.pop_front();
    }
  }
}

}  // namespace reft::agent

#include "agent/mesh/channel.h"

#include <sys/sendfile.h>
#include <sys/socket.h>

#include <cerrno>

namespace reft::agent {

namespace {

class PlainChannel final : public Channel {
 public:
  using Channel::Channel;

  ptrdiff_t read(std::byte* to, size_t bytes) override {
    return moved([&] { return ::recv(fd(), to, bytes, MSG_DONTWAIT); });
  }

  ptrdiff_t write(std::string_view bytes) override {
    return moved(
        [&] { return ::send(fd(), bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT); });
  }

  ptrdiff_t writeFile(int file, uint64_t at, uint64_t bytes) override {
    auto from = static_cast<off_t>(at);
    return moved([&] { return ::sendfile(fd(), file, &from, bytes); });
  }

  bool wantsRead() const override { return true; }
  bool wantsWrite(bool has_more) const override { return has_more; }
  uint64_t crossed() const override { return crossed_; }

 private:
  template <typename Call>
  ptrdiff_t moved(Call call) {
    ssize_t count = 0;
    do {
      count = call();
    } while (count < 0 && errno == EINTR);
    if (count > 0) {
      crossed_ += static_cast<uint64_t>(count);
      return count;
    }
    return count < 0 && (errno == EAGAIN || errno == EWOULDBLOCK) ? 0 : kOver;
  }

  uint64_t crossed_ = 0;
};

}  // namespace

std::unique_ptr<Channel> plainChannel(UniqueFd socket) {
  return std::make_unique<PlainChannel>(std::move(socket));
}

}  // namespace reft::agent

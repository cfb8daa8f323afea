// The bytes of one connection between agents: in the clear, or under TLS (tls.h). No call blocks.
//
// What moved nothing goes on once the socket is as wantsRead() and wantsWrite() ask. The caller
// then calls read() first and writes after it, whichever of them was stuck: a handshake needs both.
//
// Threads: one, which blocks SIGPIPE. Errors: Corruption for what is not from an agent of this job
// with the same REFT_MESH_TLS; a broken connection is kOver.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string_view>
#include <utility>

#include "intercept/base/unique_fd.h"

namespace reft::agent {

class Channel {
 public:
  static constexpr ptrdiff_t kOver = -1;

  explicit Channel(UniqueFd socket) : socket_(std::move(socket)) {}
  virtual ~Channel() = default;
  Channel(const Channel&) = delete;
  Channel& operator=(const Channel&) = delete;

  int fd() const { return socket_.get(); }

  // Each of the three returns how many bytes it moved; 0: none for now. `bytes` is not 0.
  virtual ptrdiff_t read(std::byte* to, size_t bytes) = 0;
  // After a 0, the next call has these bytes again, and perhaps more of them.
  virtual ptrdiff_t write(std::string_view bytes) = 0;
  // Bytes [at, at + bytes) of a file, or as many as a call before was stuck with. A file that ends
  // before them is kOver.
  virtual ptrdiff_t writeFile(int file, uint64_t at, uint64_t bytes) = 0;

  virtual bool wantsRead() const = 0;
  // `has_more`: there is something to write.
  virtual bool wantsWrite(bool has_more) const = 0;
  // Bytes of the socket so far, both ways.
  virtual uint64_t crossed() const = 0;

 private:
  UniqueFd socket_;
};

std::unique_ptr<Channel> plainChannel(UniqueFd socket);

}  // namespace reft::agent

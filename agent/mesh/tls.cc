#include "agent/mesh/tls.h"

#include <openssl/err.h>
#include <openssl/ssl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <string>
#include <utility>
#include <vector>

#include "intercept/base/error.h"

namespace reft::agent {

namespace openssl {  // members of classes that a header names have these types

struct Free {
  void operator()(SSL_CTX* context) const { ::SSL_CTX_free(context); }
  void operator()(SSL_SESSION* session) const { ::SSL_SESSION_free(session); }
  void operator()(SSL* ssl) const { ::SSL_free(ssl); }
};
using Context = std::unique_ptr<SSL_CTX, Free>;
using Session = std::unique_ptr<SSL_SESSION, Free>;
using Connection = std::unique_ptr<SSL, Free>;

}  // namespace openssl

namespace {

constexpr std::string_view kIdentity = "reft mesh";
constexpr const char* kCipher = "TLS_AES_128_GCM_SHA256";
constexpr std::array<unsigned char, 2> kCipherId{0x13, 0x01};
constexpr size_t kFileChunk = 64u << 10;
constexpr size_t kMostAtOnce = 1u << 20;  // OpenSSL counts in int

std::string reasonOf(unsigned long error) {
  const char* reason = ::ERR_reason_error_string(error);
  return reason == nullptr ? "unknown error" : reason;
}

void demand(bool worked, const char* what) {
  if (!worked) {
    throw Unavailable(std::string("TLS: ") + what + ": " + reasonOf(::ERR_peek_last_error()));
  }
}

// A copy of the pre-shared key's session: a handshake writes to the one that it gets.
SSL_SESSION* copyFor(SSL* ssl) {
  auto* own = static_cast<SSL_SESSION*>(SSL_CTX_get_app_data(::SSL_get_SSL_CTX(ssl)));
  return ::SSL_SESSION_dup(own);
}

int useKey(SSL* ssl, const EVP_MD* digest, const unsigned char** identity, size_t* length,
           SSL_SESSION** session) {
  *session = nullptr;
  if (digest != nullptr && ::EVP_MD_get_type(digest) != NID_sha256) {
    return 1;  // not that of the cipher: without a key, the handshake ends
  }
  *identity = reinterpret_cast<const unsigned char*>(kIdentity.data());
  *length = kIdentity.size();
  *session = copyFor(ssl);
  return *session != nullptr ? 1 : 0;
}

int findKey(SSL* ssl, const unsigned char* identity, size_t length, SSL_SESSION** session) {
  const bool is_own =
      std::string_view(reinterpret_cast<const char*>(identity), length) == kIdentity;
  *session = is_own ? copyFor(ssl) : nullptr;
  return is_own && *session == nullptr ? 0 : 1;
}

}  // namespace

struct Tls::Context {
  openssl::Context shared;
  openssl::Session key;
  uint64_t records_per_key = 0;
};

class Tls::TlsChannel final : public Channel {
 public:
  TlsChannel(UniqueFd socket, Side side, std::shared_ptr<const Context> context)
      : Channel(std::move(socket)),
        context_(std::move(context)),
        ssl_(::SSL_new(context_->shared.get())),
        is_server_(side == Side::kServer) {
    demand(ssl_ != nullptr && ::SSL_set_fd(ssl_.get(), fd()) == 1, "a connection");
    if (is_server_) {
      ::SSL_set_accept_state(ssl_.get());
    } else {
      // No certificate is trusted: a server that has no key but a certificate is refused.
      ::SSL_set_verify(ssl_.get(), SSL_VERIFY_PEER, nullptr);
      ::SSL_set_connect_state(ssl_.get());
    }
  }

  ptrdiff_t read(std::byte* to, size_t bytes) override {
    reading_ = Stuck::kNo;
    if (const ptrdiff_t shaken = shake(reading_); shaken <= 0) {
      return shaken;
    }
    size_t count = 0;
    const int done = ::SSL_read_ex(ssl_.get(), to, bytes, &count);
    return done == 1 ? static_cast<ptrdiff_t>(count) : whyNot(done, reading_);
  }

  ptrdiff_t write(std::string_view bytes) override {
    writing_ = Stuck::kNo;
    if (const ptrdiff_t shaken = shake(writing_); shaken <= 0) {
      return shaken;
    }
    if (records_ >= context_->records_per_key && begun_ == 0 &&
        ::SSL_key_update(ssl_.get(), SSL_KEY_UPDATE_NOT_REQUESTED) == 1) {
      records_ = 0;  // the next write sends the change first
    }
    ::ERR_clear_error();  // a change that has to wait for one of the other side comes later
    size_t count = 0;
    const size_t most = std::min(bytes.size(), kMostAtOnce);
    const int done = ::SSL_write_ex(ssl_.get(), bytes.data(), most, &count);
    if (done != 1) {
      begun_ = most;
      return whyNot(done, writing_);
    }
    begun_ = 0;
    ++records_;
    return static_cast<ptrdiff_t>(count);
  }

  ptrdiff_t writeFile(int file, uint64_t at, uint64_t bytes) override {
    if (written_ == chunk_.size()) {
      chunk_.resize(std::min<uint64_t>(bytes, kFileChunk));
      written_ = 0;
      if (!fill(file, at)) {
        return over();
      }
    }
    // What is stuck goes on with as many bytes as it has begun with.
    const size_t left = chunk_.size() - written_;
    const size_t most = std::max<size_t>(std::min<uint64_t>(left, bytes), begun_);
    const ptrdiff_t count = write({chunk_.data() + written_, std::min(left, most)});
    if (count > 0) {
      written_ += static_cast<size_t>(count);
    }
    if (count > 0 && static_cast<uint64_t>(count) == bytes) {
      chunk_ = {};  // nothing of the file is left
      written_ = 0;
    }
    return count;
  }

  bool wantsRead() const override {
    return reading_ != Stuck::kForWrite || writing_ == Stuck::kForRead;
  }
  bool wantsWrite(bool has_more) const override {
    return reading_ == Stuck::kForWrite || (has_more && writing_ != Stuck::kForRead);
  }
  uint64_t crossed() const override {
    return ::BIO_number_read(::SSL_get_rbio(ssl_.get())) +
           ::BIO_number_written(::SSL_get_wbio(ssl_.get()));
  }

 private:
  enum class Stuck : uint8_t { kNo, kForRead, kForWrite };

  // 1: both sides have shown that they have the key.
  ptrdiff_t shake(Stuck& stuck) {
    ::ERR_clear_error();  // of this thread: it says what the next call failed with
    if (over_) {
      return kOver;
    }
    if (shaken_) {
      return 1;
    }
    if (is_server_ && std::exchange(is_first_, false)) {
      refuseWithoutTls();
    }
    if (const int done = ::SSL_do_handshake(ssl_.get()); done != 1) {
      return whyNot(done, stuck);
    }
    if (::SSL_session_reused(ssl_.get()) != 1) {
      refuse("has not the key of this job");
    }
    shaken_ = true;
    return 1;
  }

  // An agent without TLS speaks first, and in one piece.
  void refuseWithoutTls() {
    std::array<char, kGreetingMagic.size()> first;
    const ssize_t got = ::recv(fd(), first.data(), first.size(), MSG_PEEK | MSG_DONTWAIT);
    if (got <= 0) {
      is_first_ = true;
    } else if (std::string_view(first.data(), static_cast<size_t>(got)) == kGreetingMagic) {
      refuse(std::string(kTlsDiffers));
    }
  }

  // 0 if the socket has to be as `stuck` then says, kOver if the connection has ended.
  ptrdiff_t whyNot(int done, Stuck& stuck) {
    switch (::SSL_get_error(ssl_.get(), done)) {
      case SSL_ERROR_WANT_READ: stuck = Stuck::kForRead; return 0;
      case SSL_ERROR_WANT_WRITE: stuck = Stuck::kForWrite; return 0;
      case SSL_ERROR_ZERO_RETURN:
      case SSL_ERROR_SYSCALL: return over();
      default: break;
    }
    const unsigned long error = ::ERR_peek_error();
    switch (ERR_GET_LIB(error) == ERR_LIB_SSL ? ERR_GET_REASON(error) : 0) {
      case SSL_R_UNEXPECTED_EOF_WHILE_READING: return over();
      case SSL_R_BINDER_DOES_NOT_VERIFY:
      case SSL_R_SSLV3_ALERT_ILLEGAL_PARAMETER:  // what the other side sends then
        refuse("has not the key of this job");
      default: refuse("TLS: " + reasonOf(error));
    }
  }

  ptrdiff_t over() {
    over_ = true;
    return kOver;
  }

  [[noreturn]] void refuse(const std::string& why) {
    over_ = true;
    ::ERR_clear_error();
    throw Corruption(why);
  }

  bool fill(int file, uint64_t at) {
    for (size_t have = 0; have < chunk_.size();) {
      const ssize_t got =
          ::pread(file, chunk_.data() + have, chunk_.size() - have, static_cast<off_t>(at + have));
      if (got <= 0 && !(got < 0 && errno == EINTR)) {
        return false;
      }
      have += static_cast<size_t>(std::max<ssize_t>(got, 0));
    }
    return true;
  }

  const std::shared_ptr<const Context> context_;
  const openssl::Connection ssl_;
  const bool is_server_;
  bool is_first_ = true, shaken_ = false, over_ = false;
  Stuck reading_ = Stuck::kNo, writing_ = Stuck::kNo;
  uint64_t records_ = 0;     // under the present key
  size_t begun_ = 0;         // bytes of a write that is stuck
  std::vector<char> chunk_;  // of a file, kept as it was read: what is begun may not change
  size_t written_ = 0;       // of these
};

Tls::Tls(const MeshKey& key, uint64_t records_per_key) {
  // The machine's openssl.cnf does not count, and a thread may still use OpenSSL at exit().
  ::OPENSSL_init_ssl(OPENSSL_INIT_NO_LOAD_CONFIG | OPENSSL_INIT_NO_ATEXIT, nullptr);
  ::ERR_clear_error();
  auto context = std::make_shared<Context>();
  context->records_per_key = records_per_key;
  context->shared.reset(::SSL_CTX_new(::TLS_method()));
  demand(context->shared != nullptr, "a context");
  SSL_CTX* const raw = context->shared.get();
  demand(::SSL_CTX_set_min_proto_version(raw, TLS1_3_VERSION) == 1 &&
             ::SSL_CTX_set_max_proto_version(raw, TLS1_3_VERSION) == 1 &&
             ::SSL_CTX_set_ciphersuites(raw, kCipher) == 1 &&
             SSL_CTX_set1_groups_list(raw, "X25519") == 1 && ::SSL_CTX_set_num_tickets(raw, 0) == 1,
         "TLS 1.3");
  ::SSL_CTX_set_options(raw, SSL_OP_NO_TICKET | SSL_OP_NO_COMPRESSION | SSL_OP_NO_RENEGOTIATION);
  SSL_CTX_set_session_cache_mode(raw, SSL_SESS_CACHE_OFF);
  SSL_CTX_set_mode(raw, SSL_MODE_ENABLE_PARTIAL_WRITE | SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER);
  ::SSL_CTX_set_psk_use_session_callback(raw, useKey);
  ::SSL_CTX_set_psk_find_session_callback(raw, findKey);

  const openssl::Connection any(::SSL_new(raw));
  context->key.reset(::SSL_SESSION_new());
  demand(any != nullptr && context->key != nullptr, "a session");
  Sha256 secret = hmacSha256({reinterpret_cast<const char*>(key.data()), key.size()},
                             {"reft mesh pre-shared key of TLS"});
  const SSL_CIPHER* cipher = ::SSL_CIPHER_find(any.get(), kCipherId.data());
  const bool is_set =
      cipher != nullptr && ::SSL_SESSION_set_cipher(context->key.get(), cipher) == 1 &&
      ::SSL_SESSION_set_protocol_version(context->key.get(), TLS1_3_VERSION) == 1 &&
      ::SSL_SESSION_set1_master_key(context->key.get(), secret.data(), secret.size()) == 1;
  ::OPENSSL_cleanse(secret.data(), secret.size());
  demand(is_set, "the pre-shared key");
  SSL_CTX_set_app_data(raw, context->key.get());
  context_ = std::move(context);
}

std::unique_ptr<Channel> Tls::over(UniqueFd socket, Side side) const {
  return std::make_unique<TlsChannel>(std::move(socket), side, context_);
}

bool Tls::isHello(std::string_view bytes) {
  return bytes.size() > 2 && bytes[0] == 22 && bytes[1] == 3;  // a record of the handshake
}

}  // namespace reft::agent

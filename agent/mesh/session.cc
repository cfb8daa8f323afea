#include "agent/mesh/session.h"

#include <fcntl.h>

#include <algorithm>
#include <utility>

#include "agent/mesh/tls.h"
#include "intercept/base/error.h"

namespace reft::agent {

namespace {

constexpr size_t kAtOnce = 1u << 20;  // bytes that a channel is asked for

}  // namespace

Session::Session(std::unique_ptr<Channel> channel, const MeshKey& key, int64_t now_ns)
    : channel_(std::move(channel)),
      key_(key),
      keeper_(false),
      phase_(Phase::kGreeting),
      since_ns_(now_ns),
      moved_ns_(now_ns),
      own_(drawNonce()) {}

Session::Session(std::unique_ptr<Channel> channel, const MeshKey& key, size_t source,
                 int64_t now_ns)
    : channel_(std::move(channel)),
      key_(key),
      keeper_(true),
      source_(source),
      phase_(Phase::kConnecting),
      since_ns_(now_ns),
      moved_ns_(now_ns),
      own_(drawNonce()) {}

void Session::connected() {
  phase_ = Phase::kAnswer;
  out_.push_back({greetingOf(own_), UniqueFd(), 0, 0});
}

size_t Session::wants() const {
  switch (phase_) {
    case Phase::kConnecting: return 0;
    case Phase::kGreeting: return kGreetingBytes;
    case Phase::kAnswer: return kAnswerBytes;
    case Phase::kProof: return kProofBytes;
    case Phase::kOpen: return reader_->wants();
  }
  return 0;
}

void Session::open(const SessionKeys& keys) {
  sealer_.emplace(keeper_ ? keys.of_keeper : keys.of_owner);
  reader_.emplace(keeper_ ? keys.of_owner : keys.of_keeper);
  phase_ = Phase::kOpen;
}

void Session::shake(std::string_view bytes) {
  if (phase_ == Phase::kGreeting) {
    const auto nonce = openGreeting(bytes);
    if (!nonce) {
      throw Corruption(Tls::isHello(bytes) ? std::string(kTlsDiffers)
                                           : "not an agent of this version");
    }
    theirs_ = *nonce;
    out_.push_back({answerOf(key_, theirs_, own_), UniqueFd(), 0, 0});
    phase_ = Phase::kProof;
  } else if (phase_ == Phase::kProof) {
    if (!isProof(key_, theirs_, own_, bytes)) {
      throw Corruption("has not the key of this job");
    }
    open(sessionKeysOf(key_, theirs_, own_));
  } else {
    const auto nonce = openAnswer(key_, own_, bytes);
    if (!nonce) {
      throw Corruption("has not the key of this job");
    }
    theirs_ = *nonce;
    out_.push_back({proofOf(key_, own_, theirs_), UniqueFd(), 0, 0});
    open(sessionKeysOf(key_, own_, theirs_));
  }
}

void Session::noteMoved(int64_t now_ns) {
  if (const uint64_t crossed = channel_->crossed(); crossed != crossed_) {
    crossed_ = crossed;
    moved_ns_ = now_ns;
  }
}

size_t Session::read(std::byte* to, size_t bytes, int64_t now_ns) {
  const ptrdiff_t got = channel_->read(to, bytes);
  noteMoved(now_ns);
  gone_ = gone_ || got == Channel::kOver;
  return static_cast<size_t>(std::max<ptrdiff_t>(got, 0));
}

std::optional<MeshFrame> Session::receive(size_t& budget, int64_t now_ns) {
  while (!gone_ && phase_ != Phase::kConnecting) {
    if (in_slot_) {
      if (whole_ || !receiveSlot(budget, now_ns)) {
        return std::nullopt;
      }
      continue;
    }
    if (budget == 0) {
      return std::nullopt;
    }
    const size_t wanted = wants();
    if (in_.size() < wanted) {
      const size_t have = in_.size();
      in_.resize(wanted);
      const size_t got =
          read(reinterpret_cast<std::byte*>(in_.data()) + have, wanted - have, now_ns);
      in_.resize(have + got);
      if (got == 0) {
        return std::nullopt;
      }
      budget -= std::min(budget, got);
      if (in_.size() < wanted) {
        continue;
      }
    }
    const std::string part = std::exchange(in_, std::string());
    if (phase_ != Phase::kOpen) {
      shake(part);
    } else if (auto frame = reader_->take(part)) {
      return frame;
    }
  }
  return std::nullopt;
}

void Session::beginSlot() {
  in_slot_ = true;
  whole_ = incoming_->next().empty();
}

bool Session::receiveSlot(size_t& budget, int64_t now_ns) {
  if (budget == 0) {
    return false;
  }
  const auto room = incoming_->next();
  const size_t count = read(room.data(), std::min({room.size(), kAtOnce, budget}), now_ns);
  if (count == 0) {
    return false;
  }
  budget -= std::min(budget, count);
  taken_bytes_ += count;
  incoming_->took(count);
  whole_ = incoming_->next().empty();
  return true;
}

std::unique_ptr<CopyStore::Incoming> Session::takeSlot() {
  in_slot_ = whole_ = false;
  return std::move(incoming_);
}

void Session::send(MeshType type, std::string_view payload) {
  out_.push_back({sealer_->seal(type, payload), UniqueFd(), 0, 0});
}

void Session::sendFile(int fd, uint64_t at, uint64_t bytes) {
  if (bytes == 0) {
    return;
  }
  UniqueFd own(::fcntl(fd, F_DUPFD_CLOEXEC, 3));
  if (!own) {
    throw SystemError("duplicating a vault's descriptor");
  }
  out_.push_back({{}, std::move(own), at, bytes});
}

void Session::flush(size_t budget, int64_t now_ns) {
  while (!out_.empty() && !gone_ && phase_ != Phase::kConnecting) {
    Out& out = out_.front();
    if (out.file && budget == 0) {
      return;
    }
    const ptrdiff_t sent =
        out.file ? channel_->writeFile(out.file.get(), out.at,
                                       std::min({out.left, uint64_t{kAtOnce}, uint64_t{budget}}))
                 : channel_->write(std::string_view(out.bytes).substr(out.at));
    noteMoved(now_ns);
    if (sent <= 0) {
      gone_ = sent == Channel::kOver;
      return;
    }
    const auto count = static_cast<uint64_t>(sent);
    out.at += count;
    if (out.file) {
      budget -= std::min<uint64_t>(budget, count);
      sent_bytes_ += count;
      out.left -= count;
    }
    if (out.file ? out.left == 0 : out.at == out.bytes.size()) {
      out_.pop_front();
    }
  }
}

}  // namespace reft::agent

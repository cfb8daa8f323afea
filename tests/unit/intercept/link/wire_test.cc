#include "intercept/link/wire.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <random>
#include <thread>

#include <gtest/gtest.h>

#include "intercept/base/error.h"

namespace reft::wire {
namespace wire_test {

using std::chrono::milliseconds;

struct Pair {
  Pair() {
    int ends[2];
    EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends), 0);
    a.reset(ends[0]);
    b.reset(ends[1]);
  }
  UniqueFd a, b;
};

UniqueFd memory(const char* text) {
  UniqueFd fd(::memfd_create("test", MFD_CLOEXEC));
  EXPECT_EQ(::write(fd.get(), text, std::strlen(text)), static_cast<ssize_t>(std::strlen(text)));
  return fd;
}

std::string contents(const UniqueFd& fd) {
  char bytes[64];
  const ssize_t count = ::pread(fd.get(), bytes, sizeof(bytes), 0);
  return count < 0 ? "unreadable" : std::string(bytes, static_cast<size_t>(count));
}

TEST(Wire, HeaderHasTheDocumentedBytes) {
  EXPECT_EQ(encode(Type::kHello, "{}"),
            std::string("RFTW\x03\x00\x01\x00\x02\x00\x00\x00\x00\x00\x00\x00{}", 18));
}

TEST(Wire, DecodesFramesCutAnywhere) {
  const std::string stream = encode(Type::kHello, "one") + encode(Type::kBye, "") +
                             encode(Type::kVote, std::string(1000, 'x'));
  for (size_t cut = 0; cut <= stream.size(); ++cut) {
    FrameDecoder decoder;
    std::vector<Frame> frames;
    for (const std::string& part : {stream.substr(0, cut), stream.substr(cut)}) {
      decoder.feed(part.data(), part.size());
      while (auto frame = decoder.next()) {
        frames.push_back(std::move(*frame));
      }
    }
    ASSERT_EQ(frames.size(), 3u) << cut;
    EXPECT_EQ(frames[0].payload, "one");
    EXPECT_EQ(frames[1].type, Type::kBye);
    EXPECT_EQ(frames[2].payload, std::string(1000, 'x'));
  }
}

TEST(Wire, RefusesAPayloadAboveTheDecodersLimitBeforeItIsThere) {
  FrameDecoder decoder;
  decoder.limitPayload(10);
  const auto whole = encode(Type::kHello, "0123456789");
  decoder.feed(whole.data(), whole.size());
  EXPECT_EQ(decoder.waiting(), whole.size());
  EXPECT_TRUE(decoder.next());
  EXPECT_EQ(decoder.waiting(), 0u);
  const auto longer = encode(Type::kHello, "0123456789a");
  decoder.feed(longer.data(), sizeof(Header));
  EXPECT_THROW(decoder.next(), Corruption);
}

TEST(Wire, TakesDescriptorsOnlyIfItMay) {
  const Pair pair;
  const auto file = memory("file");
  sendFrame(pair.a.get(), Type::kVaultPut, std::string(100, 'x'), file.get());
  FrameDecoder decoder;
  EXPECT_TRUE(receiveInto(pair.b.get(), decoder, false));
  const auto frame = decoder.next();
  ASSERT_TRUE(frame);
  EXPECT_FALSE(frame->fd);
}

TEST(Wire, RefusesForeignStreams) {
  const auto decode = [](size_t at, char byte) {
    std::string bytes = encode(Type::kHello, "{}");
    bytes[at] = byte;
    FrameDecoder decoder;
    decoder.feed(bytes.data(), bytes.size());
    decoder.next();
  };
  EXPECT_THROW(decode(0, 'X'), Corruption);
  EXPECT_THROW(decode(4, 1), Corruption);
  EXPECT_THROW(decode(11, 0x7f), Corruption);  // payload_bytes
  EXPECT_THROW(encode(Type::kHello, std::string(kMaxPayload + 1, 'x')), InvalidArgument);
}

TEST(Wire, BallotKeepsItsBytesAndItsSize) {
  const Ballot ballot{7, 0x1234, 99, 17, 1, 3, 1, {}};
  const std::string frame = encode(Type::kVote, ballot);
  const auto back = decodeBallot(std::string_view(frame).substr(sizeof(Header)));
  ASSERT_TRUE(back);
  EXPECT_EQ(std::memcmp(&*back, &ballot, sizeof(ballot)), 0);
  EXPECT_FALSE(decodeBallot("short"));
}

TEST(Wire, DescriptorsFindTheirFrames) {
  Pair pair;
  const UniqueFd first = memory("first");
  const UniqueFd second = memory("second");
  sendFrame(pair.a.get(), Type::kHello, "{}");
  sendFrame(pair.a.get(), Type::kVaultPut, "1", first.get());
  sendFrame(pair.a.get(), Type::kVote, "");
  sendFrame(pair.a.get(), Type::kVaultPut, "2", second.get());
  FrameDecoder decoder;
  EXPECT_FALSE(receiveFrame(pair.b.get(), decoder, milliseconds(1000)).fd);
  EXPECT_EQ(contents(receiveFrame(pair.b.get(), decoder, milliseconds(1000)).fd), "first");
  EXPECT_FALSE(receiveFrame(pair.b.get(), decoder, milliseconds(1000)).fd);
  EXPECT_EQ(contents(receiveFrame(pair.b.get(), decoder, milliseconds(1000)).fd), "second");
}

TEST(Wire, APeerCannotPileUpDescriptors) {
  Pair pair;
  FrameDecoder decoder;
  const UniqueFd fd = memory("x");
  for (int i = 0; i < 17; ++i) {
    sendFrame(pair.a.get(), Type::kHello, "{}", fd.get());
  }
  EXPECT_THROW(
      {
        for (int i = 0; i < 17; ++i) {
          receiveFrame(pair.b.get(), decoder, milliseconds(1000));
        }
      },
      Corruption);
}

TEST(Wire, LargePayloadsPassASmallSocket) {
  Pair pair;
  const std::string payload(5 << 20, 'p');
  std::thread sender([&] { sendFrame(pair.a.get(), Type::kStackReply, payload); });
  FrameDecoder decoder;
  EXPECT_EQ(receiveFrame(pair.b.get(), decoder, milliseconds(10000)).payload, payload);
  sender.join();
}

TEST(Wire, AClosedPeerIsAnErrorAndNoSignal) {
  Pair pair;
  pair.b.reset();
  EXPECT_THROW(sendFrame(pair.a.get(), Type::kHello, "{}"), PeerFailure);
  FrameDecoder decoder;
  EXPECT_THROW(receiveFrame(pair.a.get(), decoder, milliseconds(1000)), PeerFailure);
}

TEST(Wire, APeerThatDoesNotReadIsATimeout) {
  Pair pair;
  EXPECT_THROW(
      {
        for (;;) {
          sendFrame(pair.a.get(), Type::kStackReply, std::string(1 << 20, 'x'));
        }
      },
      Timeout);
}

TEST(Wire, NoAnswerIsATimeout) {
  Pair pair;
  FrameDecoder decoder;
  EXPECT_THROW(receiveFrame(pair.a.get(), decoder, milliseconds(20)), Timeout);
}

TEST(Wire, RandomBytesNeverCrashTheDecoder) {
  std::mt19937 random(1);
  for (int round = 0; round < 2000; ++round) {
    FrameDecoder decoder;
    std::string bytes = encode(Type::kVote, std::string(random() % 64, 'v'));
    for (int flips = 0; flips < 3; ++flips) {
      bytes[random() % bytes.size()] = static_cast<char>(random());
    }
    try {
      decoder.feed(bytes.data(), bytes.size());
      while (decoder.next()) {
      }
    } catch (const Corruption&) {
    }
  }
}

}  // namespace wire_test
}  // namespace reft::wire

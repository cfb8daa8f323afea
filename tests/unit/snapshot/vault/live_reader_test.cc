#include "snapshot/vault/live_reader.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "snapshot/vault/vault_format.h"

namespace reft {
namespace live_reader_test {

// Pages that can go.
class Pages {
 public:
  explicit Pages(size_t count) : bytes_(count * kPage) {
    data_ = static_cast<std::byte*>(
        ::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    std::memset(data_, 7, bytes_);
  }
  ~Pages() { ::munmap(data_, bytes_); }
  Pages(const Pages&) = delete;
  Pages& operator=(const Pages&) = delete;
  std::byte* data() const { return data_; }
  size_t bytes() const { return bytes_; }
  void unmap(size_t page) const { ::munmap(data_ + page * kPage, kPage); }

 private:
  size_t bytes_;
  std::byte* data_;
};

TEST(LiveReader, ReadsWhatIsThere) {
  const std::string text(LiveReader::kMostBytes, 'x');
  const auto* from = reinterpret_cast<const std::byte*>(text.data());
  LiveReader& reader = LiveReader::ofThread();
  for (const size_t bytes : {size_t{0}, size_t{1}, size_t{4097}, LiveReader::kMostBytes}) {
    const std::byte* const copy = reader.read(from, bytes);
    ASSERT_NE(copy, nullptr) << bytes;
    EXPECT_EQ(std::memcmp(copy, from, bytes), 0);
  }
  EXPECT_EQ(reader.read(from, LiveReader::kMostBytes + 1), nullptr);
}

TEST(LiveReader, GathersPartsOneBehindTheOther) {
  const std::string a = "abc", b = "defgh";
  const std::array parts = {partOf(reinterpret_cast<const std::byte*>(a.data()), a.size()),
                            partOf(nullptr, 0),
                            partOf(reinterpret_cast<const std::byte*>(b.data()), b.size())};
  LiveReader& reader = LiveReader::ofThread();
  ASSERT_EQ(reader.gather(parts), 8u);
  EXPECT_EQ(std::memcmp(reader.data(), "abcdefgh", 8), 0);
}

TEST(LiveReader, MemoryThatIsGoneIsAnAnswerAndNoSignal) {
  const Pages pages(3);
  LiveReader& reader = LiveReader::ofThread();
  pages.unmap(1);
  EXPECT_NE(reader.read(pages.data(), kPage), nullptr);
  EXPECT_EQ(reader.read(pages.data() + kPage, 1), nullptr);
  EXPECT_EQ(reader.read(pages.data() + kPage - 1, 2), nullptr);
  EXPECT_EQ(reader.read(pages.data(), pages.bytes()), nullptr);
  EXPECT_EQ(reader.read(nullptr, 8), nullptr);
  ::mprotect(pages.data() + 2 * kPage, kPage, PROT_NONE);
  EXPECT_EQ(reader.read(pages.data() + 2 * kPage, 64), nullptr);
  const std::array parts = {partOf(pages.data(), 100), partOf(pages.data() + kPage, 100)};
  EXPECT_LE(reader.gather(parts), 100u);
  EXPECT_EQ(reader.why(), "");
}

TEST(LiveReader, AFileThatWasCutIsAnAnswerAndNoSignal) {
  const int fd = ::memfd_create("cut", 0);
  ASSERT_EQ(::ftruncate(fd, kPage), 0);
  auto* data = static_cast<std::byte*>(::mmap(nullptr, kPage, PROT_READ, MAP_SHARED, fd, 0));
  EXPECT_NE(LiveReader::ofThread().read(data, kPage), nullptr);
  ASSERT_EQ(::ftruncate(fd, 0), 0);
  EXPECT_EQ(LiveReader::ofThread().read(data, kPage), nullptr);
  ::munmap(data, kPage);
  ::close(fd);
}

TEST(LiveReader, PagesMayComeAndGoMeanwhile) {
  const Pages pages(16);
  std::atomic<bool> end{false};
  std::thread mover([&] {
    // Without access instead of unmapped: MAP_FIXED would replace what others map in the hole. By
    // number, because the thread sanitizer takes mmap() for a write, and this race is meant.
    while (!end.load()) {
      for (const int access : {PROT_NONE, PROT_READ | PROT_WRITE}) {
        ::syscall(SYS_mmap, pages.data() + 4 * kPage, 4 * kPage, access,
                  MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
      }
    }
  });
  LiveReader reader;
  for (int i = 0; i < 2000; ++i) {
    reader.read(pages.data(), pages.bytes());
  }
  end.store(true);
  mover.join();
}

TEST(LiveReader, AForkedChildSharesNothingWithItsParent) {
  LiveReader& reader = LiveReader::ofThread();
  const std::string mine = "parent", other = "childs";
  ASSERT_NE(reader.read(reinterpret_cast<const std::byte*>(mine.data()), 6), nullptr);
  const pid_t child = ::fork();
  if (child == 0) {
    const auto* copy = reader.read(reinterpret_cast<const std::byte*>(other.data()), 6);
    ::_exit(copy != nullptr && std::memcmp(copy, "childs", 6) == 0 ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(std::memcmp(reader.data(), "parent", 6), 0);
}

}  // namespace live_reader_test
}  // namespace reft

#include "agent/run_place.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

namespace reft::agent {
namespace run_place_test {

namespace fs = std::filesystem;

Owner another(const UnixAddress&) {
  return Owner::kAnotherUser;
}
Owner unknown(const UnixAddress&) {
  return Owner::kUnknown;
}
Owner gone(const UnixAddress&) {
  return Owner::kNobody;
}

class RunPlaceTest : public testing::Test {
 protected:
  RunPlaceTest() {
    std::string name = fs::temp_directory_path() / "reft-place-XXXXXX";
    root_ = fs::canonical(::mkdtemp(name.data()));
    options_.run_dir = root_ + "/run";
    options_.job = "demo";
  }
  ~RunPlaceTest() override { fs::remove_all(root_); }

  // What an agent in this place claims.
  UnixAddress claim() {
    RunPlace place(options_);
    std::string other;
    EXPECT_EQ(place.take(other), RunPlace::Taken::kOurs) << other;
    UnixAddress result;
    EXPECT_EQ(
        ::getsockname(place.claim(), reinterpret_cast<sockaddr*>(&result.name), &result.bytes), 0);
    place.removeTraces();
    return result;
  }

  std::string root_;
  AgentOptions options_;
};

// A socket of another user that does not listen, and one whose backlog is full.
TEST_F(RunPlaceTest, IsTakenWhereSomebodyElseHoldsTheClaim) {
  const auto address = claim();
  for (const auto ask : {another, unknown, gone}) {
    for (const bool listens : {false, true}) {
      auto squatter = streamSocket();
      ASSERT_EQ(::bind(squatter.get(), address.get(), address.bytes), 0);
      std::vector<UniqueFd> knocks;
      if (listens) {
        ASSERT_EQ(::listen(squatter.get(), 0), 0);
        do {
          knocks.push_back(streamSocket());
        } while (::connect(knocks.back().get(), address.get(), address.bytes) == 0);
      }
      RunPlace place(options_, ask);
      std::string other;
      ASSERT_EQ(place.take(other), RunPlace::Taken::kOurs) << other;
      EXPECT_EQ(place.claim(), -1);
      // The lock decides now.
      AgentOptions same = options_;
      RunPlace second(same, another);
      EXPECT_EQ(second.take(other), RunPlace::Taken::kServed);
      squatter.reset();
      EXPECT_EQ(place.keep(), RunPlace::Kept::kSame);
      EXPECT_GE(place.claim(), 0);
      place.removeTraces();
    }
  }
}

// Two jobs of one launcher may derive one name for their secrets.
TEST_F(RunPlaceTest, ASecretThatAnotherJobHasUsedSinceStays) {
  for (const bool used_since : {false, true}) {
    RunPlace place(options_);
    std::string other;
    ASSERT_EQ(place.take(other), RunPlace::Taken::kOurs) << other;
    const fs::path file = fs::path(options_.run_dir) / "secrets" / "00ff";
    fs::create_directories(file.parent_path());
    std::ofstream(file) << "secret";
    fs::last_write_time(file, fs::file_time_type::clock::now() - std::chrono::hours(1));
    place.usesSecret("00ff");
    if (used_since) {
      fs::last_write_time(file, fs::file_time_type::clock::now() + std::chrono::seconds(1));
    }
    place.removeTraces();
    EXPECT_EQ(fs::exists(file), used_since);
  }
}

}  // namespace run_place_test
}  // namespace reft::agent

#include "intercept/base/log.h"

#include <gtest/gtest.h>

namespace reft {
namespace log_test {

// What stderr gets; the levels are REFT_LOG's default again at the end.
class Log : public testing::Test {
 protected:
  static std::string configured(const std::string& spec) {
    testing::internal::CaptureStderr();
    configureLog(spec);
    return testing::internal::GetCapturedStderr();
  }
  void TearDown() override { configureLog(""); }
};

TEST_F(Log, WritesLoggerLevelAndMessage) {
  configureLog("");
  testing::internal::CaptureStderr();
  logWarn("snapshot", "slot ", 1, " is torn");
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "reft.snapshot warn slot 1 is torn\n");
}

TEST_F(Log, WarnsByDefault) {
  EXPECT_EQ(configured(""), "");
  EXPECT_TRUE(logEnabled("agent", LogLevel::kWarn));
  EXPECT_FALSE(logEnabled("agent", LogLevel::kInfo));
}

TEST_F(Log, OneLevelForAllLoggers) {
  EXPECT_EQ(configured("debug"), "");
  EXPECT_TRUE(logEnabled("hang", LogLevel::kDebug));
  EXPECT_FALSE(logEnabled("hang", LogLevel::kTrace));
  EXPECT_EQ(configured("error"), "");
  EXPECT_FALSE(logEnabled("hang", LogLevel::kWarn));
}

TEST_F(Log, EachLoggerHasALevelOfItsOwn) {
  EXPECT_EQ(configured("reft.intercept=trace,reft.snapshot=debug,reft.hang=info,reft.backend=error,"
                       "reft.python=debug,info"),
            "");
  EXPECT_TRUE(logEnabled("intercept", LogLevel::kTrace));
  EXPECT_TRUE(logEnabled("snapshot", LogLevel::kDebug));
  EXPECT_FALSE(logEnabled("snapshot", LogLevel::kTrace));
  EXPECT_TRUE(logEnabled("hang", LogLevel::kInfo));
  EXPECT_FALSE(logEnabled("hang", LogLevel::kDebug));
  EXPECT_FALSE(logEnabled("backend", LogLevel::kWarn));
  EXPECT_TRUE(logEnabled("python", LogLevel::kDebug));
  EXPECT_TRUE(logEnabled("agent", LogLevel::kInfo)) << "the level for all, wherever it stands";
  EXPECT_FALSE(logEnabled("agent", LogLevel::kDebug));
}

int prints = 0;
struct Printer {
  friend std::ostream& operator<<(std::ostream& out, const Printer&) {
    ++prints;
    return out << "printed";
  }
};

TEST_F(Log, ADisabledLineIsNotPutTogether) {
  configureLog("");
  logDebug("snapshot", Printer());
  EXPECT_EQ(prints, 0);
  testing::internal::CaptureStderr();
  logWarn("snapshot", Printer());
  EXPECT_EQ(prints, 1);
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "reft.snapshot warn printed\n");
}

TEST_F(Log, NamesThePartsThatItCannotUse) {
  const std::string said = configured("loud,reft.snapshot=debug,snapshot=info,reft.snapshto=info");
  EXPECT_NE(said.find("'loud,snapshot=info,reft.snapshto=info'"), std::string::npos) << said;
  EXPECT_NE(said.find("loggers: intercept snapshot hang agent backend python"), std::string::npos);
  EXPECT_TRUE(logEnabled("snapshot", LogLevel::kDebug)) << "the rest is used";
  EXPECT_EQ(configured(",,info,"), "");
}

}  // namespace log_test
}  // namespace reft

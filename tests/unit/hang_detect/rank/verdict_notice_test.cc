#include "hang_detect/rank/verdict_notice.h"

#include <sstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace reft {
namespace verdict_notice_test {

using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::Not;

// Lines as a terminal of 80 columns shows them.
size_t shown(const std::string& text) {
  std::istringstream lines(text);
  size_t count = 0;
  for (std::string line; std::getline(lines, line);) {
    count += std::max<size_t>(1, (line.size() + 79) / 80);
  }
  return count;
}

std::string screenOf(int sentences) {
  std::string text = "reft: job demo: hang, user_code (certain)\nculprit: rank 2\n";
  for (int i = 0; i < sentences; ++i) {
    text += "- sentence " + std::to_string(i) + "\n    goes on\n";
  }
  return text + "next: reft stack --rank 2\n";
}

TEST(TerminalText, SaysWhereTheReportIsAndWhatHappens) {
  const std::string text = terminalText(screenOf(2), "/run/v/1.txt", "now: the ranks end");
  EXPECT_THAT(
      text,
      HasSubstr(
          "    goes on\nnext: reft stack --rank 2\nreport: /run/v/1.txt\nnow: the ranks end\n"));
}

TEST(TerminalText, EvidenceMakesRoomAndAdviceStays) {
  const std::string path = "/" + std::string(300, 'd') + "/1.txt";
  const std::string text = terminalText(screenOf(10), path, "now: the ranks end");
  EXPECT_LE(shown(text), 24u);
  EXPECT_THAT(text, HasSubstr("culprit: rank 2\n- sentence 0\n    goes on\n"));
  EXPECT_THAT(text, Not(HasSubstr("sentence 9")));
  EXPECT_THAT(text,
              EndsWith("next: reft stack --rank 2\nreport:\n" + path + "\nnow: the ranks end\n"));
}

TEST(TerminalText, FitsWithoutEvidenceToo) {
  std::string screen = "reft: head\n";
  for (int i = 0; i < 22; ++i) {
    screen += "culprit: rank " + std::to_string(i) + "\n";
  }
  const std::string text = terminalText(screen + "next: look\n", "/run/v/1.txt", "now");
  EXPECT_LE(shown(text), 24u);
  EXPECT_THAT(text, HasSubstr("reft: head\nculprit: rank 0\n"));
  EXPECT_THAT(text, EndsWith("next: look\nreport: /run/v/1.txt\nnow\n"));
}

TEST(TerminalText, WithoutAReportNamesNone) {
  EXPECT_EQ(terminalText("reft: head\nnext: look\n", "", ""), "reft: head\nnext: look\n");
}

TEST(TerminalText, NothingReachesTheTerminalButText) {
  EXPECT_THAT(terminalText("reft: x\n", "/run/\x1b[2J\n/1.txt", ""), Not(HasSubstr("\x1b")));
}

TEST(VerdictNotice, ComesBackFromItsPayload) {
  EXPECT_EQ(verdictNoticeText(verdictNoticeJson("a \"b\"\nc")), "a \"b\"\nc");
}

TEST(VerdictNotice, OfAForeignPayloadIsEmpty) {
  for (const char* payload : {"", "[", "[]", "{}", "{\"text\": 3}", "\xff"}) {
    EXPECT_EQ(verdictNoticeText(payload), "");
  }
  EXPECT_LE(verdictNoticeText(verdictNoticeJson(std::string(100'000, 'x'))).size(), 4096u);
}

}  // namespace verdict_notice_test
}  // namespace reft

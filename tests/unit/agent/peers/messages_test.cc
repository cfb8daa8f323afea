#include "agent/peers/messages.h"

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "hang_detect/evidence/evidence.h"
#include "hang_detect/evidence/evidence_json.h"
#include "hang_detect/stacks/stacks.h"
#include "intercept/base/error.h"

namespace reft::agent {
namespace messages_test {

const std::string kRank =
    R"({"role":"rank","protocol":3,"version":"0.1.0","job":"demo","node":0,"rank":3,"local_rank":1,"world":4,)"
    R"("local_world":2,"pid":7,"incarnation":"00000000000000ff","attempt":2})";

std::string with(const std::string& from, const std::string& to) {
  auto text = kRank;
  return text.replace(text.find(from), from.size(), to);
}

TEST(Hello, OfARankIsReadWhole) {
  const auto hello = parseHello(kRank);
  EXPECT_TRUE(hello.is_rank);
  EXPECT_EQ(hello.rank, 3);
  EXPECT_EQ(hello.local_world, 2);
  EXPECT_EQ(hello.incarnation, 255u);
  EXPECT_EQ(hello.attempt, 2);
}

TEST(Hello, OfAToolNeedsNoRank) {
  EXPECT_FALSE(
      parseHello(R"({"role":"tool","protocol":3,"version":"x","job":"demo","node":0})").is_rank);
}

TEST(Hello, RejectsWhatItIsNot) {
  for (const auto& text :
       {std::string(), std::string("[]"), std::string("{"), with("\"rank\":3", "\"rank\":4"),
        with("\"rank\":3", "\"rank\":-1"), with("\"rank\":3", "\"rank\":1.5"),
        with("\"world\":4", "\"world\":99999999999999999999"),
        with("\"protocol\":3", "\"protocol\":2"), with("00000000000000ff", "xyz"),
        with("00000000000000ff", ""), with("\"pid\":7", "\"pid\":-7"), std::string(1 << 20, '['),
        with("\"local_rank\":1", "\"local_rank\":2"), with("\"job\":\"demo\"", "\"job\":5")}) {
    EXPECT_THROW(parseHello(text), InvalidArgument) << text;
  }
}

TEST(StacksRequest, WithoutRanksMeansAll) {
  EXPECT_TRUE(parseStacksRequest("{}").ranks.empty());
  EXPECT_FALSE(parseStacksRequest("{}").native);
  EXPECT_EQ(parseStacksRequest(R"({"ranks":[1,2]})").ranks, (std::vector<int>{1, 2}));
  EXPECT_THROW(parseStacksRequest(R"({"ranks":["1"]})"), InvalidArgument);
  EXPECT_THROW(parseStacksRequest(R"({"ranks":7})"), InvalidArgument);
}

TEST(StacksRequest, NativeFramesAreOfOneRank) {
  const auto request = parseStacksRequest(R"({"ranks":[3],"native":true})");
  EXPECT_TRUE(request.native);
  EXPECT_EQ(request.ranks, std::vector<int>{3});
  EXPECT_THROW(parseStacksRequest(R"({"native":true})"), InvalidArgument);
  EXPECT_THROW(parseStacksRequest(R"({"ranks":[1,2],"native":true})"), InvalidArgument);
  EXPECT_THROW(parseStacksRequest(R"({"ranks":[1],"native":1})"), InvalidArgument);
}

TEST(Messages, NotesAreArraysOfFourShortStrings) {
  EXPECT_TRUE(parseNotes(R"({"notes":[]})").empty());
  const auto notes = parseNotes(R"({"notes":[["about","where","kind","why"]]})");
  ASSERT_EQ(notes.size(), 1u);
  EXPECT_EQ(notes[0], (Note{"about", "where", "kind", "why"}));
  const std::string entry = R"(["a","b","c","d"])";
  std::string many = entry;
  for (size_t i = 0; i < kMaxNotes; ++i) {
    many += "," + entry;
  }
  const std::string bad[] = {R"({})",
                             R"({"notes":7})",
                             R"({"notes":[7]})",
                             R"({"notes":[["a","b","c"]]})",
                             R"({"notes":[["a","b","c",7]]})",
                             R"({"notes":[["a","b","c",")" + std::string(513, 'x') + R"("]]})",
                             R"({"notes":[)" + many + "]}"};
  for (const auto& text : bad) {
    EXPECT_THROW(parseNotes(text), InvalidArgument) << text;
  }
}

TEST(NodeMessages, TellWhatANodeIsAskedFor) {
  const auto request = parseEvidenceRequest(R"({"id":7,"node":2,"kind":"please"})");
  EXPECT_EQ(request.id, 7u);
  EXPECT_EQ(request.node, 2);
  EXPECT_EQ(request.kind, NodeRequest::kPlease);
  for (const char* bad :
       {"{}", R"({"id":0,"node":2,"kind":"hold"})", R"({"id":7,"node":-1,"kind":"hold"})",
        R"({"id":7,"node":2,"kind":"king"})", R"({"id":7,"node":2,"kind":null})"}) {
    EXPECT_THROW(parseEvidenceRequest(bad), InvalidArgument) << bad;
  }
  EXPECT_EQ(gatherPayload(3, 0.5, NodeRequest::kHold), R"({"id":3,"kind":"hold","seconds":0.5})");
}

TEST(NodeMessages, AnAnswerComesBackAsItWasSent) {
  HangEvidence evidence;
  evidence.now_ns = 99;
  evidence.ranks.resize(2);
  evidence.ranks[1].rank = 5;
  const auto sent =
      nlohmann::json::parse(evidencePayload(7, 1, 42, "boot\"id", evidenceJson(evidence)));
  EXPECT_EQ(sent["id"], 7);
  const auto gathered =
      parseGathered(nlohmann::json{{"id", 3}, {"node", 1}, {"answer", sent["answer"]}}.dump());
  ASSERT_TRUE(gathered.answer);
  EXPECT_EQ(gathered.id, 3u);
  EXPECT_FALSE(gathered.end);
  EXPECT_EQ(gathered.answer->node, 1);
  EXPECT_EQ(gathered.answer->asked_ns, 42);
  EXPECT_EQ(gathered.answer->boot, "boot\"id");
  EXPECT_EQ(gathered.answer->evidence.now_ns, 99);
  EXPECT_EQ(gathered.answer->evidence.ranks.back().rank, 5);
}

TEST(NodeMessages, TheEndSaysWhoIsSilentAndAnAnswerThatIsNoneIsLeftOut) {
  const auto end = parseGathered(R"({"id":3,"silent":[1,4],"error":"no store"})");
  EXPECT_TRUE(end.end);
  EXPECT_EQ(end.silent, (std::vector<int>{1, 4}));
  EXPECT_EQ(end.error, "no store");
  for (const char* none :
       {R"({"id":3,"node":1,"answer":null})", R"({"id":3,"node":1,"answer":{"evidence":7}})",
        R"({"id":3,"node":1,"answer":{}})"}) {
    const auto gathered = parseGathered(none);
    EXPECT_FALSE(gathered.answer || gathered.end) << none;
  }
  for (const char* bad :
       {"[]", R"({"id":3})", R"({"id":3,"silent":[-1],"error":""})", R"({"id":-3,"silent":[]})"}) {
    EXPECT_THROW(parseGathered(bad), InvalidArgument) << bad;
  }
}

TEST(JobId, BecomesADirectoryNameSafely) {
  EXPECT_TRUE(validJobId("run-1.a_B"));
  for (const auto* bad : {"", ".", "..", ".x", "a/b", "a b"}) {
    EXPECT_FALSE(validJobId(bad)) << bad;
  }
  EXPECT_FALSE(validJobId(std::string(129, 'a')));
}

TEST(ErrorPayload, TakesBytesThatAreNotUtf8) {
  EXPECT_NE(errorPayload("\xff\xfe", "h").find("\"hint\":\"h\""), std::string::npos);
}

}  // namespace messages_test
}  // namespace reft::agent

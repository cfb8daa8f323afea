#include "agent/mesh/handshake.h"

#include <gtest/gtest.h>

namespace reft::agent {
namespace handshake_test {

const MeshKey kKey{1, 2, 3};
const Nonce kKeeper{4, 5};
const Nonce kOwner{6, 7};

TEST(MeshHandshake, BothSidesShowTheKeyAndHaveTheSameKeysThen) {
  const auto keeper = openGreeting(greetingOf(kKeeper));
  ASSERT_EQ(keeper, kKeeper);
  const auto owner = openAnswer(kKey, kKeeper, answerOf(kKey, *keeper, kOwner));
  ASSERT_EQ(owner, kOwner);
  EXPECT_TRUE(isProof(kKey, kKeeper, kOwner, proofOf(kKey, kKeeper, *owner)));
  const SessionKeys one = sessionKeysOf(kKey, kKeeper, *owner);
  EXPECT_EQ(one.of_keeper, sessionKeysOf(kKey, *keeper, kOwner).of_keeper);
  EXPECT_NE(one.of_keeper, one.of_owner);
  EXPECT_NE(one.of_keeper, sessionKeysOf(kKey, kKeeper, Nonce{8}).of_keeper);
}

TEST(MeshHandshake, AChangedByteIsRefusedWhereverItIs) {
  const std::string greeting = greetingOf(kKeeper);
  const std::string answer = answerOf(kKey, kKeeper, kOwner);
  const std::string proof = proofOf(kKey, kKeeper, kOwner);
  for (size_t i = 0; i < 12; ++i) {  // magic and version; another nonce is another one
    std::string changed = greeting;
    changed[i] = static_cast<char>(changed[i] ^ 1);
    EXPECT_FALSE(openGreeting(changed)) << i;
  }
  for (size_t i = 0; i < answer.size(); ++i) {
    std::string changed = answer;
    changed[i] = static_cast<char>(changed[i] ^ 1);
    EXPECT_FALSE(openAnswer(kKey, kKeeper, changed)) << i;
  }
  for (size_t i = 0; i < proof.size(); ++i) {
    std::string changed = proof;
    changed[i] = static_cast<char>(changed[i] ^ 1);
    EXPECT_FALSE(isProof(kKey, kKeeper, kOwner, changed)) << i;
  }
}

TEST(MeshHandshake, WhoHasNotTheKeyProvesNothing) {
  const MeshKey other{9};
  EXPECT_FALSE(openAnswer(kKey, kKeeper, answerOf(other, kKeeper, kOwner)));
  EXPECT_FALSE(isProof(kKey, kKeeper, kOwner, proofOf(other, kKeeper, kOwner)));
}

TEST(MeshHandshake, WhatWasHeardBeforeOrSaidByTheOtherSideProvesNothing) {
  const Nonce fresh{10};
  EXPECT_FALSE(openAnswer(kKey, fresh, answerOf(kKey, kKeeper, kOwner)));
  EXPECT_FALSE(isProof(kKey, kKeeper, fresh, proofOf(kKey, kKeeper, kOwner)));
  // The owner's own MAC, sent back.
  const std::string answer = answerOf(kKey, kKeeper, kOwner);
  EXPECT_FALSE(isProof(kKey, kKeeper, kOwner, answer.substr(sizeof(Nonce))));
}

TEST(MeshHandshake, OtherSizesAreRefused) {
  EXPECT_FALSE(openGreeting(""));
  EXPECT_FALSE(openGreeting(greetingOf(kKeeper) + "x"));
  EXPECT_FALSE(openAnswer(kKey, kKeeper, answerOf(kKey, kKeeper, kOwner).substr(1)));
  EXPECT_FALSE(isProof(kKey, kKeeper, kOwner, ""));
  EXPECT_NE(drawNonce(), drawNonce());
}

}  // namespace handshake_test
}  // namespace reft::agent

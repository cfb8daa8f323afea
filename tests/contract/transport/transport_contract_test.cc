#include "tests/contract/transport/transport_contract.h"

#include <gtest/gtest.h>

#include <thread>

#include "tests/contract/transport/in_process_transport.h"

namespace reft {
namespace {

using transport_contract::Case;

class InProcessTransport : public testing::TestWithParam<std::pair<std::string, Case>> {};

TEST_P(InProcessTransport, KeepsThePromise) {
  constexpr int kWorld = 3;
  InProcessHub hub;
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < kWorld; ++rank) {
    ranks.emplace_back([&, rank] {
      const auto transport = hub.transport(rank);
      EXPECT_NO_THROW(GetParam().second(*transport, rank, kWorld));
    });
  }
  for (std::thread& rank : ranks) {
    rank.join();
  }
}

INSTANTIATE_TEST_SUITE_P(Contract, InProcessTransport,
                         testing::ValuesIn(transport_contract::cases()),
                         [](const auto& test) { return test.param.first; });

TEST(InProcessHub, SizesThatDifferAreAnError) {
  InProcessHub hub;
  const auto transport = hub.transport(0);
  std::vector<std::byte> three(3), four(4);
  const auto pending = transport->send(three, 0, 1);
  EXPECT_THROW(transport->receive(four, 0, 1), PeerFailure);
}

TEST(InProcessHub, APeerThatDoesNotComeIsATimeout) {
  InProcessHub hub(std::chrono::milliseconds(20));
  std::vector<std::byte> three(3);
  EXPECT_THROW(hub.transport(0)->receive(three, 1, 1)->wait(), Timeout);
}

}  // namespace
}  // namespace reft

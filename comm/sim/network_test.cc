// The link model: when messages arrive, and what each fault does to one.
#include "evenkeel/comm/sim/network.h"

#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "evenkeel/comm/topology.h"
#include "gtest/gtest.h"

namespace evenkeel::comm {
namespace {

constexpr int kTag = 7;

// Two nodes of two ranks; numbers that make every term of the formula visible.
SimOptions TwoNodes() {
  SimOptions options{.world_size = 4, .topology = *Topology::Blocks(4, 2)};
  options.links = {SimLink{absl::Microseconds(3), 2e9}, SimLink{absl::Microseconds(50), 1e8}};
  options.jitter = 0;
  return options;
}

// Messages of `bytes`, sent one after the other at time 0; when each receive was done, in the order of the receives.
// A message that never came: infinite.
std::vector<absl::Duration> Arrivals(const SimOptions& options, int from, int to, const std::vector<int64_t>& bytes,
                                     std::vector<std::string>* contents = nullptr) {
  Network network(options);
  std::vector<std::string> received;
  std::vector<Transfer> receives(bytes.size());
  std::vector<absl::Duration> times(bytes.size(), absl::InfiniteDuration());
  for (size_t i = 0; i < bytes.size(); ++i) received.emplace_back(static_cast<size_t>(bytes[i]), '?');
  for (size_t i = 0; i < bytes.size(); ++i) {
    network.StartReceive(to, from, kTag + static_cast<int>(i), received[i].data(), bytes[i], &receives[i]);
  }
  for (size_t i = 0; i < bytes.size(); ++i) {
    const std::string data(static_cast<size_t>(bytes[i]), static_cast<char>('a' + i));
    Transfer send;
    network.StartSend(from, to, kTag + static_cast<int>(i), data.data(), bytes[i], &send);
    EXPECT_TRUE(send.done);
  }
  while (network.HasEvents()) {
    network.RunNextEvent();
    for (size_t i = 0; i < bytes.size(); ++i) {
      if (receives[i].done && times[i] == absl::InfiniteDuration()) times[i] = network.now();
    }
  }
  if (contents != nullptr) *contents = received;
  return times;
}

TEST(NetworkTest, AMessageTakesItsBytesOverTheBandwidthAndTheLatencyOfItsLink) {
  const SimOptions options = TwoNodes();
  EXPECT_EQ(Arrivals(options, 0, 1, {1000}), std::vector{absl::Nanoseconds(500) + absl::Microseconds(3)});
  EXPECT_EQ(Arrivals(options, 0, 2, {1000}), std::vector{absl::Microseconds(10) + absl::Microseconds(50)});
  EXPECT_EQ(Arrivals(options, 3, 0, {0}), std::vector{absl::Microseconds(50)});
}

// Latency is paid once, bandwidth by each; a link carries one message at a time, other links go on meanwhile.
TEST(NetworkTest, MessagesOnOneLinkQueueBehindEachOther) {
  EXPECT_EQ(Arrivals(TwoNodes(), 0, 1, {1000, 4000}),
            (std::vector{absl::Nanoseconds(3500), absl::Nanoseconds(500 + 2000 + 3000)}));
  Network network(TwoNodes());
  Transfer sends[2], receives[2];
  std::string data(1000, 'a'), got[2] = {data, data};
  for (const int to : {0, 1}) network.StartReceive(2 + to, 0, kTag, got[to].data(), 1000, &receives[to]);
  for (const int to : {0, 1}) network.StartSend(0, 2 + to, kTag, data.data(), 1000, &sends[to]);
  network.RunNextEvent();
  network.RunNextEvent();
  EXPECT_EQ(network.now(), absl::Microseconds(60));
  EXPECT_TRUE(receives[0].done && receives[1].done);
}

TEST(NetworkTest, JitterStretchesTheLatencyByUpToItsShareAndFollowsTheSeed) {
  SimOptions options = TwoNodes();
  options.jitter = 0.5;
  absl::Duration shortest = absl::InfiniteDuration(), longest = absl::ZeroDuration();
  for (options.seed = 1; options.seed < 200; ++options.seed) {
    const absl::Duration time = Arrivals(options, 0, 1, {0})[0];
    EXPECT_EQ(Arrivals(options, 0, 1, {0})[0], time);
    shortest = std::min(shortest, time);
    longest = std::max(longest, time);
  }
  EXPECT_GE(shortest, absl::Microseconds(3));
  EXPECT_LE(longest, absl::Microseconds(4.5));
  EXPECT_LT(shortest, absl::Microseconds(3.1));
  EXPECT_GT(longest, absl::Microseconds(4.4));
}

// Three messages of 1,000 bytes, 0.5 us apart; a fault of 10 us hits the second.
class NetworkFaultTest : public ::testing::Test {
 protected:
  std::vector<absl::Duration> With(SimFault::Kind kind) {
    SimOptions options = TwoNodes();
    options.faults = {{.kind = kind, .rank = 0, .index = 1, .by = absl::Microseconds(10)}};
    return Arrivals(options, 0, 1, {1000, 1000, 1000}, &contents_);
  }
  std::vector<std::string> contents_;
};

TEST_F(NetworkFaultTest, ADelayedMessageHoldsUpWhatFollows) {
  EXPECT_EQ(With(SimFault::Kind::kDelay),
            (std::vector{absl::Microseconds(3.5), absl::Microseconds(14), absl::Microseconds(14)}));
}

TEST_F(NetworkFaultTest, AReorderedMessageIsOvertaken) {
  EXPECT_EQ(With(SimFault::Kind::kReorder),
            (std::vector{absl::Microseconds(3.5), absl::Microseconds(14), absl::Microseconds(4.5)}));
}

TEST_F(NetworkFaultTest, ADroppedMessageNeverComes) {
  EXPECT_EQ(With(SimFault::Kind::kDrop),
            (std::vector{absl::Microseconds(3.5), absl::InfiniteDuration(), absl::Microseconds(4.5)}));
  EXPECT_EQ(contents_[1], std::string(1000, '?'));
}

TEST_F(NetworkFaultTest, ACorruptedMessageDiffersInOneBit) {
  EXPECT_EQ(With(SimFault::Kind::kCorrupt),
            (std::vector{absl::Microseconds(3.5), absl::Microseconds(4), absl::Microseconds(4.5)}));
  int bits = 0;
  for (const char byte : contents_[1]) bits += __builtin_popcount(static_cast<unsigned char>(byte ^ 'b'));
  EXPECT_EQ(bits, 1);
  EXPECT_EQ(contents_[0], std::string(1000, 'a'));
  EXPECT_EQ(contents_[2], std::string(1000, 'c'));
}

// The second copy waits for a receive of its own.
TEST_F(NetworkFaultTest, ADuplicatedMessageComesAgain) {
  SimOptions options = TwoNodes();
  options.faults = {{.kind = SimFault::Kind::kDuplicate, .rank = 0, .index = 0, .by = absl::Microseconds(10)}};
  Network network(options);
  Transfer send, first, second;
  std::string data = "once", one(4, '?'), two(4, '?');
  network.StartReceive(1, 0, kTag, one.data(), 4, &first);
  network.StartReceive(1, 0, kTag, two.data(), 4, &second);
  network.StartSend(0, 1, kTag, data.data(), 4, &send);
  network.RunNextEvent();
  EXPECT_TRUE(first.done);
  EXPECT_FALSE(second.done);
  network.RunNextEvent();
  EXPECT_TRUE(second.done);
  EXPECT_EQ(network.now(), absl::Nanoseconds(2) + absl::Microseconds(13));
  EXPECT_EQ(one + two, "onceonce");
}

}  // namespace
}  // namespace evenkeel::comm

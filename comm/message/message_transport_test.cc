// What a peer may send in place of its record: the record of another call, or any bytes at all. What a rank that gives
// up may promise.
#include "evenkeel/comm/message/message_transport.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "evenkeel/comm/fingerprint.h"
#include "evenkeel/comm/host_communicator.h"
#include "evenkeel/comm/message/mailroom.h"
#include "evenkeel/comm/message/wire.h"
#include "evenkeel/comm/topology.h"
#include "evenkeel/runtime/base/error_context.h"
#include "evenkeel/runtime/base/philox.h"
#include "evenkeel/runtime/base/status_macros.h"
#include "evenkeel/runtime/base/status_matchers.h"
#include "evenkeel/runtime/device/host_device.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel::comm {
namespace {

using ::evenkeel::testutil::StatusIs;
using ::testing::HasSubstr;

// Rank 0 of two. Rank 1 answers every message with what `answer` makes of it: what this rank sends is what a peer in
// the same call would send.
class EchoWire final : public Wire {
 public:
  std::function<std::string(std::string)> answer = [](std::string bytes) { return bytes; };
  int64_t sends_that_end =
      std::numeric_limits<int64_t>::max();  // the peer answers the others too, but never takes them
  std::vector<std::string> control;         // messages sent beside the calls

  int rank() const override { return 0; }
  int size() const override { return 2; }
  absl::Duration Now() override { return now_; }
  absl::Status StartSend(int, int tag, const void* data, int64_t bytes, Transfer* transfer) override {
    *transfer = Transfer();
    const std::string sent(static_cast<const char*>(data), bytes);
    if (tag == kControlTag) {
      control.push_back(sent);
      return absl::OkStatus();
    }
    transfer->done = sends_that_end-- > 0;
    Answer(tag, answer(sent));
    return absl::OkStatus();
  }
  absl::Status StartReceive(int, int tag, void* data, int64_t capacity, Transfer* transfer) override {
    *transfer = Transfer();
    transfer->done = false;
    posted_.push_back({tag, data, capacity, transfer});
    return absl::OkStatus();
  }
  absl::Status Test(absl::Span<Transfer* const>) override { return absl::OkStatus(); }
  bool Cancel(Transfer* transfer) override {
    std::erase_if(posted_, [transfer](const Posted& p) { return p.transfer == transfer; });
    transfer->done = true;
    return true;
  }
  bool Pause(const PauseHint& hint) override {
    now_ = hint.until;
    return true;
  }
  PeerHealth Health(int, bool) override { return {}; }
  absl::Status status() const override { return absl::OkStatus(); }
  void Condemn(const absl::Status&) override {}

  // A message of rank 1, into the receive that waits for its tag.
  void Answer(int tag, const std::string& bytes) {
    for (size_t i = 0; i < posted_.size(); ++i) {
      const Posted p = posted_[i];
      if (p.tag != tag) continue;
      posted_.erase(posted_.begin() + static_cast<std::ptrdiff_t>(i));
      p.transfer->bytes = static_cast<int64_t>(bytes.size()) <= p.capacity ? static_cast<int64_t>(bytes.size()) : -1;
      if (p.transfer->bytes > 0) std::memcpy(p.data, bytes.data(), bytes.size());
      p.transfer->done = true;
      return;
    }
  }

 private:
  struct Posted {
    int tag;
    void* data;
    int64_t capacity;
    Transfer* transfer;
  };
  absl::Duration now_ = absl::ZeroDuration();
  std::vector<Posted> posted_;
};

// A group of two over the echo, one barrier behind it.
struct Rig {
  explicit Rig(const MessageOptions& options = {}) {
    const Group group{.axis = Axis::kWorld, .name = "world", .ranks = {0, 1}};
    auto transport =
        CreateMessageTransport(&wire, &mailroom, options, ScratchMemory::Heap(), group, 0, /*epoch=*/7, {0, 0});
    communicator = HostCommunicator::Create(
        {.group = group, .rank = 0, .epoch = 7, .ledger = &ledger, .topology = &topology, .deadline = absl::Seconds(1)},
        std::move(transport));
    EK_CHECK_OK(communicator->Barrier(*stream));
  }
  // An exchange of two elements each way while the peer answers so.
  absl::Status Exchange(std::function<std::string(std::string)> answer) {
    wire.answer = std::move(answer);
    const float sent[4] = {1, 2, 3, 4};
    const absl::Status status = communicator->AllToAll(ConstTensorView(sent, DType::kF32, Shape({4})),
                                                       TensorView(received, DType::kF32, Shape({4})), *stream);
    EXPECT_TRUE(status.ok() || std::count(received, received + 4, -1.0f) == 4) << "a buffer was touched";
    return status;
  }

  EchoWire wire;
  Mailroom mailroom{&wire};
  ByteLedger ledger;
  Topology topology = Topology::SingleNode(2);
  std::unique_ptr<HostDevice> device = HostDevice::Create();
  std::unique_ptr<Stream> stream = *device->CreateStream("comm");
  std::unique_ptr<Communicator> communicator;
  float received[4] = {-1, -1, -1, -1};
};

TEST(MessageTransportTest, AgreesWithAnEcho) {
  Rig rig;
  EXPECT_OK(rig.Exchange([](std::string bytes) { return bytes; }));
  EXPECT_THAT(rig.received, ::testing::ElementsAre(1, 2, 3, 4));
}

// A record that belongs to another call, sealed and whole: its header gives it away.
TEST(MessageTransportTest, C20_RecordOfAnotherCallIsRefused) {
  const std::pair<std::function<void(Fingerprint&)>, const char*> cases[] = {
      {[](Fingerprint& f) { f.operation = static_cast<uint8_t>(Operation::kBarrier); }, "operations differ"},
      {[](Fingerprint& f) { f.sequence -= 1; }, "sequence numbers differ"},
      {[](Fingerprint& f) { f.sequence += 65536; }, "sequence numbers differ"},  // the counter of the tag came round
      {[](Fingerprint& f) { f.epoch = 7 + 4095; }, "epochs differ"},             // the channel came round
      {[](Fingerprint& f) { f.group ^= 1; }, "groups differ"},
  };
  for (const auto& [change, what] : cases) {
    Rig rig;
    const absl::Status status = rig.Exchange([&change = change](std::string bytes) {
      Fingerprint f;
      std::memcpy(&f, bytes.data(), sizeof(f));
      change(f);
      f = SealFingerprint(f);
      std::memcpy(bytes.data(), &f, sizeof(f));
      return bytes;
    });
    EXPECT_THAT(status, StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr(what)));
    EXPECT_EQ(GetErrorContext(status)->findings.size(), 2u);
  }
}

// A piece that is only under way when its sender gives up needs that sender to arrive, and it helps no more: a receiver
// that still counted on it would wait until the sender is gone, and then name the sender.
TEST(MessageTransportTest, NoticePromisesPiecesWhoseSendingHasEnded) {
  constexpr int64_t kPieces = 10, kPieceFloats = 16;
  for (const int64_t ended : {0, 1, 3, 9}) {
    Rig rig({.eager_bytes = 0, .piece_bytes = 64, .window = 4});
    rig.wire.sends_that_end = 1 + ended;  // the record
    const std::vector<float> sent(2 * kPieces * kPieceFloats, 1.0f);
    std::vector<float> received(sent.size());
    const Shape shape({static_cast<int64_t>(sent.size())});
    const absl::Status status = rig.communicator->AllToAll(
        ConstTensorView(sent.data(), DType::kF32, shape), TensorView(received.data(), DType::kF32, shape), *rig.stream);
    EXPECT_THAT(status, StatusIs(absl::StatusCode::kDeadlineExceeded, HasSubstr("payload")));
    ASSERT_GE(rig.wire.control.size(), 1u);
    int64_t serial = 0;
    const absl::StatusOr<ControlMessage> notice = DecodeControl(rig.wire.control.back(), &serial);
    ASSERT_OK(notice);
    EXPECT_EQ(notice->kind, ControlMessage::Kind::kAbort);
    EXPECT_EQ(notice->b, ended);
  }
}

// Any bytes, any length, any header fields: an error that names the peer, no memory beyond what was posted.
TEST(MessageTransportTest, C27_GarbageInPlaceOfARecord) {
  const PhiloxStream random(PhiloxKey(27));
  for (uint64_t run = 0; run < 2000; ++run) {
    Rig rig;
    const absl::Status status = rig.Exchange([&random, run](std::string bytes) {
      const uint64_t at = run * 8192;
      switch (random.Below(at, 4)) {
        case 0:  // noise
          bytes.resize(random.Below(at + 1, 4097));
          for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<char>(random.Below(at + 2 + i, 256));
          break;
        case 1:  // cut
          bytes.resize(random.Below(at + 1, bytes.size()));
          break;
        case 2:  // one bit
          bytes[random.Below(at + 1, bytes.size())] ^= static_cast<char>(1 << random.Below(at + 2, 8));
          break;
        default:  // a length from outer space
          const auto huge = static_cast<uint32_t>(0x80000000u + random.Below(at + 1, 0x7fffffffu));
          std::memcpy(bytes.data() + (random.Below(at + 2, 2) == 0 ? 64 : 68), &huge, sizeof(huge));
      }
      return bytes;
    });
    EXPECT_FALSE(status.ok()) << "run " << run;
    const auto context = GetErrorContext(status);
    ASSERT_TRUE(context.has_value()) << status;
    ASSERT_FALSE(context->findings.empty()) << status;
    EXPECT_EQ(context->findings[0].rank, 1) << status;
  }
}

// The same for the messages beside the calls: dropped, counted, and what comes after them is understood.
TEST(MessageTransportTest, C27_GarbageInPlaceOfAControlMessage) {
  EchoWire wire;
  Mailroom mailroom(&wire);
  const PhiloxStream random(PhiloxKey(28));
  constexpr int kMessages = 1000;
  for (uint64_t i = 0; i < kMessages; ++i) {
    std::string bytes(random.Below(8192 * i, 4097), '\0');
    for (size_t b = 0; b < bytes.size(); ++b) bytes[b] = static_cast<char>(random.Below(8192 * i + b + 1, 256));
    wire.Answer(kControlTag, bytes);
    mailroom.Poll();
  }
  EXPECT_EQ(mailroom.num_dropped(), kMessages);
  EXPECT_FALSE(mailroom.SaidGoodbye(1));
  wire.Answer(kControlTag, EncodeControl({.kind = ControlMessage::Kind::kGoodbye}, /*serial=*/0));
  mailroom.Poll();
  EXPECT_TRUE(mailroom.SaidGoodbye(1));
  EXPECT_EQ(mailroom.num_dropped(), kMessages);
}

}  // namespace
}  // namespace evenkeel::comm

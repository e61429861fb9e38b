// Memory that ranks lend each other: a lender whose limit has passed does not get it back while a peer reads a piece.
#include <atomic>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/synchronization/notification.h"
#include "absl/time/time.h"
#include "evenkeel/comm/in_process_group.h"
#include "evenkeel/comm/in_process_transport.h"
#include "evenkeel/comm/rendezvous.h"
#include "evenkeel/runtime/base/status_matchers.h"
#include "gtest/gtest.h"

namespace evenkeel::comm {
namespace {

class Host final : public InProcessHost {
 public:
  Rendezvous::Outcome Sleep(InProcessGroup* group, uint64_t phase, const Call&, int, int64_t until_ns) override {
    return group->rendezvous().Wait(phase, until_ns);
  }
  void Release(std::shared_ptr<InProcessGroup> group) override { group.reset(); }
};

// Rank 1 is in the middle of a piece of rank 0's memory when rank 0's limit passes. As long as it reads, rank 0's call
// must not return. What a call that did return would do is then given time: the test can only miss it, not invent it.
TEST(InProcessLendingTest, CallOfALenderReturnsAfterThePieceThatIsBeingRead) {
  constexpr int64_t kBytes = 64 << 10;
  Host host;
  const Group group{.axis = Axis::kWorld, .name = "world", .ranks = {0, 1}};
  const auto shared =
      std::make_shared<InProcessGroup>(group, /*epoch=*/1, WaitPolicy{}, /*eager_bytes=*/0, ScratchMemory::Heap());
  std::atomic<bool> returned{false};
  bool returned_while_reading = false;
  absl::Notification reads;

  const auto run = [&](int rank, absl::Duration limit, const CombineFn& combine) {
    const auto transport = CreateInProcessTransport(&host, shared, rank, rank, nullptr);
    const std::vector<char> lent(2 * kBytes, static_cast<char>(rank + 1));
    const SendSpan sends[2] = {{lent.data(), kBytes}, {lent.data() + kBytes, kBytes}};
    const ReceiveSpan receives[2] = {{nullptr, kBytes}, {nullptr, kBytes}};
    Phase phase;
    phase.sends = sends;
    phase.receives = receives;
    phase.combine = &combine;
    phase.block_bytes = kBytes;
    const Call call{.operation = Operation::kReduceScatter, .sequence = 0, .limit = limit};
    Agreement agreement;
    absl::Status status = transport->Agree(call, {.first = &phase}, &agreement);
    if (status.ok()) status = transport->Exchange(call, phase);
    if (rank == 0) returned.store(true);
    return status;
  };

  absl::Status of_lender, of_reader;
  std::thread reader([&] {
    const auto read = [&](int64_t, int64_t, absl::Span<const void* const>) {
      reads.Notify();
      while (!shared->rendezvous().is_broken()) std::this_thread::yield();  // rank 0's limit has passed
      for (int turn = 0; turn < 20'000 && !returned.load(); ++turn) std::this_thread::yield();
      returned_while_reading = returned.load();
    };
    of_reader = run(1, absl::Seconds(60), CombineFn(read));
  });
  const auto wait_for_reader = [&](int64_t, int64_t, absl::Span<const void* const>) { reads.WaitForNotification(); };
  of_lender = run(0, absl::Milliseconds(500), CombineFn(wait_for_reader));
  reader.join();
  EXPECT_FALSE(returned_while_reading);
  EXPECT_TRUE(absl::IsDeadlineExceeded(of_lender)) << of_lender;
  EXPECT_FALSE(of_reader.ok());
}

}  // namespace
}  // namespace evenkeel::comm

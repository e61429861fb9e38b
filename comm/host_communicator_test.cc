// Every field of the fingerprint in which one rank may differ, on its way through a whole call: the same error on all
// ranks, no buffer changed, and a new group works.
#include "evenkeel/comm/host_communicator.h"

#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "evenkeel/comm/byte_ledger.h"
#include "evenkeel/comm/fingerprint.h"
#include "evenkeel/comm/in_process_group.h"
#include "evenkeel/comm/in_process_transport.h"
#include "evenkeel/comm/rendezvous.h"
#include "evenkeel/comm/scratch_memory.h"
#include "evenkeel/comm/testing/guarded_buffer.h"
#include "evenkeel/comm/testing/run_ranks.h"
#include "evenkeel/comm/topology.h"
#include "evenkeel/comm/transport.h"
#include "evenkeel/runtime/base/error_context.h"
#include "evenkeel/runtime/base/status_macros.h"
#include "evenkeel/runtime/base/status_matchers.h"
#include "evenkeel/runtime/device/host_device.h"
#include "evenkeel/runtime/tensor/dtype.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel::comm {
namespace {

using ::evenkeel::testutil::StatusIs;
using ::testing::Contains;
using ::testing::HasSubstr;

// A world that only waits.
class WaitingHost final : public InProcessHost {
 public:
  Rendezvous::Outcome Sleep(InProcessGroup* group, uint64_t phase, const Call&, int, int64_t until_ns) override {
    return group->rendezvous().Wait(phase, until_ns);
  }
  void Release(std::shared_ptr<InProcessGroup> group) override { group.reset(); }
};

using Forgery = std::function<void(Fingerprint*)>;

// Tells the peers something else than the communicator above it wanted to.
class ForgingTransport final : public Transport {
 public:
  ForgingTransport(std::unique_ptr<Transport> inner, Forgery forge)
      : inner_(std::move(inner)), forge_(std::move(forge)) {}

  const Group& group() const override { return inner_->group(); }
  int rank() const override { return inner_->rank(); }
  int64_t epoch() const override { return inner_->epoch(); }
  absl::Status Reserve(bool combines) override { return inner_->Reserve(combines); }
  absl::Status Agree(const Call& call, const Posting& posting, Agreement* agreement) override {
    Posting forged = posting;
    if (forge_ != nullptr) forge_(&forged.fingerprint);
    return inner_->Agree(call, forged, agreement);
  }
  absl::Status Exchange(const Call& call, const Phase& phase) override { return inner_->Exchange(call, phase); }
  absl::StatusOr<Transport*> Pair(int peer) override { return inner_->Pair(peer); }
  void Abort(const absl::Status& cause) override { inner_->Abort(cause); }

 private:
  const std::unique_ptr<Transport> inner_;
  const Forgery forge_;
};

// One rank's part: a sum of n values in a group whose rank `odd` forges its record.
absl::Status SumOnce(WaitingHost* host, const std::shared_ptr<InProcessGroup>& shared, int rank,
                     const Forgery& forgery) {
  constexpr int64_t kN = 40;
  const Topology topology = Topology::SingleNode(shared->size());
  ByteLedger ledger;
  const auto device = HostDevice::Create();
  EK_ASSIGN_OR_RETURN(const auto stream, device->CreateStream("comm"));
  const auto communicator = HostCommunicator::Create(
      {.group = shared->group(), .rank = rank, .epoch = shared->epoch(), .ledger = &ledger, .topology = &topology},
      std::make_unique<ForgingTransport>(CreateInProcessTransport(host, shared, rank, rank, nullptr), forgery));
  GuardedBuffer send(kN * 4), recv(kN * 4);
  send.Write(UniqueData(DType::kF32, rank, 1, kN));
  recv.Write(UniqueData(DType::kF32, rank, 2, kN));
  send.Remember();
  recv.Remember();
  const absl::Status status =
      communicator->AllReduce(send.View(DType::kF32), recv.View(DType::kF32), ReduceOp::kSum, *stream);
  if (!status.ok()) {
    EK_RETURN_IF_ERROR(send.CheckUntouched("send"));
    EK_RETURN_IF_ERROR(recv.CheckUntouched("recv"));
    if (ledger.Snapshot().bytes(Axis::kWorld) != 0) return absl::InternalError("payload was booked");
  }
  return status;
}

std::vector<absl::Status> SumOnAll(int size, int64_t epoch, int odd, const Forgery& forgery, int64_t eager_bytes) {
  WaitingHost host;
  const auto shared =
      std::make_shared<InProcessGroup>(WorldGroup(size), epoch, WaitPolicy{}, eager_bytes, ScratchMemory::Heap());
  std::vector<absl::Status> statuses(size);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back(
        [&, rank] { statuses[rank] = SumOnce(&host, shared, rank, rank == odd ? forgery : Forgery()); });
  }
  for (std::thread& thread : threads) thread.join();
  return statuses;
}

struct Field {
  const char* name;
  void (*change)(Fingerprint*);
  const char* what;
  bool sealed = true;
  absl::StatusCode code = absl::StatusCode::kFailedPrecondition;
};

const Field kFields[] = {
    {"protocol", [](Fingerprint* f) { f->protocol += 1; }, "a fingerprint cannot be read", false},
    {"checksum", [](Fingerprint* f) { f->checksum ^= 4; }, "a fingerprint cannot be read", false,
     absl::StatusCode::kDataLoss},
    {"operation", [](Fingerprint* f) { f->operation = 8; }, "operations differ"},
    {"unknown operation", [](Fingerprint* f) { f->operation = 200; }, "a fingerprint cannot be read"},
    {"dtype", [](Fingerprint* f) { f->dtype = static_cast<uint8_t>(DType::kI32); }, "dtypes differ"},
    {"operator", [](Fingerprint* f) { f->reduce_op = 1; }, "reduction operators differ"},
    {"form", [](Fingerprint* f) { f->flags |= kFlagTwoLevel; }, "forms differ"},
    {"root", [](Fingerprint* f) { f->root = 1; }, "roots differ"},
    {"status", [](Fingerprint* f) { f->local_status = 3; }, "a rank refuses the call"},
    {"memory", [](Fingerprint* f) { f->local_status = 8; }, "has no memory", true,
     absl::StatusCode::kResourceExhausted},
    {"group", [](Fingerprint* f) { f->group ^= 1; }, "groups differ"},
    {"epoch", [](Fingerprint* f) { f->epoch += 1; }, "epochs differ"},
    {"sequence", [](Fingerprint* f) { f->sequence += 1; }, "sequence numbers differ"},
    {"count", [](Fingerprint* f) { f->count -= 1; }, "element counts differ"},
    {"counts", [](Fingerprint* f) { f->counts_digest ^= 1; }, "counts vectors differ"},
    {"deadline", [](Fingerprint* f) { f->deadline_ms += 1; }, "deadlines differ"},
};

TEST(HostCommunicatorTest, EveryFieldInWhichOneRankDiffersIsTheSameErrorEverywhere) {
  for (const int64_t eager_bytes : {int64_t{0}, int64_t{8192}}) {
    for (const Field& field : kFields) {
      for (const int size : {2, 3, 4}) {
        for (int odd = 0; odd < size; ++odd) {
          SCOPED_TRACE(absl::StrCat(field.name, ", odd rank ", odd, " of ", size));
          const auto forge = [&field](Fingerprint* f) {
            field.change(f);
            if (field.sealed) *f = SealFingerprint(*f);
          };
          const auto statuses = SumOnAll(size, 5, odd, forge, eager_bytes);
          for (const absl::Status& status : statuses) {
            EXPECT_THAT(status, StatusIs(field.code, HasSubstr(field.what)));
            const auto context = GetErrorContext(status);
            ASSERT_TRUE(context.has_value());
            EXPECT_EQ(context->findings, GetErrorContext(statuses[0])->findings);
            EXPECT_THAT(context->findings, Contains(::testing::Field(&RankFinding::rank, odd)));
          }
          for (const absl::Status& status : SumOnAll(size, 6, odd, nullptr, eager_bytes)) EXPECT_OK(status);
        }
      }
    }
  }
}

// What may differ: whether the call is in place.
TEST(HostCommunicatorTest, InPlaceIsARanksOwnMatter) {
  const auto forge = [](Fingerprint* f) {
    f->flags |= kFlagInPlace;
    *f = SealFingerprint(*f);
  };
  for (const absl::Status& status : SumOnAll(3, 5, 1, forge, 0)) EXPECT_OK(status);
}

}  // namespace
}  // namespace evenkeel::comm

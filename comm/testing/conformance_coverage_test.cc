// That the conformance suite calls what it says: every operation with every dtype, operator, extent and placement. A
// list that loses an entry turns this test red.
#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "evenkeel/comm/fingerprint.h"
#include "evenkeel/comm/in_process.h"
#include "evenkeel/comm/reduce_op.h"
#include "evenkeel/comm/reduction.h"
#include "evenkeel/comm/testing/conformance.h"
#include "evenkeel/comm/testing/observer.h"
#include "evenkeel/comm/testing/run_ranks.h"
#include "evenkeel/runtime/base/status_matchers.h"
#include "evenkeel/runtime/device/device.h"
#include "evenkeel/runtime/tensor/dtype.h"
#include "gtest/gtest.h"

namespace evenkeel::comm {
namespace {

constexpr int64_t kLarge = 600;
// none, one, odd, no multiple of anything, large
constexpr int64_t kExtents[] = {0, 1, 7, 257, kLarge};

bool Reduces(Operation operation) {
  return operation == Operation::kAllReduce || operation == Operation::kReduceScatter ||
         operation == Operation::kReduceScatterV;
}
bool HasCounts(Operation operation) {
  return operation == Operation::kAllGatherV || operation == Operation::kReduceScatterV ||
         operation == Operation::kAllToAllV;
}
bool HasInPlace(Operation operation) {
  return Reduces(operation) || operation == Operation::kAllGather || operation == Operation::kAllGatherV;
}

// The calls of one kind, by all ranks of a world.
struct Calls {
  std::set<int64_t> extents;  // of one block; of a call with counts: of all that the rank sends or receives
  std::set<int64_t> in_place;
  int64_t number = 0;
};

// Operation, dtype, operator (or -1).
using Kind = std::tuple<Operation, DType, int>;

class Coverage final : public CallObserver {
 public:
  absl::Status Around(const CallInfo& info, Stream&, absl::FunctionRef<absl::Status()> call) override {
    if (info.dtype.has_value()) Note(info);
    if (!info.grouped.empty()) NoteGrouped(info);
    return call();
  }

  std::map<Kind, Calls> Take() {
    absl::MutexLock lock(&mutex_);
    return std::move(calls_);
  }
  std::set<Operation> grouped() const {
    absl::MutexLock lock(&mutex_);
    return grouped_;
  }

 private:
  void NoteGrouped(const CallInfo& info) {
    absl::MutexLock lock(&mutex_);
    for (const CallInfo& part : info.grouped) grouped_.insert(part.operation);
  }
  void Note(const CallInfo& info) {
    const int op = info.reduce_op.has_value() ? static_cast<int>(*info.reduce_op) : -1;
    int64_t extent = info.operation == Operation::kRecv ? info.recv_elements : info.send_elements;
    if (info.operation == Operation::kReduceScatter) extent = info.recv_elements;
    if (info.operation == Operation::kAllToAll) extent /= info.group->size();
    absl::MutexLock lock(&mutex_);
    Calls& calls = calls_[{info.operation, *info.dtype, op}];
    calls.extents.insert(extent);
    ++calls.number;
    const auto* const send = static_cast<const std::byte*>(info.send.raw());
    const auto* const recv = static_cast<const std::byte*>(info.recv.raw());
    const bool inside = send != nullptr && recv != nullptr && send < recv + info.recv.num_bytes() &&
                        recv < send + info.send.num_bytes();
    if (inside) calls.in_place.insert(extent);
  }

  mutable absl::Mutex mutex_;
  std::map<Kind, Calls> calls_ ABSL_GUARDED_BY(mutex_);
  std::set<Operation> grouped_ ABSL_GUARDED_BY(mutex_);
};

void CheckKind(const Kind& kind, const Calls& calls) {
  const Operation operation = std::get<0>(kind);
  if (HasCounts(operation)) {
    // Zero rows, and rows of about every extent: the counts are irregular.
    EXPECT_EQ(calls.extents.count(0), 1u);
    EXPECT_GE(calls.extents.size(), 4u);
    EXPECT_GE(*calls.extents.rbegin(), kLarge / 2);
    if (HasInPlace(operation)) {
      EXPECT_GE(calls.in_place.size(), 2u);
    }
    return;
  }
  for (const int64_t extent : kExtents) {
    EXPECT_EQ(calls.extents.count(extent), 1u) << extent;
    if (HasInPlace(operation) && extent > 0) {
      EXPECT_EQ(calls.in_place.count(extent), 1u) << extent << " in place";
    }
  }
}

// Every kind of call that a world of `ranks` can make is among `calls`.
void CheckAll(const std::map<Kind, Calls>& calls, int ranks) {
  for (int number = 0; number < kNumOperations; ++number) {
    const auto operation = static_cast<Operation>(number);
    if (operation == Operation::kBarrier || operation == Operation::kCreateGroup) continue;
    if (operation == Operation::kGrouped) continue;
    if (ranks == 1 && (operation == Operation::kSend || operation == Operation::kRecv)) continue;
    for (const DType dtype : kAllDTypes) {
      for (const ReduceOp op : kAllReduceOps) {
        if (Reduces(operation) ? !CheckReduction(dtype, op).ok() : op != ReduceOp::kSum) continue;
        const Kind kind = {operation, dtype, Reduces(operation) ? static_cast<int>(op) : -1};
        SCOPED_TRACE(absl::StrCat(OperationName(operation), " ", DTypeName(dtype), " ", ReduceOpName(op), " on ", ranks,
                                  " ranks"));
        const auto found = calls.find(kind);
        ASSERT_NE(found, calls.end());
        CheckKind(kind, found->second);
      }
    }
  }
}

TEST(ConformanceCoverageTest, EveryOperationDTypeOperatorExtentAndPlacementIsCalled) {
  for (int ranks = 1; ranks <= 8; ++ranks) {
    ASSERT_OK_AND_ASSIGN(const auto world, InProcessWorld::Create({.world_size = ranks}));
    Coverage coverage;
    for (const ConformanceCase& c : OperationCases({.large = kLarge})) {
      // In a case of its own: groups of one make calls of every extent by themselves.
      if (c.name == "GroupsOfOneBookNothing" && ranks > 1) continue;
      const auto statuses =
          RunRanks(*world, [&](Backend& backend) { return c.run(*ObserveBackend(&backend, &coverage)); });
      EXPECT_OK(FirstFailure(statuses)) << c.name;
    }
    const std::map<Kind, Calls> calls = coverage.Take();
    CheckAll(calls, ranks);
    // All but barrier, send, recv and the two that are no collectives.
    EXPECT_EQ(coverage.grouped().size(), kNumOperations - 5u) << "kinds of grouped calls on " << ranks << " ranks";
    int64_t number = 0;
    for (const auto& [kind, of_kind] : calls) number += of_kind.number;
    RecordProperty(absl::StrCat("calls_on_", ranks, "_ranks"), absl::StrCat(number));
    if (HasFailure()) break;
  }
}

}  // namespace
}  // namespace evenkeel::comm

// A backend whose collectives can be tampered with: planted faults for tests of whole runs.
//
//   HookedBackend hooked(real, [&](const HookedCall& call) {
//     if (call.operation == "all_to_all" && call.group.name == "ep" && call.number == 7) Swap two rows of
//     call.received;
//   });
#ifndef EVENKEEL_TESTING_HOOKED_BACKEND_H_
#define EVENKEEL_TESTING_HOOKED_BACKEND_H_

#include <cstdint>
#include <functional>
#include <memory>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "evenkeel/comm/communicator.h"

namespace evenkeel::testutil {

// One finished collective of one rank.
struct HookedCall {
  absl::string_view operation;  // "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "all_to_all_v"
  const comm::Group& group;
  int rank = 0;        // world rank
  int64_t number = 0;  // 0, 1, ..: calls of this operation on this group
  TensorView received;
};
using CommHook = std::function<void(const HookedCall&)>;

// Forwards to `real`, which it does not own, and calls the hook with what each collective has brought. Inline streams
// only. Each rank has its own; as thread-safe as the hook.
class HookedBackend final : public comm::Backend {
 public:
  HookedBackend(comm::Backend& real, CommHook hook);

  absl::string_view name() const override { return real_.name(); }
  int rank() const override { return real_.rank(); }
  int size() const override { return real_.size(); }
  const comm::Topology& topology() const override { return real_.topology(); }
  comm::ByteLedger& ledger() override { return real_.ledger(); }
  absl::StatusOr<std::unique_ptr<comm::Communicator>> CreateGroup(const comm::Group& group) override;

 private:
  comm::Backend& real_;
  const CommHook hook_;
};

}  // namespace evenkeel::testutil

#endif  // EVENKEEL_TESTING_HOOKED_BACKEND_H_

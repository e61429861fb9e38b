// Do replicas still hold the same bits? Digests are compared between ranks: of gathered units over the group they were
// gathered from, of replicated units over their group, of TP-replicated parameters over the lanes.
//
//   check.Begin();                                  // digests of this step start empty
//   check.Add(unit, views, compute_stream);         // when a unit has been gathered
//   EK_RETURN_IF_ERROR(check.Compare(&found));
//
// A difference is DataLoss naming unit or parameter and the odd ranks (against the first value that most ranks have).
#ifndef EVENKEEL_ZERO3_REPLICA_CHECK_H_
#define EVENKEEL_ZERO3_REPLICA_CHECK_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/runtime/device/device.h"
#include "evenkeel/zero3/model_types.h"
#include "evenkeel/zero3/unit.h"

namespace evenkeel::zero3 {

// Not thread-safe. Everything passed in outlives it.
class ReplicaCheck {
 public:
  ReplicaCheck(std::vector<Unit*> units, const ModelGroups& groups, Device* device, Stream* compute, Stream* comm);

  void Begin();
  bool wants(int unit) const { return !taken_[static_cast<size_t>(unit)]; }
  // Enqueues the digest of a gathered unit; the views' memory stays until the stream has passed.
  absl::Status Add(int unit, absl::Span<const ConstTensorView> views, Stream& stream);
  // Both streams are idle. Collective over dp, edp and tp. `found`: OK, or the first difference this rank can see.
  absl::Status Compare(absl::Status* found);

 private:
  struct Entry {
    std::string name;
    uint64_t digest = 0;
  };
  absl::Status CompareOver(comm::Communicator* group, const std::vector<Entry>& entries, Stream& stream,
                           absl::Status* found);
  std::vector<Entry> UnitEntries(Family family) const;
  std::vector<Entry> LaneEntries() const;

  const std::vector<Unit*> units_;
  const ModelGroups groups_;
  Device* const device_;
  Stream* const compute_;
  Stream* const comm_;
  std::vector<bool> taken_;
  std::vector<uint64_t> gathered_;
};

}  // namespace evenkeel::zero3

#endif  // EVENKEEL_ZERO3_REPLICA_CHECK_H_

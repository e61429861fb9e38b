// Groups in the making: which ranks of a process have come to which group, and why one will not come about.
//
// Internal to in_process.cc. Nothing here locks: the owner's mutex guards a Gatherings and every Gathering of it.
#ifndef EVENKEEL_COMM_IN_PROCESS_GATHERING_H_
#define EVENKEEL_COMM_IN_PROCESS_GATHERING_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "evenkeel/comm/in_process_group.h"
#include "evenkeel/comm/mesh.h"
#include "evenkeel/runtime/base/error_context.h"

namespace evenkeel::comm {

// "tp [0,1]".
std::string GroupText(const Group& group);

// Ranks that come together to make one group.
struct Gathering {
  explicit Gathering(const Group& wanted) : group(wanted), joined(wanted.size(), false) {}
  // World ranks that have not joined.
  std::vector<int> Missing() const;

  const Group group;
  std::vector<bool> joined;  // by group rank
  int num_joined = 0;
  bool done = false;
  absl::StatusCode code = absl::StatusCode::kOk;  // with `what` and `findings`, when it failed
  std::string what;
  std::vector<RankFinding> findings;
  absl::Duration elapsed = absl::ZeroDuration();  // set when it ran out of time
  std::shared_ptr<InProcessGroup> result;
  absl::CondVar changed;  // signalled when done
};

// What the call of `rank` returns for a gathering that failed; `limit` is the call's deadline.
absl::Status GatheringError(const Gathering& gathering, int rank, absl::Duration limit);

// Those that are not done.
class Gatherings {
 public:
  using HasLeft = absl::FunctionRef<bool(int world_rank)>;

  // The gathering of `group` in which `rank` is now counted: a pending one, or a new one.
  std::shared_ptr<Gathering> Join(const Group& group, int rank);
  // Ends those that will wait for ever because `rank` makes `group` instead; whether there were any.
  bool RefuseConflicts(const Group& group, int rank);
  // Ends `gathering`, unless it is done.
  void End(Gathering* gathering, absl::StatusCode code, std::string what, std::vector<RankFinding> findings);
  // Ends `gathering` when a member has left without joining it.
  void CheckLeft(Gathering* gathering, HasLeft has_left);
  void CheckAllLeft(HasLeft has_left);

 private:
  std::vector<std::shared_ptr<Gathering>> pending_;
};

}  // namespace evenkeel::comm

#endif  // EVENKEEL_COMM_IN_PROCESS_GATHERING_H_

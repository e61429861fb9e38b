// One small program that runs on a backend given by name.
#ifndef EVENKEEL_COMM_TESTING_NAMED_WORLD_CHECK_H_
#define EVENKEEL_COMM_TESTING_NAMED_WORLD_CHECK_H_

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace evenkeel::comm {

// Sums rank numbers on a world of `world_size` (0: the launcher's) of backend `name`: OK when every rank of this
// process has the right sum and the backend says that it has that name.
absl::Status CheckNamedWorld(absl::string_view name, int world_size);

}  // namespace evenkeel::comm

#endif  // EVENKEEL_COMM_TESTING_NAMED_WORLD_CHECK_H_

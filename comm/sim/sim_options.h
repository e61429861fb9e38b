// A simulated world as one value: links, faults, seed.
#ifndef EVENKEEL_COMM_SIM_SIM_OPTIONS_H_
#define EVENKEEL_COMM_SIM_SIM_OPTIONS_H_

#include <array>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "evenkeel/comm/scratch_memory.h"
#include "evenkeel/comm/stragglers.h"
#include "evenkeel/comm/topology.h"

namespace evenkeel::comm {

struct SimLink {
  absl::Duration latency = absl::Microseconds(2);
  double bytes_per_second = 10e9;
};

// What goes wrong. Message faults hit the `index`-th message that `rank` sends (control messages and records count
// too); process faults hit `rank` at its `index`-th call of the network.
struct SimFault {
  enum class Kind : uint8_t {
    kDelay,      // arrives `by` later, and what follows on the link after it
    kReorder,    // arrives `by` later, what follows does not wait for it
    kDrop,       // never arrives
    kDuplicate,  // arrives again, `by` later
    kCorrupt,    // arrives with one bit changed
    kStop,       // the rank does nothing for `by`; zero: for ever
    kDie,        // the rank ends
  };
  Kind kind = Kind::kDelay;
  int rank = 0;
  int64_t index = 0;
  absl::Duration by = absl::ZeroDuration();
};
std::string DescribeFault(const SimFault& fault);

struct SimOptions {
  int world_size = 1;
  std::optional<Topology> topology = std::nullopt;  // default: all ranks on one node
  absl::Duration deadline = absl::Seconds(1);       // virtual; of every call until SetDeadline, and of CreateGroup
  uint64_t seed = 1;
  // By link class: inside a node, between nodes.
  std::array<SimLink, kNumLinkClasses> links = {SimLink{}, SimLink{absl::Microseconds(20), 1e9}};
  double jitter = 0.5;  // a message takes up to so much of its latency longer, by the seed
  std::vector<SimFault> faults = {};
  // How soon a rank's death is seen by the others; none: never, and only a deadline finds it.
  std::optional<absl::Duration> death_seen_after = absl::Milliseconds(1);
  bool two_level = false;     // see HostCommunicator::Options
  int64_t eager_bytes = 256;  // payload to one peer up to this goes with the fingerprint
  int64_t piece_bytes = 1024;
  bool payload_digest = true;  // without it a corrupted payload would be believed
  // Chooses among `n` ranks that can go on (n >= 2): [0, n), wherever a rank waits and, if wanted, wherever it has sent
  // a record or payload. Default: by the seed.
  std::function<int(int n)> choose = nullptr;
  bool choose_at_sends = true;
  ScratchMemory* scratch = ScratchMemory::Heap();                           // outlives the world
  StragglerOptions stragglers = {.report = [](const StragglerReport&) {}};  // counted, not printed
};

}  // namespace evenkeel::comm

#endif  // EVENKEEL_COMM_SIM_SIM_OPTIONS_H_

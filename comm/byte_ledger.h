// What one rank sent, by mesh axis and link class: the counted side of every
// closed form.
#ifndef EVENKEEL_COMM_BYTE_LEDGER_H_
#define EVENKEEL_COMM_BYTE_LEDGER_H_

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "evenkeel/comm/mesh.h"
#include "evenkeel/comm/topology.h"

namespace evenkeel::comm {

struct LedgerEntry {
  int64_t bytes_sent = 0;     // payload to other ranks; bytes to oneself are not traffic
  int64_t messages_sent = 0;  // non-empty payloads to other ranks
  friend bool operator==(const LedgerEntry&, const LedgerEntry&) = default;
};

// A snapshot. Subtract two to get the traffic between them.
struct LedgerCounts {
  std::array<std::array<LedgerEntry, kNumLinkClasses>, kNumAxes> sent = {};
  std::array<int64_t, kNumAxes> collectives = {};  // calls on groups of more than one rank
  int64_t control_bytes = 0;                       // fingerprints and count rows: not payload

  // Summed over link classes.
  int64_t bytes(Axis axis) const;
  int64_t total_collectives() const;
  friend LedgerCounts operator-(LedgerCounts a, const LedgerCounts& b);
};

// One per rank, shared by all its communicators; in cache lines of its own, for ranks that are threads. Thread-safe.
class ByteLedger {
 public:
  void AddMessage(Axis axis, LinkClass link, int64_t bytes);
  void AddCollective(Axis axis);
  void AddControl(int64_t bytes);
  LedgerCounts Snapshot() const;

 private:
  struct Cell {
    std::atomic<int64_t> bytes{0};
    std::atomic<int64_t> messages{0};
  };
  std::array<std::array<Cell, kNumLinkClasses>, kNumAxes> cells_;
  std::array<std::atomic<int64_t>, kNumAxes> collectives_{};
  std::atomic<int64_t> control_bytes_{0};
  // The next ledger's first count is in another line. Not by alignment, which gcc's AddressSanitizer does not keep on
  // the stack.
  [[maybe_unused]] std::byte padding_[64];
};

}  // namespace evenkeel::comm

#endif  // EVENKEEL_COMM_BYTE_LEDGER_H_

#include "evenkeel/comm/byte_ledger.h"

namespace evenkeel::comm {
namespace {

// Totals, not an order between threads.
constexpr auto kRelaxed = std::memory_order_relaxed;

size_t IndexOf(Axis axis) { return static_cast<size_t>(axis); }
size_t IndexOf(LinkClass link) { return static_cast<size_t>(link); }

}  // namespace

int64_t LedgerCounts::bytes(Axis axis) const {
  int64_t total = 0;
  for (const LedgerEntry& entry : sent[IndexOf(axis)]) total += entry.bytes_sent;
  return total;
}

int64_t LedgerCounts::total_collectives() const {
  int64_t total = 0;
  for (const int64_t count : collectives) total += count;
  return total;
}

LedgerCounts operator-(LedgerCounts a, const LedgerCounts& b) {
  for (int axis = 0; axis < kNumAxes; ++axis) {
    for (int link = 0; link < kNumLinkClasses; ++link) {
      a.sent[axis][link].bytes_sent -= b.sent[axis][link].bytes_sent;
      a.sent[axis][link].messages_sent -= b.sent[axis][link].messages_sent;
    }
    a.collectives[axis] -= b.collectives[axis];
  }
  a.control_bytes -= b.control_bytes;
  return a;
}

void ByteLedger::AddMessage(Axis axis, LinkClass link, int64_t bytes) {
  if (bytes == 0) return;
  Cell& cell = cells_[IndexOf(axis)][IndexOf(link)];
  cell.bytes.fetch_add(bytes, kRelaxed);
  cell.messages.fetch_add(1, kRelaxed);
}

void ByteLedger::AddCollective(Axis axis) { collectives_[IndexOf(axis)].fetch_add(1, kRelaxed); }

void ByteLedger::AddControl(int64_t bytes) { control_bytes_.fetch_add(bytes, kRelaxed); }

LedgerCounts ByteLedger::Snapshot() const {
  LedgerCounts counts;
  for (int axis = 0; axis < kNumAxes; ++axis) {
    for (int link = 0; link < kNumLinkClasses; ++link) {
      counts.sent[axis][link].bytes_sent = cells_[axis][link].bytes.load(kRelaxed);
      counts.sent[axis][link].messages_sent = cells_[axis][link].messages.load(kRelaxed);
    }
    counts.collectives[axis] = collectives_[axis].load(kRelaxed);
  }
  counts.control_bytes = control_bytes_.load(kRelaxed);
  return counts;
}

}  // namespace evenkeel::comm

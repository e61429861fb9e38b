// Fingerprints and count rows from arbitrary bytes, and the plans of v-collectives from arbitrary counts, groups and
// topologies: nothing crashes, refusals are refusals, and accepted plans, carried out by hand, move every byte to its
// place, in the direct and in the two-level form alike, alone and grouped.
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <vector>

#include "evenkeel/comm/call_plan.h"
#include "evenkeel/comm/count_matrix.h"
#include "evenkeel/comm/fingerprint.h"
#include "evenkeel/comm/grouped_call.h"
#include "evenkeel/comm/grouped_plan.h"
#include "evenkeel/comm/phase_plan.h"
#include "evenkeel/comm/topology.h"
#include "evenkeel/comm/two_level.h"
#include "evenkeel/runtime/base/fuzz_input.h"
#include "evenkeel/runtime/base/status_macros.h"
#include "evenkeel/runtime/tensor/dtype.h"
#include "evenkeel/runtime/tensor/tensor_view.h"

namespace evenkeel::comm {
namespace {

// A value of some field, inside its enumeration or just outside.
void ChangeField(FuzzInput& input, Fingerprint* f) {
  switch (input.Between(0, 10)) {
    case 0:
      f->operation = static_cast<uint8_t>(input.Between(0, kNumOperations));
      break;
    case 1:
      f->dtype = static_cast<uint8_t>(input.Bool() ? input.Between(0, 7) : kNoDType);
      break;
    case 2:
      f->reduce_op = static_cast<uint8_t>(input.Bool() ? input.Between(0, 5) : kNoReduceOp);
      break;
    case 3:
      f->flags = input.Byte();
      break;
    case 4:
      f->root = static_cast<int32_t>(input.Between(INT32_MIN, INT32_MAX));
      break;
    case 5:
      f->local_status = static_cast<uint32_t>(input.Between(0, 18));
      break;
    case 6:
      f->group = static_cast<uint64_t>(input.Between(0, 3));
      break;
    case 7:
      f->epoch = input.Between(INT64_MIN, INT64_MAX);
      break;
    case 8:
      f->sequence = input.Between(0, 3);
      break;
    case 9:
      f->count = input.Between(-1, INT64_MAX - 1);
      break;
    default:
      f->counts_digest = static_cast<uint64_t>(input.Between(0, 3));
      f->deadline_ms = static_cast<uint32_t>(input.Between(0, UINT32_MAX));
  }
}

// Any bytes, or a record that most ranks share and a few have changed.
std::vector<Fingerprint> AnyFingerprints(FuzzInput& input) {
  std::vector<Fingerprint> all(input.Between(1, 12));
  if (input.Bool()) {
    for (int64_t changes = input.Between(0, 4); changes > 0; --changes) ChangeField(input, &all[0]);
    for (Fingerprint& f : all) f = all[0];
    for (int64_t changes = input.Between(0, 4); changes > 0; --changes) {
      ChangeField(input, &all[input.Between(0, static_cast<int64_t>(all.size()) - 1)]);
    }
    for (Fingerprint& f : all) f = SealFingerprint(f);
    return all;
  }
  const bool sealed = input.Bool();
  for (Fingerprint& f : all) {
    auto* const bytes = reinterpret_cast<uint8_t*>(&f);
    for (size_t i = 0; i < kFingerprintBytes; ++i) bytes[i] = input.Byte();
    if (sealed) f = SealFingerprint(f);
  }
  return all;
}

// Equal in all fields but the flags that a rank may have to itself.
bool SameCall(const Fingerprint& a, const Fingerprint& b) {
  Fingerprint with_flags = a;
  with_flags.flags = b.flags;
  with_flags = SealFingerprint(with_flags);
  return ((a.flags ^ b.flags) & kFlagTwoLevel) == 0 && std::memcmp(&with_flags, &b, kFingerprintBytes) == 0;
}

void FuzzFingerprints(FuzzInput& input) {
  const std::vector<Fingerprint> all = AnyFingerprints(input);
  bool agree = true;
  for (const Fingerprint& f : all) {
    const auto parsed = ParseFingerprint(absl::MakeConstSpan(reinterpret_cast<const uint8_t*>(&f), kFingerprintBytes));
    EK_CHECK(parsed.ok() == CheckFingerprint(f).ok());
    EK_CHECK(!DescribeFingerprint(f).empty());
    agree = agree && parsed.ok() && f.local_status == 0 && SameCall(f, all[0]);
  }
  const std::optional<Disagreement> found = FindDisagreement(all);
  EK_CHECK(found == FindDisagreement(all));
  EK_CHECK(found.has_value() != agree);
  if (!found.has_value()) return;
  EK_CHECK(!found->findings.empty());
  for (const RankFinding& finding : found->findings) {
    EK_CHECK(finding.rank >= 0 && finding.rank < static_cast<int>(all.size()) && !finding.had.empty());
  }
}

int64_t AnyCount(FuzzInput& input) {
  switch (input.Between(0, 3)) {
    case 0:
      return input.Between(INT64_MIN, INT64_MAX);
    case 1:
      return INT64_MAX - input.Between(0, 3);
    default:
      return input.Between(0, 20);
  }
}

void FuzzCountRows(FuzzInput& input) {
  const int size = static_cast<int>(input.Between(1, 6));
  std::vector<int64_t> rows(2 * size * size);
  for (int64_t& entry : rows) entry = AnyCount(input);
  if (input.Bool()) {  // what is received is what is sent, but for a few entries
    for (int i = 0; i < size; ++i) {
      for (int j = 0; j < size; ++j) rows[j * 2 * size + size + i] = rows[i * 2 * size + j];
    }
    for (int64_t changes = input.Between(0, 2); changes > 0; --changes) {
      rows[input.Between(0, static_cast<int64_t>(rows.size()) - 1)] = AnyCount(input);
    }
  }
  bool consistent = true;
  for (int i = 0; i < size; ++i) {
    for (int j = 0; j < size; ++j) {
      consistent = consistent && rows[i * 2 * size + j] == rows[j * 2 * size + size + i];
    }
  }
  EK_CHECK(FindCountMismatch(rows, size).has_value() != consistent);
  const absl::StatusOr<std::vector<int64_t>> offsets = OffsetsOf(rows);
  for (size_t i = 0; offsets.ok() && i < rows.size(); ++i) {
    EK_CHECK(rows[i] >= 0 && (*offsets)[i + 1] - (*offsets)[i] == rows[i]);
  }
}

// Arguments that no memory backs: plans are made without touching it.
void FuzzArguments(FuzzInput& input) {
  const Place place{.rank = static_cast<int>(input.Between(0, 3)), .size = 4};
  std::byte base[16];
  const auto dtype = static_cast<DType>(input.Between(0, 8));
  const auto any_extent = [&input] { return input.Bool() ? input.Between(0, 64) : input.Between(0, INT64_MAX); };
  const int64_t n = any_extent();
  const int64_t m = input.Bool() ? n : any_extent();
  const ConstTensorView send(input.Bool() ? base : nullptr, dtype, Shape({n}));
  const TensorView recv(input.Bool() ? base : nullptr, dtype, Shape({m}));
  const bool right_length = input.Bool();
  std::vector<int64_t> counts(right_length ? 4 : input.Between(0, 5)), others(right_length ? 4 : input.Between(0, 5));
  for (int64_t& count : counts) count = AnyCount(input);
  for (int64_t& count : others) count = AnyCount(input);
  const auto op = static_cast<ReduceOp>(input.Between(0, 6));
  const int peer = static_cast<int>(input.Between(-2, 6));
  const CallPlan plans[] = {PlanAllReduce(send, recv, op, place),
                            PlanAllGather(send, recv, place),
                            PlanAllGatherV(send, recv, counts, place),
                            PlanReduceScatter(send, recv, op, place),
                            PlanReduceScatterV(send, recv, counts, op, place),
                            PlanAllToAll(send, recv, place),
                            PlanAllToAllV(send, counts, recv, others, place),
                            PlanBroadcast(recv, peer, place),
                            PlanSend(send, peer, place),
                            PlanRecv(recv, peer, place)};
  for (const CallPlan& plan : plans) {
    EK_CHECK(plan.bad_argument.ok() != plan.phases.empty());
    for (const PhasePlan& phase : plan.phases) {
      for (const SendSpan& span : phase.sends) EK_CHECK(span.bytes >= 0 && (span.bytes == 0 || span.data != nullptr));
      for (const ReceiveSpan& span : phase.receives) EK_CHECK(span.bytes >= 0);
    }
  }
}

// What HostCommunicator and a transport do, for all ranks in one thread.
class Execution {
 public:
  explicit Execution(std::vector<CallPlan>& plans) : plans_(plans), next_(plans.size(), 0) {}

  // The next exchange, with the local steps before it; false when there is none. All ranks have equally many.
  bool Exchange() {
    int at_exchange = 0;
    for (size_t r = 0; r < plans_.size(); ++r) at_exchange += Advance(r) ? 1 : 0;
    EK_CHECK(at_exchange == 0 || at_exchange == static_cast<int>(plans_.size()));
    for (size_t to = 0; to < plans_.size() && at_exchange > 0; ++to) Deliver(to);
    for (size_t& next : next_) next += at_exchange > 0 ? 1 : 0;
    return at_exchange > 0;
  }

 private:
  bool Advance(size_t r) {
    for (const auto& phases = plans_[r].phases; next_[r] < phases.size(); ++next_[r]) {
      RunLocalSteps(phases[next_[r]].before, static_cast<int>(plans_.size()));
      if (!phases[next_[r]].is_local) return true;
    }
    return false;
  }
  void Deliver(size_t to) {
    const PhasePlan& phase = plans_[to].phases[next_[to]];
    std::vector<const void*> sources(plans_.size());
    for (size_t from = 0; from < plans_.size(); ++from) {
      const SendSpan& sent = plans_[from].phases[next_[from]].sends[to];
      const ReceiveSpan& received = phase.receives[from];
      EK_CHECK(sent.bytes == received.bytes || from == to);
      EK_CHECK(plans_[from].phases[next_[from]].reduces == phase.reduces);
      EK_CHECK(!phase.reduces || sent.bytes == phase.block_bytes);
      sources[from] = sent.data;
      if (!phase.reduces && sent.bytes > 0 && sent.data != received.data) {
        std::memcpy(received.data, sent.data, sent.bytes);
      }
    }
    if (phase.reduces && phase.block_bytes > 0) CombineBlocks(phase, 0, phase.block_bytes, sources);
  }

  std::vector<CallPlan>& plans_;
  std::vector<size_t> next_;  // phase of each rank
};

void CarryOut(std::vector<CallPlan>& plans) {
  for (Execution execution(plans); execution.Exchange();) {
  }
}

struct World {
  // `scale`: of the counts.
  World(FuzzInput& input, int64_t scale) {
    const int size = static_cast<int>(input.Between(1, 8));
    std::vector<int> nodes(size);
    for (int& node : nodes) node = static_cast<int>(input.Between(0, 3));
    if (input.Bool()) {
      const int per_node = static_cast<int>(input.Between(1, 4));
      for (int r = 0; r < size; ++r) nodes[r] = r / per_node;
    }
    Group group;
    for (int r = 0; r < size; ++r) group.ranks.push_back(r);
    if (size > 1) grid = NodeGrid::Create(group, Topology(nodes));
    counts.assign(size, std::vector<int64_t>(size));
    for (auto& row : counts) {
      for (int64_t& count : row) count = scale * input.Between(0, 5);
    }
  }
  int size() const { return static_cast<int>(counts.size()); }
  Place place(int rank) const { return {rank, size(), grid.has_value() ? &*grid : nullptr}; }

  std::optional<NodeGrid> grid;
  std::vector<std::vector<int64_t>> counts;
};

int64_t Sum(const std::vector<int64_t>& counts) {
  int64_t sum = 0;
  for (const int64_t count : counts) sum += count;
  return sum;
}

uint8_t Mark(int from, int64_t at) { return static_cast<uint8_t>(from * 31 + at * 7 + 1); }

void FuzzExchange(const World& world) {
  const int size = world.size();
  std::vector<std::vector<uint8_t>> sends(size), recvs(size);
  std::vector<CallPlan> plans;
  std::vector<int64_t> rows;
  for (int r = 0; r < size; ++r) {
    std::vector<int64_t> incoming;
    for (int i = 0; i < size; ++i) incoming.push_back(world.counts[i][r]);
    for (int64_t at = 0; at < Sum(world.counts[r]); ++at) sends[r].push_back(Mark(r, at));
    recvs[r].assign(Sum(incoming), 0);
    plans.push_back(PlanAllToAllV(ConstTensorView(sends[r].data(), DType::kU8, Shape({Sum(world.counts[r])})),
                                  world.counts[r], TensorView(recvs[r].data(), DType::kU8, Shape({Sum(incoming)})),
                                  incoming, world.place(r)));
    EK_CHECK_OK(plans.back().bad_argument);
    rows.insert(rows.end(), plans.back().row.begin(), plans.back().row.end());
  }
  for (int r = 0; r < size; ++r) {
    if (!plans[r].needs_completion()) continue;
    EK_CHECK_OK(CompletePlan({.fingerprints = {}, .rows = rows}, world.place(r), &plans[r]));
  }
  CarryOut(plans);
  for (int r = 0; r < size; ++r) {
    int64_t at = 0;
    for (int from = 0; from < size; ++from) {
      int64_t source = 0;
      for (int before = 0; before < r; ++before) source += world.counts[from][before];
      for (int64_t i = 0; i < world.counts[from][r]; ++i) EK_CHECK(recvs[r][at++] == Mark(from, source + i));
    }
  }
}

void FuzzGatherAndReduce(const World& world) {
  const int size = world.size();
  const std::vector<int64_t>& counts = world.counts[0];
  const int64_t total = Sum(counts);
  std::vector<std::vector<uint8_t>> blocks(size), gathered(size), sums(size), all(size);
  std::vector<CallPlan> gathers, reduces;
  for (int r = 0; r < size; ++r) {
    for (int64_t at = 0; at < counts[r]; ++at) blocks[r].push_back(Mark(r, at));
    for (int64_t at = 0; at < total; ++at) all[r].push_back(Mark(r, at));
    gathered[r].assign(total, 0);
    sums[r].assign(counts[r], 0);
    gathers.push_back(PlanAllGatherV(ConstTensorView(blocks[r].data(), DType::kU8, Shape({counts[r]})),
                                     TensorView(gathered[r].data(), DType::kU8, Shape({total})), counts,
                                     world.place(r)));
    reduces.push_back(PlanReduceScatterV(ConstTensorView(all[r].data(), DType::kU8, Shape({total})),
                                         TensorView(sums[r].data(), DType::kU8, Shape({counts[r]})), counts,
                                         ReduceOp::kSum, world.place(r)));
    EK_CHECK_OK(gathers.back().bad_argument);
    EK_CHECK_OK(reduces.back().bad_argument);
  }
  CarryOut(gathers);
  CarryOut(reduces);
  int64_t at = 0;
  for (int r = 0; r < size; ++r) {
    for (int64_t i = 0; i < counts[r]; ++i, ++at) {
      uint8_t sum = 0;
      for (int from = 0; from < size; ++from) {
        EK_CHECK(gathered[from][at] == Mark(r, i));
        sum = static_cast<uint8_t>(sum + Mark(from, at));
      }
      EK_CHECK(sums[r][i] == sum);
    }
  }
}

// Up to six calls of three kinds grouped: every plan has the same phases, and the results are those of the calls alone.
void FuzzGrouped(FuzzInput& input, const World& world) {
  const int size = world.size();
  const std::vector<int64_t>& counts = world.counts[0];
  const auto num_calls = static_cast<size_t>(input.Between(0, 6));
  std::vector<int64_t> kinds(num_calls);
  for (int64_t& kind : kinds) kind = input.Between(0, 2);
  struct Memory {
    std::vector<uint8_t> send, alone, grouped;
  };
  std::vector<std::vector<Memory>> memory(size, std::vector<Memory>(num_calls));  // [rank][call]
  std::vector<std::vector<GroupedCall>> alone(size), grouped(size);
  for (int r = 0; r < size; ++r) {
    std::vector<int64_t> incoming;
    for (int i = 0; i < size; ++i) incoming.push_back(world.counts[i][r]);
    for (size_t c = 0; c < num_calls; ++c) {
      const bool gathers = kinds[c] == 0, reduces = kinds[c] == 1;
      const int64_t sent = gathers ? counts[r] : reduces ? Sum(counts) : Sum(world.counts[r]);
      const int64_t received = gathers ? Sum(counts) : reduces ? counts[r] : Sum(incoming);
      Memory& m = memory[r][c];
      for (int64_t at = 0; at < sent; ++at) m.send.push_back(Mark(r, at + static_cast<int64_t>(c)));
      m.alone.assign(received, 0);
      m.grouped.assign(received, 0);
      GroupedCall call{.operation = gathers   ? Operation::kAllGatherV
                                    : reduces ? Operation::kReduceScatterV
                                              : Operation::kAllToAllV,
                       .send = ConstTensorView(m.send.data(), DType::kU8, Shape({sent})),
                       .counts = gathers || reduces ? counts : world.counts[r],
                       .recv_counts = incoming};
      call.recv = TensorView(m.alone.data(), DType::kU8, Shape({received}));
      alone[r].push_back(call);
      call.recv = TensorView(m.grouped.data(), DType::kU8, Shape({received}));
      grouped[r].push_back(call);
    }
  }
  const auto run = [&world, size](const std::vector<std::vector<GroupedCall>>& calls, size_t first, size_t number) {
    std::vector<CallPlan> plans;
    for (int r = 0; r < size; ++r) {
      plans.push_back(PlanGrouped(absl::MakeConstSpan(calls[r]).subspan(first, number), world.place(r)));
      EK_CHECK_OK(plans.back().bad_argument);
    }
    Execution execution(plans);
    if (plans[0].grouped_counts.has_value()) {
      EK_CHECK(execution.Exchange());
      for (int r = 0; r < size; ++r) {
        EK_CHECK(!JudgeGroupedCounts(world.place(r), &plans[r]).has_value());
        EK_CHECK_OK(CompleteGroupedPlan(world.place(r), &plans[r]));
      }
    }
    while (execution.Exchange()) {
    }
  };
  for (size_t c = 0; c < num_calls; ++c) run(alone, c, 1);
  run(grouped, 0, num_calls);
  for (const std::vector<Memory>& of_rank : memory) {
    for (const Memory& m : of_rank) EK_CHECK(m.alone == m.grouped);
  }
}

}  // namespace
}  // namespace evenkeel::comm

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  evenkeel::FuzzInput input(data, size);
  switch (input.Between(0, 3)) {
    case 0:
      evenkeel::comm::FuzzFingerprints(input);
      break;
    case 1:
      evenkeel::comm::FuzzCountRows(input);
      break;
    case 2:
      evenkeel::comm::FuzzArguments(input);
      break;
    default: {
      // Counts of a few bytes, or around what grouped calls pack.
      const evenkeel::comm::World world(input, input.Between(0, 7) > 0 ? 1 : 1500);
      evenkeel::comm::FuzzExchange(world);
      evenkeel::comm::FuzzGatherAndReduce(world);
      evenkeel::comm::FuzzGrouped(input, world);
    }
  }
  return 0;
}

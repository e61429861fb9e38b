// What a parity job found: plain data, filled by the prover, read by whatever reports it.
#ifndef EVENKEEL_TESTING_PARITY_RESULT_H_
#define EVENKEEL_TESTING_PARITY_RESULT_H_

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace evenkeel::testutil {

// kBitwise: every compared bit is equal. kBounded: inside the derived error bound of the double reference.
enum class Verdict { kReference, kBitwise, kBounded, kMismatch };

// The first element that differs, in the order step, tensor, rank, index.
struct FirstDifference {
  int64_t step = 0;
  std::string tensor;  // "loss", "layer.0.moe.output", "grad layer.1.moe.w_in", "param embedding", ...
  int rank = 0;
  int64_t index = 0;
  double reference = 0;
  double candidate = 0;
  double ulps = 0;   // distance in units of the last place of the tensor's dtype
  double bound = 0;  // 0 for bitwise comparisons
};

// Bytes sent on one axis, summed over ranks, steps and both directions, MoE traffic only.
struct AxisBytes {
  int64_t counted = 0;
  int64_t predicted = 0;  // closed form of the order at the actual capacity
  int64_t bound = 0;      // lower bound from the actual routing matrix; -1 where none is computed
};

// The bytes of an order on its two axes, and by class of links (moe/exchange_bound.h).
struct OrderBytes {
  AxisBytes ep;
  AxisBytes ep_inter_node;  // of `ep`, between nodes; its bound is that of any order
  AxisBytes tp;
  int64_t tp_bound_at_least_ep = 0;  // of an order that sends no more over EP than its bound; -1 as above
};

struct PeakBytes {
  int64_t counted = 0;
  int64_t predicted = 0;
};

struct ParityRun {
  std::string order;  // "drop_gather", or the path of an order file
  std::string zero3;  // fetch policy
  Verdict verdict = Verdict::kMismatch;
  std::string note;  // one line: judged against what, routing margins, ...
  double max_abs_diff = 0;
  double bound_used = 0;  // largest difference / bound of a bounded run, in [0, 1] when it holds
  std::optional<FirstDifference> first_difference;
  std::vector<double> loss;  // mean over replicas, by step
  OrderBytes bytes;
  int64_t collectives = 0;         // of one step, rank 0
  double leaf_fetch_host_ops = 0;  // mean per leaf fetch in steady state, rank 0
  PeakBytes peak_gathered_bytes;   // largest over ranks
  double ms_per_step = 0;          // wall time of this run's steps, mean
  std::string parameter_digest;    // 16 hex digits over all final parameters, layout of the ranks included
  // Over all gradients of every step by name, independent of the layout; runs compared across layouts only, and then
  // parameter_digest is by name too, over every step.
  std::string gradient_digest;
  std::string loss_digest;          // 16 hex digits over the bits of the loss of every step
  int64_t values_compared = 0;      // over all ranks and steps; a run without any is no proof
  int64_t routing_differences = 0;  // bounded runs: near-ties where the double reference chose otherwise
  int64_t skipped_steps = 0;        // f16: steps that overflowed, on all ranks alike; the loss scale fell
  double loss_scale = 1;            // behind the last step; above 1 for f16 only
  int64_t dropped_routes = 0;       // beyond capacity, over all replicas, layers and steps
};

// A rank that others waited for long, inside their limits (comm/stragglers.h).
struct LateRank {
  int rank = 0;
  int64_t calls = 0;
  double waited_ms = 0;   // in all of them
  double longest_ms = 0;  // in one
};

struct ParityResult {
  // What was run, in the order to be shown: {"tp", "2"}, {"corpus", "/usr/share/..."}, ...
  std::vector<std::pair<std::string, std::string>> config;
  std::vector<ParityRun> runs;       // the reference first
  std::vector<LateRank> late_ranks;  // by rank; none when all came in time, or where nobody counted

  bool AllHold() const {
    for (const ParityRun& run : runs) {
      if (run.verdict == Verdict::kMismatch) return false;
    }
    return !runs.empty();
  }
};

// As reports print it: "reference", "bitwise", "bounded", "MISMATCH".
inline const char* VerdictName(Verdict verdict) {
  switch (verdict) {
    case Verdict::kReference:
      return "reference";
    case Verdict::kBitwise:
      return "bitwise";
    case Verdict::kBounded:
      return "bounded";
    case Verdict::kMismatch:
      return "MISMATCH";
  }
  return "MISMATCH";
}

}  // namespace evenkeel::testutil

#endif  // EVENKEEL_TESTING_PARITY_RESULT_H_

#include "evenkeel/moe/overlap_estimate.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "evenkeel/runtime/base/status_macros.h"

namespace evenkeel::moe {
namespace {

// Multiplications and additions of the experts of this rank: two or three products of a row, twice as many backward.
double ExpertFlops(const TypedOrder& order, const OrderSizes& sizes, const ValueType& rows, bool backward) {
  const int64_t columns = order.layout == ExpertLayout::kTensorParallel ? sizes.ffn / sizes.tp : sizes.ffn;
  const double products = (sizes.gated ? 3 : 2) * (backward ? 2 : 1) + (backward && sizes.recompute ? 1 : 0);
  const int64_t count = OrderRows(order, sizes).Count(rows).rows;
  return 2 * products * static_cast<double>(count) * static_cast<double>(sizes.hidden) * static_cast<double>(columns);
}

// Seconds of one chunk: what goes out, what is computed (with what lanes send in between), what comes back.
struct Chunk {
  double out = 0;
  double middle = 0;
  double back = 0;
};

double ChunksSeconds(const Chunk& chunk, int chunks) {
  double exchange = 0, compute = 0;  // when each queue is free
  std::vector<double> arrived;
  const auto send_out = [&] {
    exchange += chunk.out;
    arrived.push_back(exchange);
  };
  send_out();
  for (int i = 0; i < chunks; ++i) {
    if (i + 1 < chunks) send_out();
    compute = std::max(compute, arrived[static_cast<size_t>(i)]) + chunk.middle;
    exchange = std::max(exchange, compute) + chunk.back;
  }
  return exchange;
}

}  // namespace

double EstimatePassSeconds(const TypedOrder& order, const OrderSizes& sizes, bool backward, const TrafficTime& tp,
                           const TrafficTime& ep, double flops_per_second) {
  EK_CHECK(flops_per_second > 0);
  const std::vector<TypedStep>& program = backward ? order.backward : order.forward;
  const ChunkedSteps chunked = ChunkedStepsOf(program);
  const int chunks = order.order.chunks;
  double outside = 0;
  Chunk chunk;
  bool behind_experts = false;
  for (size_t i = 0; i < program.size(); ++i) {
    const TypedStep& step = program[i];
    const bool inside = chunked.holds(static_cast<int>(i));
    double* part = inside ? &chunk.middle : &outside;
    if (inside && IsExchange(step.step.kind)) part = behind_experts ? &chunk.back : &chunk.out;
    if (step.step.kind == StepKind::kExperts) {
      behind_experts = true;
      *part += ExpertFlops(order, sizes, step.before, backward) / flops_per_second / (inside ? chunks : 1);
      continue;
    }
    AxisTraffic traffic = ComputeStepTraffic(order, sizes, step, backward);
    if (inside) {
      traffic.bytes /= chunks;
      traffic.inter_node_bytes /= chunks;
    }
    *part += step.step.axis == comm::Axis::kEp ? ep(traffic) : tp(traffic);
  }
  return outside + ChunksSeconds(chunk, chunks);
}

}  // namespace evenkeel::moe

// The operators of reductions.
#ifndef EVENKEEL_COMM_REDUCE_OP_H_
#define EVENKEEL_COMM_REDUCE_OP_H_

#include <cstdint>

#include "absl/strings/string_view.h"

namespace evenkeel::comm {

// The values travel in fingerprints: append only. kAvg divides the f32 (or f64) sum before rounding; kBitOr is for
// integers only, kAvg for floating types only.
enum class ReduceOp : uint8_t { kSum = 0, kMax = 1, kMin = 2, kAvg = 3, kBitOr = 4 };
inline constexpr ReduceOp kAllReduceOps[] = {ReduceOp::kSum, ReduceOp::kMax, ReduceOp::kMin, ReduceOp::kAvg,
                                             ReduceOp::kBitOr};
// "sum", "max", "min", "avg", "bitor".
absl::string_view ReduceOpName(ReduceOp op);

}  // namespace evenkeel::comm

#endif  // EVENKEEL_COMM_REDUCE_OP_H_

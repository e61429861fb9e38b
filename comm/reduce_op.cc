#include "evenkeel/comm/reduce_op.h"

namespace evenkeel::comm {

absl::string_view ReduceOpName(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
      return "sum";
    case ReduceOp::kMax:
      return "max";
    case ReduceOp::kMin:
      return "min";
    case ReduceOp::kAvg:
      return "avg";
    case ReduceOp::kBitOr:
      return "bitor";
  }
  return "unknown";
}

}  // namespace evenkeel::comm

#include "evenkeel/testing/gather_bytes.h"

#include <numeric>

#include "evenkeel/runtime/base/status_macros.h"
#include "evenkeel/runtime/tensor/tensor_view.h"

namespace evenkeel::testutil {

absl::StatusOr<GatheredBytes> GatherBytes(const std::vector<uint8_t>& mine, comm::Communicator& group, Stream& stream) {
  const int n = group.size();
  const int64_t size = static_cast<int64_t>(mine.size());
  GatheredBytes all;
  all.sizes.assign(n, 0);
  EK_RETURN_IF_ERROR(group.AllGather(ConstTensorView(&size, DType::kI64, {1}),
                                     TensorView(all.sizes.data(), DType::kI64, {n}), stream));
  EK_RETURN_IF_ERROR(stream.Synchronize());
  std::vector<int64_t> send(n, 0), receive(n, 0);
  send[0] = size;
  if (group.rank() == 0) receive = all.sizes;
  const int64_t total = std::accumulate(receive.begin(), receive.end(), int64_t{0});
  all.bytes.resize(total);
  EK_RETURN_IF_ERROR(group.AllToAllV(ConstTensorView(mine.data(), DType::kU8, {size}), send,
                                     TensorView(all.bytes.data(), DType::kU8, {total}), receive, stream));
  EK_RETURN_IF_ERROR(stream.Synchronize());
  return all;
}

}  // namespace evenkeel::testutil

#include "evenkeel/comm/testing/failing_scratch.h"

#include <utility>

namespace evenkeel::comm {
namespace {

// What the calling thread has been told; negative: not to fail.
thread_local int64_t t_until_failure = -1;
thread_local bool t_has_failed = false;

}  // namespace

void FailingScratch::FailOnThisThread(int64_t n) {
  t_until_failure = n;
  t_has_failed = false;
}

bool FailingScratch::StopFailing() {
  t_until_failure = -1;
  return std::exchange(t_has_failed, false);
}

std::byte* FailingScratch::TryAllocate(int64_t bytes) {
  if (t_until_failure == 0) t_has_failed = true;
  if (t_until_failure >= 0 && t_until_failure-- == 0) return nullptr;
  std::byte* const data = Heap()->TryAllocate(bytes);
  if (data != nullptr) num_live_.fetch_add(1);
  return data;
}

void FailingScratch::Free(std::byte* data) {
  num_live_.fetch_sub(1);
  Heap()->Free(data);
}

}  // namespace evenkeel::comm

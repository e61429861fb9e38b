#include "evenkeel/moe/order_schedule.h"

#include <algorithm>
#include <utility>

#include "evenkeel/moe/program_builder.h"

namespace evenkeel::moe {
namespace {

std::vector<int> TapeBuffers(const ScheduleTape& tape) {
  std::vector<int> buffers;
  const auto add = [&](int buffer) {
    if (buffer <= kOutputBuffer || std::find(buffers.begin(), buffers.end(), buffer) != buffers.end()) return;
    buffers.push_back(buffer);
  };
  for (const ExpertTape& experts : tape.experts) {
    add(experts.rows.buffer);
    add(experts.pre);
    add(experts.gate);
  }
  add(tape.weighted_rows.buffer);
  return buffers;
}

}  // namespace

Schedules BuildSchedules(const TypedOrder& order, const OrderSizes& sizes) {
  Schedules schedules;
  ProgramBuilder forward(order, sizes, false);
  forward.Build();
  schedules.tape = forward.tape();
  const std::vector<int> kept = TapeBuffers(schedules.tape);
  forward.PlanMemory(kept, {});
  for (int buffer : kept) schedules.tape.bytes += forward.schedule().buffers[buffer].bytes();

  ProgramBuilder backward(order, sizes, true);
  backward.TakeTape(forward.schedule(), schedules.tape, &schedules.carried);
  backward.Build();
  schedules.backward_tape = backward.tape();
  std::vector<int> given;
  for (const auto& pair : schedules.carried) {
    if (pair.first > kOutputBuffer) given.push_back(pair.second);
  }
  backward.PlanMemory({}, given);
  schedules.forward = forward.Take();
  schedules.backward = backward.Take();
  return schedules;
}

}  // namespace evenkeel::moe

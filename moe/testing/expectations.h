// What tests expect of a layer run: bits, values, bytes, memory.
#ifndef EVENKEEL_MOE_TESTING_EXPECTATIONS_H_
#define EVENKEEL_MOE_TESTING_EXPECTATIONS_H_

#include <string>
#include <vector>

#include "evenkeel/moe/testing/layer_harness.h"

namespace evenkeel::moe {

// For messages: "fused T=2 E=4 ...".
std::string Name(const LayerCase& c, const std::string& order);

// The order of that name; a failure of the run is a failure of the test.
LayerRun RunOrder(const LayerCase& c, const std::string& order);

// Built-in orders of TP-sliced experts that have the reference's bits; and all of them (dedup adds up in another
// order).
std::vector<std::string> TensorParallelOrders();
std::vector<std::string> AllTensorParallelOrders();

struct Member {
  const char* name;
  std::vector<double> Values::*values;
};
inline constexpr Member kExpertMembers[] = {{"w_in", &Values::w_in},     {"w_gate", &Values::w_gate},
                                            {"w_out", &Values::w_out},   {"b_in", &Values::b_in},
                                            {"b_gate", &Values::b_gate}, {"b_out", &Values::b_out}};
inline constexpr Member kAllMembers[] = {
    {"y", &Values::y},       {"dx", &Values::dx},         {"router", &Values::router},
    {"w_in", &Values::w_in}, {"w_gate", &Values::w_gate}, {"w_out", &Values::w_out},
    {"b_in", &Values::b_in}, {"b_gate", &Values::b_gate}, {"b_out", &Values::b_out}};

void ExpectBitwiseEqual(const LayerRun& a, const LayerRun& b, const std::string& what);

// Every output and gradient near the naive layer in double.
void ExpectLikeDense(const LayerCase& c, const LayerRun& run, const std::string& what);

// Trail 21: every lane ends with the same router gradient and input gradient; neither may be summed over TP.
void ExpectLanesAgree(const LayerRun& run, const std::string& what);

// Counted bytes by axis and link class, collectives and peak memory are the predicted ones.
void ExpectCounts(const LayerRun& run, const std::string& what);

}  // namespace evenkeel::moe

#endif  // EVENKEEL_MOE_TESTING_EXPECTATIONS_H_

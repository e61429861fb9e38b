// Small configurations for tests of whole runs, and results as text for their messages.
#ifndef EVENKEEL_TESTING_PARITY_TEST_UTIL_H_
#define EVENKEEL_TESTING_PARITY_TEST_UTIL_H_

#include <cstdint>
#include <string>
#include <vector>

#include "evenkeel/testing/corpus.h"
#include "evenkeel/testing/parity.h"
#include "evenkeel/testing/parity_result.h"

namespace evenkeel::testutil {

// A model of two layers, 16 wide, on a layout; every order under the flat policy, the first one the reference. The
// reference itself is not judged unless the caller says so.
ParityConfig SmallConfig(int tp, int ep, int dp, const std::vector<std::string>& orders, int64_t steps = 3);

// The licence texts.
const Corpus& TestCorpus();

// A line per run.
std::string ResultText(const ParityResult& result);

}  // namespace evenkeel::testutil

#endif  // EVENKEEL_TESTING_PARITY_TEST_UTIL_H_

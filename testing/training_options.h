// Options of a training run by name and text, as flags (//tools:parity) and build macros (parity.bzl) spell them.
//
//   EK_RETURN_IF_ERROR(SetTrainingOption("score", "sigmoid", &config));
//
// Names and values are those of the parity program's flags.
#ifndef EVENKEEL_TESTING_TRAINING_OPTIONS_H_
#define EVENKEEL_TESTING_TRAINING_OPTIONS_H_

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "evenkeel/testing/training_config.h"

namespace evenkeel::testutil {

// Sets one option; what it means together with others is ValidateTrainingConfig's. "optimizer" also sets its default
// learning rate. InvalidArgument, one line "name=value: why": an unknown name (with all that are known), a value that
// does not parse or is none of the known ones.
absl::Status SetTrainingOption(absl::string_view name, absl::string_view value, TrainingConfig* config);

// In alphabetical order.
std::vector<std::string> TrainingOptionNames();

}  // namespace evenkeel::testutil

#endif  // EVENKEEL_TESTING_TRAINING_OPTIONS_H_

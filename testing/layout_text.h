// A layout as the value of a flag or of a build attribute: "tp=1,ep=2,dp=4" or with ",etp=1".
#ifndef EVENKEEL_TESTING_LAYOUT_TEXT_H_
#define EVENKEEL_TESTING_LAYOUT_TEXT_H_

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "evenkeel/comm/mesh.h"

namespace evenkeel::testutil {

// Sizes that are not named are 1; etp that is not named is tp. InvalidArgument, one line, for anything else: an unknown
// or repeated name, a size that is no number from 1 on, etp other than 1 and tp.
absl::StatusOr<comm::MeshShape> ParseLayout(absl::string_view text);

}  // namespace evenkeel::testutil

#endif  // EVENKEEL_TESTING_LAYOUT_TEXT_H_

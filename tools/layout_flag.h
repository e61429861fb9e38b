// A layout as a flag's value: "tp=1,ep=2,dp=4" or with ",etp=1".
#ifndef EVENKEEL_TOOLS_LAYOUT_FLAG_H_
#define EVENKEEL_TOOLS_LAYOUT_FLAG_H_

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "evenkeel/comm/mesh.h"

namespace evenkeel::tools {

// Sizes that are not named are 1; etp that is not named is tp. InvalidArgument, one line, for anything else: an unknown
// or repeated name, a size that is no number from 1 on, etp other than 1 and tp.
absl::StatusOr<comm::MeshShape> ParseLayout(absl::string_view text);

}  // namespace evenkeel::tools

#endif  // EVENKEEL_TOOLS_LAYOUT_FLAG_H_

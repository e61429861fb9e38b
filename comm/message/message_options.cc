#include "evenkeel/comm/message/message_options.h"

#include "absl/strings/str_cat.h"
#include "evenkeel/runtime/base/digest.h"

namespace evenkeel::comm {

absl::Status CheckMessageOptions(const MessageOptions& options) {
  if (options.eager_bytes < 0 || options.eager_bytes > 2560) {
    return absl::InvalidArgumentError(absl::StrCat("eager_bytes ", options.eager_bytes, " is outside [0, 2560]"));
  }
  if (options.piece_bytes < 64 || options.piece_bytes >= (int64_t{1} << 31)) {
    return absl::InvalidArgumentError(absl::StrCat("piece_bytes ", options.piece_bytes, " is outside [64, 2^31)"));
  }
  if (options.window < 1 || options.window > 64) {
    return absl::InvalidArgumentError(absl::StrCat("window ", options.window, " is outside [1, 64]"));
  }
  return absl::OkStatus();
}

uint64_t DigestOfMessageOptions(const MessageOptions& options) {
  return Digest64(absl::StrCat(options.eager_bytes, " ", options.piece_bytes, " ", options.window, " ",
                               options.payload_digest ? 1 : 0));
}

}  // namespace evenkeel::comm

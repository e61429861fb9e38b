#include "evenkeel/testing/layout_text.h"

#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace evenkeel::testutil {
namespace {

absl::Status Bad(absl::string_view text, absl::string_view why) {
  return absl::InvalidArgumentError(
      absl::StrCat("layout '", text, "': ", why, "; wanted such as tp=2,ep=4,dp=4,etp=2"));
}

}  // namespace

absl::StatusOr<comm::MeshShape> ParseLayout(absl::string_view text) {
  comm::MeshShape mesh = {.tp = 0, .ep = 0, .dp = 0, .etp = 0};
  const std::pair<absl::string_view, int*> sizes[] = {
      {"tp", &mesh.tp}, {"ep", &mesh.ep}, {"dp", &mesh.dp}, {"etp", &mesh.etp}};
  for (absl::string_view part : absl::StrSplit(text, ',')) {
    const std::pair<absl::string_view, absl::string_view> words = absl::StrSplit(part, absl::MaxSplits('=', 1));
    int* size = nullptr;
    for (const auto& [name, place] : sizes) {
      if (name == words.first) size = place;
    }
    if (size == nullptr) return Bad(text, absl::StrCat("'", part, "' names none of tp, ep, dp, etp"));
    if (*size != 0) return Bad(text, absl::StrCat(words.first, " is there twice"));
    if (!absl::SimpleAtoi(words.second, size) || *size < 1) {
      return Bad(text, absl::StrCat(words.first, " is '", words.second, "', no size from 1 on"));
    }
  }
  for (int* size : {&mesh.tp, &mesh.ep, &mesh.dp}) {
    if (*size == 0) *size = 1;
  }
  if (mesh.etp == 0) mesh.etp = mesh.tp;
  if (mesh.etp != 1 && mesh.etp != mesh.tp) {
    return Bad(text, absl::StrCat("etp ", mesh.etp, " is neither 1 nor tp ", mesh.tp));
  }
  return mesh;
}

}  // namespace evenkeel::testutil

#include "evenkeel/comm/mpi/hello.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <set>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "evenkeel/runtime/base/error_context.h"

namespace evenkeel::comm {
namespace {

struct Field {
  const char* what;
  std::function<std::string(const Hello&)> text;
};

const std::vector<Field>& Fields() {
  static const auto* fields = new std::vector<Field>{
      {"a rank speaks another language", [](const Hello& h) { return absl::StrFormat("magic %08x", h.magic); }},
      {"protocol versions differ", [](const Hello& h) { return absl::StrFormat("protocol %08x", h.protocol); }},
      {"world sizes differ", [](const Hello& h) { return absl::StrCat("world of ", h.size); }},
      {"builds differ", [](const Hello& h) { return absl::StrFormat("build %016x", h.build); }},
      {"options of the backend differ", [](const Hello& h) { return absl::StrFormat("options %016x", h.options); }},
      {"configurations differ", [](const Hello& h) { return absl::StrFormat("configuration %016x", h.config); }},
  };
  return *fields;
}

ErrorContext StartContext(absl::Span<const Hello> hellos, int own_rank) {
  ErrorContext context;
  context.module = "comm";
  context.operation = "start";
  context.group = "world";
  context.rank = own_rank;
  context.size = static_cast<int>(hellos.size());
  context.next_step = "start all ranks from the same program with the same configuration";
  return context;
}

std::string ProcessText(const Hello& hello) {
  return absl::StrCat(
      "says it is rank ", hello.rank, ": process ", hello.process.pid, " on ",
      std::string(hello.process.host_name, strnlen(hello.process.host_name, sizeof(hello.process.host_name))));
}

// Processes that say they are a rank that another one is.
absl::Status CompareRanks(absl::Span<const Hello> hellos, int own_rank) {
  std::set<size_t> doubled;
  for (size_t i = 0; i < hellos.size(); ++i) {
    const auto claimed = static_cast<size_t>(hellos[i].rank);
    if (claimed == i) continue;
    doubled.insert(i);
    if (claimed < hellos.size()) doubled.insert(claimed);
  }
  if (doubled.empty()) return absl::OkStatus();
  ErrorContext context = StartContext(hellos, own_rank);
  for (const size_t i : doubled) context.findings.push_back({static_cast<int>(i), ProcessText(hellos[i])});
  return MakeError(absl::StatusCode::kAlreadyExists, context, "two processes are the same rank");
}

}  // namespace

absl::Status CompareHellos(absl::Span<const Hello> hellos, int own_rank) {
  for (const Field& field : Fields()) {
    std::vector<RankFinding> findings;
    bool differ = false;
    for (size_t rank = 0; rank < hellos.size(); ++rank) {
      findings.push_back({static_cast<int>(rank), field.text(hellos[rank])});
      differ = differ || findings.back().had != findings.front().had;
    }
    if (!differ) continue;
    ErrorContext context = StartContext(hellos, own_rank);
    context.findings = std::move(findings);
    return MakeError(absl::StatusCode::kFailedPrecondition, context, field.what);
  }
  return CompareRanks(hellos, own_rank);
}

Topology TopologyOfHosts(absl::Span<const Hello> hellos) {
  std::vector<uint64_t> hosts;
  std::vector<int> nodes;
  for (const Hello& hello : hellos) {
    auto found = std::find(hosts.begin(), hosts.end(), hello.process.host);
    if (found == hosts.end()) found = hosts.insert(found, hello.process.host);
    nodes.push_back(static_cast<int>(found - hosts.begin()));
  }
  return Topology(std::move(nodes));
}

}  // namespace evenkeel::comm

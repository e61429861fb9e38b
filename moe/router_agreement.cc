#include "evenkeel/moe/router_agreement.h"

#include <cstring>
#include <limits>
#include <numeric>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "evenkeel/runtime/base/error_context.h"
#include "evenkeel/runtime/base/status_macros.h"
#include "evenkeel/runtime/tensor/tensor.h"

namespace evenkeel::moe {
namespace {

// Larger than any capacity: "this rank could not route".
constexpr int64_t kFailed = std::numeric_limits<int64_t>::max();

bool IsAlone(const comm::Communicator* group) { return group == nullptr || group->size() == 1; }

ErrorContext Where(absl::string_view layer, absl::string_view operation, const comm::Communicator& group) {
  ErrorContext where;
  where.module = "moe";
  where.operation = std::string(operation);
  where.group = std::string(layer);
  where.rank = group.rank();
  where.size = group.size();
  return where;
}

// Waits until nothing queued uses this call's memory any more; the first failure counts.
absl::Status Finish(const absl::Status& status, Stream& stream) {
  const absl::Status synchronized = stream.Synchronize();
  return status.ok() ? synchronized : status;
}

// The rows of all ranks one after the other.
absl::StatusOr<std::vector<int64_t>> Gather(absl::Span<const int64_t> mine, comm::Communicator* group, Device* device,
                                            Stream& stream) {
  const int64_t n = static_cast<int64_t>(mine.size());
  std::vector<int64_t> all(n * group->size());
  EK_ASSIGN_OR_RETURN(Tensor send, Tensor::Create(device, DType::kI64, {n}));
  EK_ASSIGN_OR_RETURN(Tensor receive, Tensor::Create(device, DType::kI64, {n * group->size()}));
  absl::Status status = stream.Copy(send.view().raw(), mine.data(), send.view().num_bytes());
  if (status.ok()) status = group->AllGather(send.view(), receive.view(), stream);
  if (status.ok()) status = stream.Copy(all.data(), receive.view().raw(), receive.view().num_bytes());
  EK_RETURN_IF_ERROR(Finish(status, stream));
  return all;
}

// value = the largest of the group's values.
absl::Status MaxOver(comm::Communicator* group, Device* device, Stream& stream, int64_t* value) {
  if (IsAlone(group)) return absl::OkStatus();
  EK_ASSIGN_OR_RETURN(Tensor scratch, Tensor::Create(device, DType::kI64, {1}));
  absl::Status status = stream.Copy(scratch.view().raw(), value, sizeof(*value));
  if (status.ok()) status = group->AllReduce(scratch.view(), scratch.view(), comm::ReduceOp::kMax, stream);
  if (status.ok()) status = stream.Copy(value, scratch.view().raw(), sizeof(*value));
  return Finish(status, stream);
}

// How often a maximum must pass from EP groups through TP groups until all ranks that hang together have it: 0 unless
// EP groups cut TP groups. Both are blocks of consecutive ranks then, lcm(E, T) ranks hang together, and they are a
// chain of lcm / E EP groups, each sharing a TP group with the next.
int64_t RoundsThroughLanes(const comm::Communicator* ep, const comm::Communicator* tp) {
  if (IsAlone(ep) || IsAlone(tp)) return 0;
  // A lane's own EP group has ranks T apart, one of whole experts consecutive ranks.
  const bool spans_lanes = ep->group().ranks[1] - ep->group().ranks[0] == 1;
  if (!spans_lanes || ep->size() % tp->size() == 0 || tp->size() % ep->size() == 0) return 0;
  return std::lcm<int64_t>(ep->size(), tp->size()) / ep->size() - 1;
}

// One lane's summary of its decision.
struct Summary {
  int64_t failed = 0;
  int64_t tokens = 0;
  int64_t top_k = 0;
  int64_t digest = 0;
};
constexpr int64_t kSummaryNumbers = 4;

Summary SummaryOf(absl::Span<const int64_t> all, int lane) {
  const int64_t* row = all.data() + lane * kSummaryNumbers;
  return {row[0], row[1], row[2], row[3]};
}

// "experts [3, 1] slots [0, -1] weights .." of one lane, from the gathered numbers.
std::string Describe(absl::Span<const int64_t> row, int64_t k) {
  std::string text = "chose";
  for (int64_t j = 0; j < k; ++j) {
    absl::StrAppend(&text, j == 0 ? " " : ", ", "expert ", row[3 * j], " slot ", row[3 * j + 1], " weight bits ",
                    absl::Hex(static_cast<uint32_t>(row[3 * j + 2]), absl::kZeroPad8));
  }
  return text;
}

// All lanes know that the digests differ, so all lanes come here.
absl::Status NameFirstToken(absl::string_view layer, const RoutingDecision& decision, comm::Communicator* tp,
                            Device* device, Stream& stream) {
  const int64_t tokens = decision.num_tokens;
  std::vector<int64_t> mine(tokens);
  for (int64_t t = 0; t < tokens; ++t) mine[t] = static_cast<int64_t>(decision.TokenDigest(t));
  EK_ASSIGN_OR_RETURN(const std::vector<int64_t> digests, Gather(mine, tp, device, stream));
  int64_t token = tokens;
  for (int lane = 1; lane < tp->size(); ++lane) {
    for (int64_t t = 0; t < token; ++t) {
      if (digests[lane * tokens + t] != digests[t]) token = t;
    }
  }
  ErrorContext where = Where(layer, "route", *tp);
  where.next_step = "inputs, gate weights, random streams and masks must be equal on all lanes";
  if (token == tokens) {
    return MakeError(absl::StatusCode::kFailedPrecondition, where,
                     absl::StrCat("lanes agree on every token but not on capacity, here ", decision.capacity));
  }
  std::vector<int64_t> choices;
  for (int64_t r = token * decision.top_k; r < (token + 1) * decision.top_k; ++r) {
    int32_t bits = 0;
    std::memcpy(&bits, &decision.weight[r], sizeof(bits));
    choices.insert(choices.end(), {decision.expert[r], decision.slot[r], bits});
  }
  EK_ASSIGN_OR_RETURN(const std::vector<int64_t> all, Gather(choices, tp, device, stream));
  for (int lane = 0; lane < tp->size(); ++lane) {
    const auto row = absl::MakeConstSpan(all).subspan(lane * choices.size(), choices.size());
    where.findings.push_back({lane, Describe(row, decision.top_k)});
  }
  return MakeError(absl::StatusCode::kFailedPrecondition, where,
                   absl::StrCat("lanes decided differently, first at token ", token));
}

}  // namespace

absl::StatusOr<int64_t> AgreeOnCapacity(absl::string_view layer, const absl::Status& local, int64_t need,
                                        comm::Communicator* ep, comm::Communicator* tp, Device* device,
                                        Stream& stream) {
  int64_t agreed = local.ok() ? need : kFailed;
  EK_RETURN_IF_ERROR(MaxOver(ep, device, stream, &agreed));
  for (int64_t round = RoundsThroughLanes(ep, tp); round > 0; --round) {
    EK_RETURN_IF_ERROR(MaxOver(tp, device, stream, &agreed));
    EK_RETURN_IF_ERROR(MaxOver(ep, device, stream, &agreed));
  }
  if (!local.ok()) return local;
  if (agreed == kFailed) {
    return MakeError(absl::StatusCode::kFailedPrecondition, Where(layer, "route", *ep),
                     "another rank of the EP group could not route its tokens; its own error says why");
  }
  return agreed;
}

absl::Status CompareOverLanes(absl::string_view layer, const absl::Status& local, const RoutingDecision& decision,
                              comm::Communicator* tp, Device* device, Stream& stream) {
  if (IsAlone(tp)) return local;
  std::vector<int64_t> mine = {local.ok() ? 0 : 1, 0, 0, 0};
  if (local.ok()) mine = {0, decision.num_tokens, decision.top_k, static_cast<int64_t>(decision.Digest())};
  EK_ASSIGN_OR_RETURN(const std::vector<int64_t> all, Gather(mine, tp, device, stream));
  if (!local.ok()) return local;
  ErrorContext where = Where(layer, "route", *tp);
  bool extents_differ = false;
  bool digests_differ = false;
  const Summary first = SummaryOf(all, 0);
  for (int lane = 0; lane < tp->size(); ++lane) {
    const Summary other = SummaryOf(all, lane);
    if (other.failed != 0) where.findings.push_back({lane, "could not route its tokens"});
    extents_differ |= other.tokens != first.tokens || other.top_k != first.top_k;
    digests_differ |= other.digest != first.digest;
  }
  if (!where.findings.empty()) {
    return MakeError(absl::StatusCode::kFailedPrecondition, where, "a lane failed; its own error says why");
  }
  if (extents_differ) {
    for (int lane = 0; lane < tp->size(); ++lane) {
      const Summary other = SummaryOf(all, lane);
      where.findings.push_back(
          {lane, absl::StrCat("has ", other.tokens, " tokens with ", other.top_k, " routes each")});
    }
    return MakeError(absl::StatusCode::kFailedPrecondition, where, "lanes route different numbers of tokens");
  }
  return digests_differ ? NameFirstToken(layer, decision, tp, device, stream) : absl::OkStatus();
}

}  // namespace evenkeel::moe

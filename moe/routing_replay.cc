#include "evenkeel/moe/routing_replay.h"

#include <bit>
#include <cstring>
#include <type_traits>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/types/span.h"
#include "evenkeel/runtime/base/digest.h"
#include "evenkeel/runtime/base/status_macros.h"

namespace evenkeel::moe {
namespace {

static_assert(std::endian::native == std::endian::little, "the file format is little-endian, and so are its writers");

constexpr char kMagic[] = "evenkeel routing 1\n";
constexpr size_t kMagicBytes = sizeof(kMagic) - 1;
constexpr uint8_t kDropless = 1;
constexpr uint8_t kMasked = 2;

template <typename T>
void Put(const T& value, std::string* out) {
  static_assert(std::is_trivially_copyable_v<T>);
  out->append(reinterpret_cast<const char*>(&value), sizeof(T));
}
template <typename T>
void PutAll(const std::vector<T>& values, std::string* out) {
  out->append(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T));
}

// Reads values from the front; refuses what the bytes do not hold.
class Reader {
 public:
  explicit Reader(absl::string_view bytes) : bytes_(bytes) {}
  bool empty() const { return bytes_.empty(); }

  template <typename T>
  absl::Status Get(T* value) {
    if (bytes_.size() < sizeof(T)) return Cut(sizeof(T));
    std::memcpy(value, bytes_.data(), sizeof(T));
    bytes_.remove_prefix(sizeof(T));
    return absl::OkStatus();
  }
  // `count` comes from the file: it is compared with what is left before anything is allocated.
  template <typename T>
  absl::Status GetAll(int64_t count, std::vector<T>* values) {
    if (count < 0 || static_cast<uint64_t>(count) > bytes_.size() / sizeof(T)) return Cut(count);
    values->resize(count);
    if (count > 0) std::memcpy(values->data(), bytes_.data(), count * sizeof(T));
    bytes_.remove_prefix(count * sizeof(T));
    return absl::OkStatus();
  }
  absl::Status GetString(std::string* text) {
    uint32_t length = 0;
    EK_RETURN_IF_ERROR(Get(&length));
    if (length > bytes_.size()) return Cut(length);
    text->assign(bytes_.data(), length);
    bytes_.remove_prefix(length);
    return absl::OkStatus();
  }

 private:
  absl::Status Cut(int64_t wanted) const {
    return absl::DataLossError(
        absl::StrCat("routing log: ", wanted, " more values are announced, ", bytes_.size(), " bytes are left"));
  }
  absl::string_view bytes_;
};

void PutDecision(const RoutingDecision& d, std::string* out) {
  Put(d.num_tokens, out);
  Put(d.num_experts, out);
  Put(d.top_k, out);
  Put(d.capacity, out);
  Put(d.slot_classes, out);
  Put(static_cast<uint8_t>((d.dropless ? kDropless : 0) | (d.token_mask.empty() ? 0 : kMasked)), out);
  Put(d.active_tokens, out);
  PutAll(d.expert, out);
  PutAll(d.slot, out);
  PutAll(d.weight, out);
  PutAll(d.assigned, out);
  PutAll(d.kept, out);
  PutAll(d.balance_count, out);
  PutAll(d.token_mask, out);
}

absl::Status GetDecision(Reader* reader, RoutingDecision* d) {
  uint8_t flags = 0;
  EK_RETURN_IF_ERROR(reader->Get(&d->num_tokens));
  EK_RETURN_IF_ERROR(reader->Get(&d->num_experts));
  EK_RETURN_IF_ERROR(reader->Get(&d->top_k));
  EK_RETURN_IF_ERROR(reader->Get(&d->capacity));
  EK_RETURN_IF_ERROR(reader->Get(&d->slot_classes));
  EK_RETURN_IF_ERROR(reader->Get(&flags));
  EK_RETURN_IF_ERROR(reader->Get(&d->active_tokens));
  int64_t routes = 0;
  if (d->num_tokens < 0 || d->top_k < 1 || d->num_experts < 1 ||
      __builtin_mul_overflow(d->num_tokens, int64_t{d->top_k}, &routes)) {
    return absl::DataLossError(
        absl::StrCat("routing log: ", d->num_tokens, " tokens, k ", d->top_k, ", ", d->num_experts, " experts"));
  }
  d->dropless = (flags & kDropless) != 0;
  EK_RETURN_IF_ERROR(reader->GetAll(routes, &d->expert));
  EK_RETURN_IF_ERROR(reader->GetAll(routes, &d->slot));
  EK_RETURN_IF_ERROR(reader->GetAll(routes, &d->weight));
  EK_RETURN_IF_ERROR(reader->GetAll(d->num_experts, &d->assigned));
  EK_RETURN_IF_ERROR(reader->GetAll(d->num_experts, &d->kept));
  EK_RETURN_IF_ERROR(reader->GetAll(d->num_experts, &d->balance_count));
  return reader->GetAll((flags & kMasked) != 0 ? d->num_tokens : 0, &d->token_mask);
}

// "expert 3 slot 0, expert 1 dropped".
std::string Routes(const RoutingDecision& d, int64_t token) {
  std::vector<std::string> routes;
  for (int64_t r = token * d.top_k; r < (token + 1) * d.top_k; ++r) {
    routes.push_back(absl::StrCat("expert ", d.expert[r], d.slot[r] < 0 ? " dropped" : " slot ",
                                  d.slot[r] < 0 ? "" : absl::StrCat(d.slot[r])));
  }
  return absl::StrJoin(routes, ", ");
}

absl::Status CompareDecisions(const RoutingKey& key, const RoutingDecision& a, const RoutingDecision& b) {
  if (a.num_tokens != b.num_tokens || a.num_experts != b.num_experts || a.top_k != b.top_k ||
      a.capacity != b.capacity || a.dropless != b.dropless) {
    return absl::FailedPreconditionError(absl::StrCat(
        key.ToString(), ": ", a.num_tokens, " tokens, ", a.num_experts, " experts, k ", a.top_k, ", capacity ",
        a.capacity, " against ", b.num_tokens, ", ", b.num_experts, ", ", b.top_k, ", ", b.capacity));
  }
  for (int64_t r = 0; r < a.num_routes(); ++r) {
    if (a.expert[r] == b.expert[r] && a.slot[r] == b.slot[r]) continue;
    const int64_t token = r / a.top_k;
    return absl::FailedPreconditionError(
        absl::StrCat(key.ToString(), ": token ", token, " went to ", Routes(a, token), " against ", Routes(b, token)));
  }
  return absl::OkStatus();
}

}  // namespace

std::string RoutingKey::ToString() const {
  return absl::StrCat("layer \"", layer, "\" step ", step, " source ", source, " pass ", pass);
}

absl::Status RoutingLog::Record(const RoutingKey& key, const RoutingDecision& decision) {
  EK_RETURN_IF_ERROR(decision.Validate());
  RoutingDecision kept = decision;
  kept.score.clear();
  kept.softmax.clear();
  kept.log_sum_exp.clear();
  kept.score.shrink_to_fit();
  kept.softmax.shrink_to_fit();
  kept.log_sum_exp.shrink_to_fit();
  kept.balance_count.resize(kept.num_experts, 0);
  if (!decisions_.emplace(key, std::move(kept)).second) {
    return absl::AlreadyExistsError(absl::StrCat(key.ToString(), " is recorded twice"));
  }
  return absl::OkStatus();
}

absl::StatusOr<const RoutingDecision*> RoutingLog::Find(const RoutingKey& key) const {
  const auto found = decisions_.find(key);
  if (found == decisions_.end()) {
    return absl::NotFoundError(absl::StrCat(key.ToString(), " was not recorded; the log holds ", size(), " decisions"));
  }
  return &found->second;
}

absl::Status RoutingLog::Compare(const RoutingLog& other) const {
  for (const auto& [key, decision] : decisions_) {
    EK_ASSIGN_OR_RETURN(const RoutingDecision* theirs, other.Find(key));
    EK_RETURN_IF_ERROR(CompareDecisions(key, decision, *theirs));
  }
  for (const auto& [key, decision] : other.decisions_) EK_RETURN_IF_ERROR(Find(key).status());
  return absl::OkStatus();
}

std::string RoutingLog::Serialize() const {
  std::string out(kMagic, kMagicBytes);
  Put(static_cast<uint64_t>(decisions_.size()), &out);
  for (const auto& [key, decision] : decisions_) {
    Put(static_cast<uint32_t>(key.layer.size()), &out);
    out += key.layer;
    Put(key.step, &out);
    Put(key.source, &out);
    Put(key.pass, &out);
    PutDecision(decision, &out);
  }
  Put(Digest64(out), &out);
  return out;
}

absl::StatusOr<RoutingLog> RoutingLog::Parse(absl::string_view bytes) {
  if (bytes.size() < kMagicBytes + sizeof(uint64_t) || bytes.substr(0, kMagicBytes) != kMagic) {
    return absl::DataLossError("routing log: the first line is not \"evenkeel routing 1\"");
  }
  uint64_t digest = 0;
  std::memcpy(&digest, bytes.data() + bytes.size() - sizeof(digest), sizeof(digest));
  bytes.remove_suffix(sizeof(digest));
  if (digest != Digest64(bytes)) return absl::DataLossError("routing log: the checksum does not match the content");
  Reader reader(bytes.substr(kMagicBytes));
  uint64_t count = 0;
  EK_RETURN_IF_ERROR(reader.Get(&count));
  RoutingLog log;
  for (uint64_t i = 0; i < count; ++i) {
    RoutingKey key;
    RoutingDecision decision;
    EK_RETURN_IF_ERROR(reader.GetString(&key.layer));
    EK_RETURN_IF_ERROR(reader.Get(&key.step));
    EK_RETURN_IF_ERROR(reader.Get(&key.source));
    EK_RETURN_IF_ERROR(reader.Get(&key.pass));
    EK_RETURN_IF_ERROR(GetDecision(&reader, &decision));
    const absl::Status recorded = log.Record(key, decision);
    if (!recorded.ok()) return absl::DataLossError(absl::StrCat("routing log: ", recorded.message()));
  }
  if (!reader.empty()) return absl::DataLossError("routing log: bytes behind the last decision");
  return log;
}

}  // namespace evenkeel::moe

#include "evenkeel/testing/tap_exchange.h"

#include <cstring>
#include <string>
#include <utility>

#include "evenkeel/runtime/base/status_macros.h"
#include "evenkeel/runtime/tensor/tensor_view.h"
#include "evenkeel/testing/gather_bytes.h"

namespace evenkeel::testutil {
namespace {

// In front of each tap's name and elements.
struct Header {
  int64_t name_bytes = 0;
  int64_t batch = 0;
  int64_t elements = 0;
  TapKind kind = TapKind::kActivation;
  DType dtype = DType::kF32;
};

void Append(const void* data, size_t bytes, std::vector<uint8_t>* to) {
  const auto* from = static_cast<const uint8_t*>(data);
  to->insert(to->end(), from, from + bytes);
}

// The taps that one rank has sent.
void ShowAll(const uint8_t* next, const uint8_t* end, int rank, int64_t step, GlobalRecord* record) {
  while (next != end) {
    Header header;
    std::memcpy(&header, next, sizeof(header));
    next += sizeof(header);
    const std::string name(reinterpret_cast<const char*>(next), header.name_bytes);
    next += header.name_bytes;
    const int64_t bytes = header.elements * SizeOf(header.dtype);
    std::vector<uint64_t> aligned((bytes + 7) / 8);
    if (bytes > 0) std::memcpy(aligned.data(), next, bytes);
    next += bytes;
    // A record needs the elements alone: shapes of parameters are in their descriptions.
    record->Show(
        rank, step,
        {header.kind, name, ConstTensorView(aligned.data(), header.dtype, Shape({header.elements})), header.batch});
  }
}

}  // namespace

void TapExchange::Keep(const Tap& tap) {
  Header header;
  header.name_bytes = static_cast<int64_t>(tap.name.size());
  header.batch = tap.batch;
  header.elements = tap.value.num_elements();
  header.kind = tap.kind;
  header.dtype = tap.value.dtype();
  Append(&header, sizeof(header), &kept_);
  Append(tap.name.data(), tap.name.size(), &kept_);
  Append(tap.value.raw(), tap.value.num_bytes(), &kept_);
}

void TapExchange::EndStep(int64_t step, bool takes_part) {
  if (status_.ok()) status_ = Exchange(step, takes_part);
  kept_.clear();
}

absl::Status TapExchange::Exchange(int64_t step, bool takes_part) {
  kept_.push_back(takes_part ? 1 : 0);
  EK_ASSIGN_OR_RETURN(const GatheredBytes all, GatherBytes(kept_, world_, stream_));
  if (record_ == nullptr) return absl::OkStatus();
  const uint8_t* next = all.bytes.data();
  for (int rank = 0; rank < world_.size(); ++rank) {
    const uint8_t* const last = next + all.sizes[rank] - 1;
    ShowAll(next, last, rank, step, record_);
    if (*last != 0) record_->EndStep(step);
    next = last + 1;
  }
  return absl::OkStatus();
}

}  // namespace evenkeel::testutil

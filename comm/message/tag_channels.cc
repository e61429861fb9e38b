#include "evenkeel/comm/message/tag_channels.h"

namespace evenkeel::comm {
namespace {

constexpr size_t kBytes = (kNumTagChannels + 7) / 8;

}  // namespace

std::optional<int64_t> BusyChannels::FirstFree(int64_t epoch) const {
  for (int64_t next = epoch; next < epoch + kNumTagChannels; ++next) {
    if (!busy_.test(static_cast<size_t>(TagChannel(next) - 1))) return next;
  }
  return std::nullopt;
}

std::string BusyChannels::Encode() const {
  std::string bytes(kBytes, '\0');
  for (size_t i = 0; i < busy_.size(); ++i) {
    if (busy_.test(i)) bytes[i / 8] = static_cast<char>(bytes[i / 8] | (1 << (i % 8)));
  }
  return bytes;
}

std::optional<BusyChannels> BusyChannels::Decode(absl::string_view bytes) {
  if (bytes.size() != kBytes) return std::nullopt;
  BusyChannels channels;
  for (size_t i = 0; i < channels.busy_.size(); ++i) {
    if ((bytes[i / 8] >> (i % 8) & 1) != 0) channels.busy_.set(i);
  }
  return channels;
}

}  // namespace evenkeel::comm

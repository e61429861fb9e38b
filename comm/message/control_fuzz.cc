// Control messages, statuses and channel lists from arbitrary bytes: nothing crashes, nothing is taken that does not
// come back as the same bytes, no memory is taken for a length that was only announced.
#include <cstdint>
#include <optional>
#include <string>

#include "absl/strings/string_view.h"
#include "evenkeel/comm/message/mailroom.h"
#include "evenkeel/comm/message/tag_channels.h"
#include "evenkeel/runtime/base/fuzz_input.h"
#include "evenkeel/runtime/base/status_macros.h"

namespace evenkeel::comm {
namespace {

std::string AnyBytes(FuzzInput& input, int64_t most) {
  std::string bytes(static_cast<size_t>(input.Between(0, most)), '\0');
  for (char& byte : bytes) byte = static_cast<char>(input.Byte());
  return bytes;
}

void FuzzControl(FuzzInput& input) {
  int64_t serial = 0;
  const std::string noise = AnyBytes(input, 200);
  EK_CHECK(!DecodeControl(noise, &serial).ok());  // a digest of 64 bits guards every message
  const int64_t kind = input.Between(0, 7);
  const ControlMessage message{.kind = static_cast<ControlMessage::Kind>(kind),
                               .pair = input.Bool(),
                               .in_agree = input.Bool(),
                               .id = input.Between(INT64_MIN, INT64_MAX),
                               .a = input.Between(INT64_MIN, INT64_MAX),
                               .b = input.Between(INT64_MIN, INT64_MAX),
                               .body = AnyBytes(input, 100)};
  std::string bytes = EncodeControl(message, 7);
  const auto back = DecodeControl(bytes, &serial);
  EK_CHECK(back.ok() == (kind >= 1 && kind <= static_cast<uint32_t>(ControlMessage::Kind::kWaiting)));
  if (back.ok()) EK_CHECK(serial == 7 && EncodeControl(*back, serial) == bytes);
  // One byte changed, or the end cut off or grown.
  const auto at = static_cast<size_t>(input.Between(0, static_cast<int64_t>(bytes.size()) - 1));
  switch (input.Between(0, 2)) {
    case 0:
      bytes[at] = static_cast<char>(bytes[at] ^ static_cast<char>(input.Between(1, 255)));
      break;
    case 1:
      bytes.resize(at);
      break;
    default:
      bytes.push_back(static_cast<char>(input.Byte()));
  }
  EK_CHECK(!DecodeControl(bytes, &serial).ok());
}

// Noise never gets past the code: here the code and the lengths are about right.
std::string AlmostStatus(FuzzInput& input) {
  std::string bytes;
  const auto add = [&bytes](int64_t number) {
    const auto word = static_cast<uint32_t>(number);
    bytes.append(reinterpret_cast<const char*>(&word), sizeof(word));
  };
  add(input.Between(0, 18));
  for (int64_t parts = input.Between(0, 6); parts > 0; --parts) {
    const std::string part = AnyBytes(input, 30);
    const bool honest = input.Between(0, 7) != 0;
    add(honest ? static_cast<int64_t>(part.size()) : input.Between(0, UINT32_MAX));
    bytes += part;
  }
  return bytes;
}

void FuzzStatus(FuzzInput& input) {
  const std::string bytes = input.Bool() ? AnyBytes(input, 200) : AlmostStatus(input);
  const absl::Status status = DecodeStatus(bytes);
  EK_CHECK(!status.ok() && status.message().size() <= bytes.size() + 64);
  EK_CHECK(DecodeStatus(EncodeStatus(status)) == status);
}

void FuzzChannels(FuzzInput& input) {
  BusyChannels busy;
  for (int64_t i = input.Between(0, 40); i > 0; --i) busy.Add(input.Between(0, INT64_MAX - 2 * kNumTagChannels));
  const auto back = BusyChannels::Decode(busy.Encode());
  EK_CHECK(back.has_value() && back->count() == busy.count());
  const int64_t epoch = input.Between(0, INT64_MAX - 2 * kNumTagChannels);
  const std::optional<int64_t> free = busy.FirstFree(epoch);
  EK_CHECK(free.has_value() && *free >= epoch);
  busy.Add(*free);
  EK_CHECK(busy.count() == back->count() + 1);
  EK_CHECK(!BusyChannels::Decode(AnyBytes(input, 200)).has_value());
}

}  // namespace
}  // namespace evenkeel::comm

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  evenkeel::FuzzInput input(data, size);
  switch (input.Between(0, 2)) {
    case 0:
      evenkeel::comm::FuzzControl(input);
      break;
    case 1:
      evenkeel::comm::FuzzStatus(input);
      break;
    default:
      evenkeel::comm::FuzzChannels(input);
  }
  return 0;
}

// Orders from text. The built-in orders and a user's file come through this door.
//
//   EK_ASSIGN_OR_RETURN(Order order, ParseOrder(text, "mine.textproto"));
#ifndef EVENKEEL_MOE_ORDER_PARSER_H_
#define EVENKEEL_MOE_ORDER_PARSER_H_

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "evenkeel/moe/order.h"

namespace evenkeel::moe {

// Longer texts and programs are refused before any work is done on them.
inline constexpr int64_t kMaxOrderTextBytes = 64 * 1024;
inline constexpr int kMaxOrderSteps = 64;
inline constexpr int kMaxOrderChunks = 64;
inline constexpr int kMaxOrderNameBytes = 64;

// Parses a textproto of OrderProto (order.proto). `source` names the text in messages ("FILE:LINE: ..."). Fields that
// have only one sensible value may be left out: `axis` everywhere, `dim` where the value's form decides is not among
// them. Says nothing about types: see CheckOrder.
// InvalidArgument with source and line on a syntax error, an unknown or missing field, or a size over a limit.
absl::StatusOr<Order> ParseOrder(absl::string_view text, absl::string_view source);

// A text that ParseOrder reads back as an equal order (but for lines).
std::string FormatOrder(const Order& order);

}  // namespace evenkeel::moe

#endif  // EVENKEEL_MOE_ORDER_PARSER_H_

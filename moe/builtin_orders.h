// The orders that come with the library, and a registry for a user's own. All are textprotos that pass through
// ParseOrder and CheckOrder.
//
//   EK_ASSIGN_OR_RETURN(Order order, FindOrder("fused"));
//
// A consumer adds one at link time (alwayslink library), from C++ or by passing a file's text to ParseOrder:
//
//   EK_REGISTER_MOE_ORDER(my_order, R"pb(name: "mine" step { ... } ...)pb");
#ifndef EVENKEEL_MOE_BUILTIN_ORDERS_H_
#define EVENKEEL_MOE_BUILTIN_ORDERS_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "evenkeel/moe/order.h"

namespace evenkeel::moe {

// The order of that name, a registered one or made from one (order_rewrites.h): "overlapped(x)" is order x in 2 chunks,
// "overlapped(x:4)" in 4, "two_level(x)" is x with exchanges in two levels, "per_node(x)" x with one row per token and
// node between nodes; x may itself be such a name.
// NotFound listing what is linked; InvalidArgument for what cannot be made of x.
absl::StatusOr<Order> FindOrder(absl::string_view name);

// The text of a registered order, as a user would write it. NotFound likewise.
absl::StatusOr<std::string> FindOrderText(absl::string_view name);

// Names in order of registration: the built-in ones first.
std::vector<std::string> OrderNames();

// Those, and the two_level(x) and per_node(x) that can be made of them: what there is to choose from over several
// nodes.
std::vector<std::string> OrderNamesOverNodes();

// Adds an order; ends the process when the text does not parse or the name is taken. For static initialisers.
bool RegisterOrderOrDie(absl::string_view text);

#define EK_REGISTER_MOE_ORDER(identifier, text) \
  [[maybe_unused]] static const bool ek_moe_order_##identifier = ::evenkeel::moe::RegisterOrderOrDie(text)

}  // namespace evenkeel::moe

#endif  // EVENKEEL_MOE_BUILTIN_ORDERS_H_

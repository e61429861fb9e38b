#include "evenkeel/moe/builtin_orders.h"

#include <cstdio>
#include <cstdlib>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "absl/synchronization/mutex.h"
#include "evenkeel/moe/order_parser.h"
#include "evenkeel/moe/order_rewrites.h"
#include "evenkeel/moe/order_types.h"
#include "evenkeel/runtime/base/status_macros.h"

namespace evenkeel::moe {
namespace {

constexpr absl::string_view kBuiltinOrders[] = {
    R"pb(
      name: "reference"
      note: "every lane exchanges all slots; expert sums are all-reduced"
      expert_layout: TENSOR_PARALLEL
      step { kind: DISPATCH dim: SLOTS }
      step { kind: ALL_TO_ALL axis: EP }
      step { kind: COPY axis: TP }
      step { kind: EXPERTS }
      step { kind: ALL_REDUCE axis: TP }
      step { kind: ALL_TO_ALL axis: EP }
      step { kind: COMBINE }
    )pb",
    R"pb(
      name: "drop_gather"
      note: "each lane exchanges its slots; gathered for the experts, dropped and gathered again behind them"
      expert_layout: TENSOR_PARALLEL
      step { kind: DISPATCH dim: SLOTS }
      step { kind: SLICE axis: TP dim: SLOTS }
      step { kind: ALL_TO_ALL axis: EP }
      step { kind: ALL_GATHER axis: TP dim: SLOTS to: INVARIANT }
      step { kind: COPY axis: TP }
      step { kind: EXPERTS }
      step { kind: ALL_REDUCE axis: TP }
      step { kind: SLICE axis: TP dim: SLOTS }
      step { kind: ALL_TO_ALL axis: EP }
      step { kind: ALL_GATHER axis: TP dim: SLOTS to: INVARIANT }
      step { kind: COMBINE }
    )pb",
    R"pb(
      name: "unsharded"
      note: "whole experts, EP spans the lanes: each lane sends its slots to where the expert is"
      expert_layout: WHOLE
      step { kind: DISPATCH dim: SLOTS }
      step { kind: SLICE axis: TP dim: SLOTS }
      step { kind: ALL_TO_ALL axis: EP }
      step { kind: EXPERTS }
      step { kind: ALL_TO_ALL axis: EP }
      step { kind: ALL_GATHER axis: TP dim: SLOTS to: INVARIANT }
      step { kind: COMBINE }
    )pb",
    R"pb(
      name: "fused"
      note: "drop_gather with all-reduce and drop as one reduce-scatter"
      expert_layout: TENSOR_PARALLEL
      step { kind: DISPATCH dim: SLOTS }
      step { kind: SLICE axis: TP dim: SLOTS }
      step { kind: ALL_TO_ALL axis: EP }
      step { kind: ALL_GATHER axis: TP dim: SLOTS to: REPLICATED }
      step { kind: EXPERTS }
      step { kind: REDUCE_SCATTER axis: TP dim: SLOTS }
      step { kind: ALL_TO_ALL axis: EP }
      step { kind: ALL_GATHER axis: TP dim: SLOTS to: INVARIANT }
      step { kind: COMBINE }
    )pb",
    R"pb(
      name: "token_sliced"
      note: "each lane routes its own tokens' rows, no padding; tokens instead of slots are gathered at the end"
      expert_layout: ANY_LAYOUT
      step { kind: SLICE axis: TP dim: TOKENS }
      step { kind: DISPATCH dim: ROWS }
      step { kind: ALL_TO_ALL_V axis: EP }
      step { kind: ALL_GATHER axis: TP dim: ROWS to: REPLICATED when: TENSOR_PARALLEL_EXPERTS }
      step { kind: EXPERTS }
      step { kind: REDUCE_SCATTER axis: TP dim: ROWS when: TENSOR_PARALLEL_EXPERTS }
      step { kind: ALL_TO_ALL_V axis: EP }
      step { kind: COMBINE }
      step { kind: ALL_GATHER axis: TP dim: TOKENS to: INVARIANT }
    )pb",
    R"pb(
      name: "dedup"
      note: "as token_sliced, but a token goes once to each rank that needs it and comes back as one sum"
      expert_layout: ANY_LAYOUT
      step { kind: SLICE axis: TP dim: TOKENS }
      step { kind: DISPATCH dim: DESTINATIONS }
      step { kind: ALL_TO_ALL_V axis: EP }
      step { kind: ALL_GATHER axis: TP dim: DESTINATIONS to: REPLICATED when: TENSOR_PARALLEL_EXPERTS }
      step { kind: EXPAND }
      step { kind: EXPERTS }
      step { kind: FOLD }
      step { kind: REDUCE_SCATTER axis: TP dim: SUMS when: TENSOR_PARALLEL_EXPERTS }
      step { kind: ALL_TO_ALL_V axis: EP }
      step { kind: COMBINE }
      step { kind: ALL_GATHER axis: TP dim: TOKENS to: INVARIANT }
    )pb",
};

struct Registered {
  std::string text;
  Order order;
};

absl::StatusOr<Registered> Load(absl::string_view text) {
  Registered entry = {.text = std::string(text), .order = {}};
  EK_ASSIGN_OR_RETURN(entry.order, ParseOrder(text, "registered order"));
  EK_RETURN_IF_ERROR(CheckOrder(entry.order).status());
  return entry;
}

// All orders of this program. Grows during static initialisation, then only read.
class Registry {
 public:
  static Registry& Get() {
    static Registry* registry = new Registry();
    return *registry;
  }

  bool AddOrDie(absl::string_view text) {
    absl::StatusOr<Registered> entry = Load(text);
    EK_CHECK_OK(entry);
    absl::MutexLock lock(&mutex_);
    for (const Registered& other : entries_) {
      if (other.order.name != entry->order.name) continue;
      std::fprintf(stderr, "moe order '%s' is registered twice\n", other.order.name.c_str());
      std::abort();
    }
    entries_.push_back(*std::move(entry));
    return true;
  }

  absl::StatusOr<Registered> Find(absl::string_view name) {
    absl::MutexLock lock(&mutex_);
    for (const Registered& entry : entries_) {
      if (entry.order.name == name) return entry;
    }
    return absl::NotFoundError(absl::StrCat("no order named '", name, "'; linked are: ", absl::StrJoin(Names(), ", "),
                                            "; or give the path of an order file"));
  }

  std::vector<std::string> NamesLocked() {
    absl::MutexLock lock(&mutex_);
    return Names();
  }

 private:
  Registry() {
    for (absl::string_view text : kBuiltinOrders) {
      absl::StatusOr<Registered> entry = Load(text);
      EK_CHECK_OK(entry);
      entries_.push_back(*std::move(entry));
    }
  }

  std::vector<std::string> Names() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    std::vector<std::string> names;
    for (const Registered& entry : entries_) names.push_back(entry.order.name);
    return names;
  }

  absl::Mutex mutex_;
  std::vector<Registered> entries_ ABSL_GUARDED_BY(mutex_);
};

// The inner order of "overlapped(x)" or "overlapped(x:n)".
absl::StatusOr<Order> Overlapped(absl::string_view name, absl::string_view inner) {
  int chunks = 2;
  const size_t colon = inner.rfind(':');
  if (colon != absl::string_view::npos && inner.find(')', colon) == absl::string_view::npos) {
    if (!absl::SimpleAtoi(inner.substr(colon + 1), &chunks)) chunks = 0;  // refused below
    inner = inner.substr(0, colon);
  }
  EK_ASSIGN_OR_RETURN(Order order, FindOrder(inner));
  const absl::StatusOr<Order> rewritten = InChunks(std::move(order), chunks);
  if (rewritten.ok()) return rewritten;
  return absl::Status(rewritten.status().code(), absl::StrCat("'", name, "': ", rewritten.status().message()));
}

}  // namespace

absl::StatusOr<Order> FindOrder(absl::string_view name) {
  absl::string_view inner = name;
  absl::StatusOr<Order> order = absl::UnknownError("");
  if (name.size() > kMaxOrderNameBytes) {
    return absl::NotFoundError(absl::StrCat("an order's name has at most ", kMaxOrderNameBytes, " bytes"));
  }
  if (absl::ConsumePrefix(&inner, "overlapped(") && absl::ConsumeSuffix(&inner, ")")) {
    EK_ASSIGN_OR_RETURN(order, Overlapped(name, inner));
  } else if (absl::ConsumePrefix(&inner, "two_level(") && absl::ConsumeSuffix(&inner, ")")) {
    EK_ASSIGN_OR_RETURN(const Order plain, FindOrder(inner));
    EK_ASSIGN_OR_RETURN(order, InTwoLevels(plain));
  } else if (absl::ConsumePrefix(&inner, "per_node(") && absl::ConsumeSuffix(&inner, ")")) {
    EK_ASSIGN_OR_RETURN(const Order plain, FindOrder(inner));
    EK_ASSIGN_OR_RETURN(order, OncePerNode(plain));
  } else {
    EK_ASSIGN_OR_RETURN(Registered entry, Registry::Get().Find(name));
    return std::move(entry.order);
  }
  order->name = std::string(name);
  return order;
}

absl::StatusOr<std::string> FindOrderText(absl::string_view name) {
  EK_ASSIGN_OR_RETURN(Registered entry, Registry::Get().Find(name));
  return std::move(entry.text);
}

std::vector<std::string> OrderNames() { return Registry::Get().NamesLocked(); }

std::vector<std::string> OrderNamesOverNodes() {
  std::vector<std::string> names = OrderNames();
  for (const std::string& name : OrderNames()) {
    for (const std::string& made : {absl::StrCat("two_level(", name, ")"), absl::StrCat("per_node(", name, ")")}) {
      if (FindOrder(made).ok()) names.push_back(made);
    }
  }
  return names;
}

bool RegisterOrderOrDie(absl::string_view text) { return Registry::Get().AddOrDie(text); }

}  // namespace evenkeel::moe

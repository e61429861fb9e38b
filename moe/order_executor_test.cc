// Every step against its derived adjoint: <y, M x> = <M' y, x>, with each value counted as its placement says.
#include "evenkeel/moe/order_executor.h"

#include <cmath>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "evenkeel/comm/in_process.h"
#include "evenkeel/comm/mesh.h"
#include "evenkeel/comm/testing/run_ranks.h"
#include "evenkeel/comm/topology.h"
#include "evenkeel/moe/exchange_levels.h"
#include "evenkeel/moe/order.h"
#include "evenkeel/moe/order_adjoint.h"
#include "evenkeel/moe/order_schedule.h"
#include "evenkeel/moe/order_types.h"
#include "evenkeel/moe/routing_decision.h"
#include "evenkeel/moe/row_maps.h"
#include "evenkeel/runtime/base/philox.h"
#include "evenkeel/runtime/base/status_matchers.h"
#include "evenkeel/runtime/device/host_device.h"
#include "evenkeel/runtime/tensor/tensor.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel::moe {
namespace {

constexpr int64_t kTokens = 7, kHidden = 3, kExperts = 4, kTopK = 2, kCapacity = 4;

// A routing with dropped routes, different on each source. Slots count kept routes in token order.
RoutingDecision Decision(int source) {
  RoutingDecision d;
  d.num_tokens = kTokens;
  d.num_experts = kExperts;
  d.top_k = kTopK;
  d.capacity = kCapacity;
  d.assigned.resize(kExperts);
  d.kept.resize(kExperts);
  const PhiloxStream stream(PhiloxKey(11).Add(static_cast<uint64_t>(source)));
  for (int64_t t = 0; t < kTokens; ++t) {
    const int first = static_cast<int>(stream.Below(t, kExperts));
    for (int j = 0; j < kTopK; ++j) {
      const int expert = (first + j * (1 + static_cast<int>(stream.Below(100 + t, kExperts - 1)))) % kExperts;
      ++d.assigned[expert];
      const bool keep = d.kept[expert] < kCapacity;
      d.expert.push_back(expert);
      d.slot.push_back(keep ? static_cast<int32_t>(d.kept[expert]++) : -1);
      d.weight.push_back(keep ? 0.25f + stream.Uniform(200 + t * kTopK + j) : 0);
    }
  }
  d.active_tokens = kTokens;
  return d;
}

// A program of linear steps that starts from a value of any type.
struct Program {
  std::string name;
  ValueType start;
  ExpertLayout layout = ExpertLayout::kTensorParallel;
  std::vector<Step> steps;
};

Step Make(StepKind kind, Dim dim = Dim::kUnset, Placement to = Placement::kUnset) {
  Step step;
  step.kind = kind;
  step.dim = dim;
  step.to = to;
  if (kind == StepKind::kAllToAll || kind == StepKind::kAllToAllV) step.axis = comm::Axis::kEp;
  return step;
}

Step MakeLevel(StepKind kind, Level level) {
  Step step = Make(kind);
  step.level = level;
  return step;
}

constexpr AxisType kI = {Placement::kInvariant, Dim::kUnset};
constexpr AxisType kR = {Placement::kReplicated, Dim::kUnset};
constexpr AxisType kP = {Placement::kPartial, Dim::kUnset};
constexpr AxisType V(Dim dim) { return {Placement::kVarying, dim}; }
constexpr AxisType kSources = {Placement::kVarying, Dim::kSources};
constexpr AxisType kAtExperts = {Placement::kVarying, Dim::kExperts};
constexpr AxisType kHalfWay = {Placement::kVarying, Dim::kNodes};

// Each step alone where its input can be made up, else with what must come before it.
std::vector<Program> Programs() {
  using enum StepKind;
  const ValueType tokens = {Dim::kTokens, kI, kSources};
  const auto slots = [](AxisType tp, AxisType ep = kSources) { return ValueType{Dim::kSlots, tp, ep}; };
  constexpr ExpertLayout kTp = ExpertLayout::kTensorParallel;
  const Step slice_tokens = Make(kSlice, Dim::kTokens), rows = Make(kDispatch, Dim::kRows), exchange = Make(kAllToAllV);
  std::vector<Program> programs = {
      {"slice tokens", tokens, kTp, {slice_tokens}},
      {"slice slots", slots(kI), kTp, {Make(kSlice, Dim::kSlots)}},
      {"slice slots at experts", slots(kI, kAtExperts), kTp, {Make(kSlice, Dim::kSlots)}},
      {"all_gather slots to I", slots(V(Dim::kSlots)), kTp, {Make(kAllGather, Dim::kSlots, Placement::kInvariant)}},
      {"all_gather slots to R", slots(V(Dim::kSlots)), kTp, {Make(kAllGather, Dim::kSlots, Placement::kReplicated)}},
      {"all_gather tokens to I",
       {Dim::kTokens, V(Dim::kTokens), kSources},
       kTp,
       {Make(kAllGather, Dim::kTokens, Placement::kInvariant)}},
      {"all_gather tokens to R",
       {Dim::kTokens, V(Dim::kTokens), kSources},
       kTp,
       {Make(kAllGather, Dim::kTokens, Placement::kReplicated)}},
      {"copy", slots(kI), kTp, {Make(kCopy)}},
      {"all_reduce slots", slots(kP), kTp, {Make(kAllReduce)}},
      {"all_reduce tokens", {Dim::kTokens, kP, kSources}, kTp, {Make(kAllReduce)}},
      {"reduce_scatter slots", slots(kP), kTp, {Make(kReduceScatter, Dim::kSlots)}},
      {"reduce_scatter slots at experts", slots(kP, kAtExperts), kTp, {Make(kReduceScatter, Dim::kSlots)}},
      {"reduce_scatter tokens", {Dim::kTokens, kP, kSources}, kTp, {Make(kReduceScatter, Dim::kTokens)}},
      {"all_to_all out", slots(kI), kTp, {Make(kAllToAll)}},
      {"all_to_all back", slots(kI, kAtExperts), kTp, {Make(kAllToAll)}},
      {"all_to_all of slices", slots(V(Dim::kSlots)), kTp, {Make(kAllToAll)}},
      {"all_to_all of partials back", slots(kP, kAtExperts), kTp, {Make(kAllToAll)}},
      {"all_to_all across lanes", slots(V(Dim::kSlots)), ExpertLayout::kWhole, {Make(kAllToAll), Make(kAllToAll)}},
      {"all_to_all among peers", slots(kI), kTp, {MakeLevel(kAllToAll, Level::kPeers)}},
      {"all_to_all in the node", slots(kI, kHalfWay), kTp, {MakeLevel(kAllToAll, Level::kNode)}},
      {"all_to_all in the node, back", slots(V(Dim::kSlots), kAtExperts), kTp, {MakeLevel(kAllToAll, Level::kNode)}},
      {"all_to_all among peers, back", slots(kP, kHalfWay), kTp, {MakeLevel(kAllToAll, Level::kPeers)}},
      {"dispatch slots", tokens, kTp, {Make(kDispatch, Dim::kSlots)}},
      {"dispatch slots of R", {Dim::kTokens, kR, kSources}, kTp, {Make(kDispatch, Dim::kSlots)}},
      {"dispatch rows", tokens, kTp, {rows}},
      {"dispatch own rows", {Dim::kTokens, V(Dim::kTokens), kSources}, kTp, {rows}},
      {"combine slots", slots(kI), kTp, {Make(kCombine)}},
      {"combine slices to P", slots(V(Dim::kSlots)), kTp, {Make(kCombine, Dim::kUnset, Placement::kPartial)}},
      {"combine partials", slots(kP), kTp, {Make(kCombine, Dim::kUnset, Placement::kPartial)}},
      {"combine rows", {Dim::kRows, kI, kSources}, kTp, {Make(kCombine)}},
      {"combine own rows", {Dim::kRows, V(Dim::kRows), kSources}, kTp, {Make(kCombine)}},
      {"all_to_all_v", tokens, kTp, {slice_tokens, rows, exchange}},
      {"all_to_all_v by level",
       tokens,
       kTp,
       {slice_tokens, rows, MakeLevel(kAllToAllV, Level::kPeers), MakeLevel(kAllToAllV, Level::kNode),
        MakeLevel(kAllToAllV, Level::kNode), MakeLevel(kAllToAllV, Level::kPeers)}},
      {"half an all_to_all_v", tokens, kTp, {slice_tokens, rows, MakeLevel(kAllToAllV, Level::kPeers)}},
      {"all_to_all_v across lanes", tokens, ExpertLayout::kWhole, {slice_tokens, rows, exchange, exchange}},
      {"all_gather rows to R",
       tokens,
       kTp,
       {slice_tokens, rows, exchange, Make(kAllGather, Dim::kRows, Placement::kReplicated)}},
      {"all_gather and slice rows",
       tokens,
       kTp,
       {slice_tokens, rows, exchange, Make(kAllGather, Dim::kRows, Placement::kInvariant), Make(kSlice, Dim::kRows),
        exchange}},
      {"expand and fold",
       tokens,
       kTp,
       {Make(kDispatch, Dim::kDestinations), exchange, Make(kExpand), Make(kFold), exchange, Make(kCombine)}},
      {"expand, fold and slice",
       tokens,
       kTp,
       {slice_tokens, Make(kDispatch, Dim::kDestinations), exchange,
        Make(kAllGather, Dim::kDestinations, Placement::kInvariant), Make(kExpand), Make(kFold),
        Make(kSlice, Dim::kSums), exchange, Make(kCombine)}},
      {"reduce_scatter rows",
       {Dim::kRows, {Placement::kPartial, Dim::kRows}, kAtExperts},
       kTp,
       {Make(kReduceScatter, Dim::kRows), exchange}},
  };
  return programs;
}

TypedOrder Typed(const Program& program) {
  TypedOrder typed;
  typed.order.name = program.name;
  typed.layout = program.layout;
  ValueType type = program.start;
  for (const Step& step : program.steps) {
    absl::StatusOr<ValueType> after = TypeAfter(step, type, program.layout);
    EK_CHECK_OK(after);
    typed.forward.push_back({.step = step, .before = type, .after = *after, .origin = 1});
    type = *after;
  }
  typed.backward = DeriveBackward(typed.forward);
  return typed;
}

struct Layout {
  int tp, ep;
};

// One rank's share of both inner products.
struct Products {
  double forward = 0;   // <dy, M x>
  double backward = 0;  // <M' dy, x>
};

class RankCheck {
 public:
  RankCheck(const Program& program, const TypedOrder& typed, const comm::Mesh& mesh, comm::Backend& backend)
      : program_(program), typed_(typed), mesh_(mesh), backend_(backend) {}

  absl::Status Run(Products* products) {
    const int rank = backend_.rank();
    lane_ = mesh_.Coordinate(comm::Axis::kTp, rank);
    replica_ = mesh_.Coordinate(comm::Axis::kDp, rank);
    device_ = HostDevice::Create();
    EK_ASSIGN_OR_RETURN(stream_, device_->CreateStream("compute"));
    EK_ASSIGN_OR_RETURN(tp_, backend_.CreateGroup(mesh_.GroupOf(comm::Axis::kTp, rank)));
    EK_ASSIGN_OR_RETURN(ep_, backend_.CreateGroup(mesh_.GroupOf(comm::Axis::kEp, rank)));
    const comm::Topology topology = comm::Topology::Blocks(mesh_.world_size(), 2 * mesh_.size(comm::Axis::kTp)).value();
    EK_ASSIGN_OR_RETURN(const ExchangeLevels levels, LevelsOf(ep_->group(), topology, rank));
    EK_ASSIGN_OR_RETURN(node_, backend_.CreateGroup(levels.node));
    EK_ASSIGN_OR_RETURN(peers_, backend_.CreateGroup(levels.peers));
    EK_RETURN_IF_ERROR(Plan());
    schedules_ = BuildSchedules(typed_, maps_.sizes);
    const ValueType start = typed_.forward.front().before, end = typed_.forward.back().after;
    EK_ASSIGN_OR_RETURN(Tensor x, Made("x", start, schedules_.forward.buffers[kInputBuffer]));
    EK_ASSIGN_OR_RETURN(Tensor y, Empty(schedules_.forward.buffers[kOutputBuffer]));
    EK_ASSIGN_OR_RETURN(Tensor dy, Made("dy", GradientType(end), schedules_.backward.buffers[kInputBuffer]));
    EK_ASSIGN_OR_RETURN(Tensor dx, Empty(schedules_.backward.buffers[kOutputBuffer]));
    EK_RETURN_IF_ERROR(RunBoth(x, y, dy, dx));
    products->forward = Share(end, y, dy);
    products->backward = Share(start, x, dx);
    return absl::OkStatus();
  }

 private:
  absl::Status Plan() {
    decision_ = Decision(replica_);
    maps_.sizes = {.tokens = kTokens,
                   .hidden = kHidden,
                   .experts = kExperts,
                   .top_k = kTopK,
                   .capacity = kCapacity,
                   .dtype = DType::kF64,
                   .tp = mesh_.size(comm::Axis::kTp),
                   .ep = mesh_.size(comm::Axis::kEp),
                   .ep_per_node = node_->size(),
                   .lane = lane_};
    for (const TypedStep& step : typed_.forward) {
      maps_.ragged = maps_.ragged || step.before.form == Dim::kRows || step.after.form == Dim::kRows;
    }
    EK_ASSIGN_OR_RETURN(maps_.padded, BuildDispatchPlan(decision_));
    for (const Step& step : program_.steps) maps_.deduplicated = maps_.deduplicated || step.kind == StepKind::kExpand;
    if (maps_.deduplicated) return PlanDestinations();
    if (maps_.ragged) EK_RETURN_IF_ERROR(PlanRows());
    return absl::OkStatus();
  }

  // Every rank knows every source's decision here, so the counts need no exchange.
  absl::Status PlanRows() {
    bool own = program_.start.tp.dim == Dim::kTokens || program_.start.tp.dim == Dim::kRows;
    for (const Step& step : program_.steps) own = own || (step.kind == StepKind::kSlice && step.dim == Dim::kTokens);
    const int T = own ? maps_.sizes.tp : 1, E = maps_.sizes.ep, lane = own ? lane_ : 0;
    EK_ASSIGN_OR_RETURN(maps_.send, BuildRaggedSendPlan(decision_, {.ep_size = E, .tp_size = T, .lane = lane}));
    const bool whole = program_.layout == ExpertLayout::kWhole;
    RaggedReceiver receiver = {.tp_size = T,
                               .local_experts = static_cast<int>(kExperts / E),
                               .slot_classes = 1,
                               .capacity = kCapacity,
                               .source_lane = {},
                               .source_replica = {},
                               .gathers_over_tp = !whole && own && T > 1};
    std::vector<int64_t> segments;
    const std::vector<int>& ranks = ep_->group().ranks;
    for (int source = 0; source < E; ++source) {
      const int replica = mesh_.Coordinate(comm::Axis::kDp, ranks[source]);
      const int source_lane = mesh_.Coordinate(comm::Axis::kTp, ranks[source]);
      receiver.source_lane.push_back(own ? source_lane : 0);
      receiver.source_replica.push_back(whole ? replica : source);
      EK_ASSIGN_OR_RETURN(
          RaggedSendPlan sent,
          BuildRaggedSendPlan(Decision(replica), {.ep_size = E, .tp_size = T, .lane = own ? source_lane : 0}));
      const int64_t block = static_cast<int64_t>(sent.segments.size()) / E;
      segments.insert(segments.end(), sent.segments.begin() + ep_->rank() * block,
                      sent.segments.begin() + (ep_->rank() + 1) * block);
    }
    EK_ASSIGN_OR_RETURN(RaggedReceivePlan receive, BuildRaggedReceivePlan(receiver, lane, segments));
    maps_.receive = {receive};
    RaggedRows rows;
    // From each node, the rows of the peer there, by the local index of their destination here.
    const int L = maps_.sizes.per_node(), me = ep_->rank();
    for (int node = 0; node < E / L; ++node) {
      const int peer = node * L + me % L;
      const int replica = mesh_.Coordinate(comm::Axis::kDp, ranks[peer]);
      EK_ASSIGN_OR_RETURN(const RaggedSendPlan sent,
                          BuildRaggedSendPlan(Decision(replica), {.ep_size = E, .tp_size = T, .lane = lane}));
      for (int local = 0; local < L; ++local) maps_.middle.push_back(sent.rows_to[me / L * L + local]);
    }
    for (int64_t count : maps_.middle) rows.middle += count;
    rows.sent = maps_.send.num_rows();
    for (int64_t count : receive.rows_from) rows.arrived += count;
    rows.gathered = receive.num_rows();
    for (int l = 0; l < lane && receiver.gathers_over_tp; ++l) rows.gathered_before += receive.rows_of_lane[l];
    maps_.sizes.rows = rows;
    return absl::OkStatus();
  }

  absl::Status PlanDestinations() {
    bool own = false;
    for (const Step& step : program_.steps) own = own || (step.kind == StepKind::kSlice && step.dim == Dim::kTokens);
    const int T = own ? maps_.sizes.tp : 1, E = maps_.sizes.ep, lane = own ? lane_ : 0;
    const bool gathers = own && T > 1;
    EK_ASSIGN_OR_RETURN(maps_.dedup_send,
                        BuildDedupSendPlan(decision_, {.ep_size = E, .tp_size = T, .lane = lane}, gathers));
    RaggedReceiver receiver;
    receiver.tp_size = T;
    receiver.local_experts = static_cast<int>(kExperts / E);
    receiver.capacity = kCapacity;
    receiver.gathers_over_tp = gathers;
    std::vector<int64_t> header;
    std::vector<int32_t> records;
    for (int source = 0; source < E; ++source) {
      const int replica = mesh_.Coordinate(comm::Axis::kDp, ep_->group().ranks[source]);
      receiver.source_lane.push_back(lane);
      receiver.source_replica.push_back(source);
      EK_ASSIGN_OR_RETURN(const DedupSendPlan sent,
                          BuildDedupSendPlan(Decision(replica), {.ep_size = E, .tp_size = T, .lane = lane}, gathers));
      const size_t block = sent.header.size() / E;
      header.insert(header.end(), sent.header.begin() + ep_->rank() * block,
                    sent.header.begin() + (ep_->rank() + 1) * block);
      size_t first = 0;
      for (int to = 0; to < ep_->rank(); ++to) first += sent.record_ints_to[to];
      records.insert(records.end(), sent.records.begin() + first,
                     sent.records.begin() + first + sent.record_ints_to[ep_->rank()]);
    }
    EK_ASSIGN_OR_RETURN(maps_.dedup_receive, BuildDedupReceivePlan(receiver, lane, header, records));
    RaggedRows destinations, rows;
    destinations.sent = maps_.dedup_send.num_rows();
    for (int64_t count : maps_.dedup_receive.rows_from) destinations.arrived += count;
    destinations.gathered = maps_.dedup_receive.num_arrivals();
    for (int l = 0; l < lane && gathers; ++l) destinations.gathered_before += maps_.dedup_receive.rows_of_lane[l];
    rows.arrived = rows.gathered = maps_.dedup_receive.num_expert_rows();
    maps_.sizes.destinations = destinations;
    maps_.sizes.rows = rows;
    return absl::OkStatus();
  }

  // A made-up value: I and R are equal on the lanes, V and P are not.
  absl::StatusOr<Tensor> Made(const char* name, const ValueType& type, const BufferSpec& spec) {
    EK_ASSIGN_OR_RETURN(Tensor tensor, Empty(spec));
    const bool same = type.tp.placement == Placement::kInvariant || type.tp.placement == Placement::kReplicated;
    const PhiloxStream stream(PhiloxKey(5).Add(name).Add(replica_).Add(same ? 0 : 1 + lane_));
    for (int64_t i = 0; i < spec.rows * spec.columns; ++i) tensor.data<double>()[i] = stream.Normal(i);
    return tensor;
  }

  absl::StatusOr<Tensor> Empty(const BufferSpec& spec) {
    return Tensor::Create(device_.get(), spec.dtype, Shape({spec.rows, spec.columns}));
  }

  absl::Status RunBoth(const Tensor& x, Tensor& y, const Tensor& dy, Tensor& dx) {
    std::vector<float> dweight(decision_.num_routes());
    std::vector<float> dfold(maps_.dedup_receive.expert_rows_of_arrival.rows.size());
    const Shape routes({decision_.num_routes()});
    ExecutorInput input;
    input.program = &typed_.forward;
    input.schedule = &schedules_.forward;
    input.maps = &maps_;
    input.tp = tp_.get();
    input.ep = ep_.get();
    input.ep_node = node_.get();
    input.ep_peers = peers_.get();
    input.route_weights = ConstTensorView(decision_.weight.data(), DType::kF32, routes);
    OrderExecutor forward(input, device_.get(), &indices_, stream_.get());
    EK_RETURN_IF_ERROR(forward.Run(x.const_view(), y.view()));
    input.program = &typed_.backward;
    input.schedule = &schedules_.backward;
    input.route_weight_gradient = TensorView(dweight.data(), DType::kF32, routes);
    input.fold_weight_gradient = TensorView(dfold.data(), DType::kF32, Shape({static_cast<int64_t>(dfold.size())}));
    OrderExecutor backward(input, device_.get(), &indices_, stream_.get());
    for (const auto& pair : schedules_.carried) {
      if (pair.first > kOutputBuffer) {
        backward.Give(pair.second, forward.Take(pair.first));
      } else {
        // Combine right at the start of a program reads the caller's input: hand it over as a copy.
        EK_ASSIGN_OR_RETURN(Tensor copy, Empty(schedules_.forward.buffers[pair.first]));
        for (int64_t i = 0; i < copy.view().num_elements(); ++i) copy.data<double>()[i] = x.data<double>()[i];
        backward.Give(pair.second, std::move(copy));
      }
    }
    EK_RETURN_IF_ERROR(backward.Run(dy.const_view(), dx.view()));
    return stream_->Synchronize();
  }

  // An invariant value is one value, whatever the number of lanes; all others count lane by lane.
  double Share(const ValueType& type, const Tensor& value, const Tensor& gradient) const {
    if (type.tp.placement == Placement::kInvariant && lane_ != 0) return 0;
    double sum = 0;
    for (int64_t i = 0; i < value.view().num_elements(); ++i)
      sum += value.data<double>()[i] * gradient.data<double>()[i];
    return sum;
  }

  const Program& program_;
  const TypedOrder& typed_;
  const comm::Mesh& mesh_;
  comm::Backend& backend_;
  int lane_ = 0, replica_ = 0;
  std::unique_ptr<HostDevice> device_;
  std::unique_ptr<Stream> stream_;
  std::unique_ptr<comm::Communicator> tp_, ep_, node_, peers_;
  RoutingDecision decision_;
  RowMaps maps_;
  Schedules schedules_;
  IndexPool indices_;
};

class AdjointTest : public ::testing::TestWithParam<Layout> {};
INSTANTIATE_TEST_SUITE_P(Layouts, AdjointTest,
                         ::testing::Values(Layout{1, 1}, Layout{1, 2}, Layout{2, 1}, Layout{2, 2}, Layout{4, 2},
                                           Layout{2, 4}),
                         [](const auto& info) { return absl::StrCat("T", info.param.tp, "E", info.param.ep); });

// Trail 19 and 20 as arithmetic: no mapping's backward is anything but its transpose.
TEST_P(AdjointTest, Trail19_Trail20_EveryStepKindIsExactlyTransposed) {
  for (const Program& program : Programs()) {
    const TypedOrder typed = Typed(program);
    const int tp = GetParam().tp, ep = GetParam().ep;
    const bool whole = program.layout == ExpertLayout::kWhole;
    ASSERT_OK_AND_ASSIGN(const comm::Mesh mesh,
                         comm::Mesh::Create({.tp = tp, .ep = ep, .dp = ep, .etp = whole ? 1 : tp}));
    comm::InProcessOptions options;
    options.world_size = mesh.world_size();
    ASSERT_OK_AND_ASSIGN(const auto world, comm::InProcessWorld::Create(options));
    std::vector<Products> products(mesh.world_size());
    const std::vector<absl::Status> statuses = comm::RunRanks(*world, [&](comm::Backend& backend) {
      return RankCheck(program, typed, mesh, backend).Run(&products[backend.rank()]);
    });
    ASSERT_OK(comm::FirstFailure(statuses)) << program.name;
    Products sum;
    for (const Products& p : products) {
      sum.forward += p.forward;
      sum.backward += p.backward;
    }
    EXPECT_NEAR(sum.forward, sum.backward, 1e-11 * (1 + std::abs(sum.forward))) << program.name;
    EXPECT_GT(std::abs(sum.forward), 1e-6) << program.name;
  }
}

}  // namespace
}  // namespace evenkeel::moe

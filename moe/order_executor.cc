#include "evenkeel/moe/order_executor.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "evenkeel/moe/ragged_plan.h"
#include "evenkeel/moe/tree_sum.h"
#include "evenkeel/runtime/base/status_macros.h"
#include "evenkeel/runtime/ops/rows.h"

namespace evenkeel::moe {
namespace {

bool IsVarying(const AxisType& type) { return type.placement == Placement::kVarying; }

bool IsPartOfExchange(const Action& action) {
  return action.kind == ActionKind::kExchange || action.kind == ActionKind::kRegroup;
}

// The matrices of `count` experts from `first` on.
template <typename View>
ExpertTensors<View> ChunkOf(const ExpertTensors<View>& all, int64_t first, int64_t count) {
  const auto part = [&](const View& view) { return view.num_elements() == 0 ? view : view.Rows(first, count); };
  return {part(all.w_in), part(all.w_gate), part(all.w_out), part(all.b_in), part(all.b_gate), part(all.b_out)};
}

}  // namespace

IndexPool::Index IndexPool::Get(const std::string& key, const std::function<std::vector<int32_t>()>& make) {
  Index& list = lists_[key];
  if (list == nullptr) list = std::make_shared<const std::vector<int32_t>>(make());
  return list;
}

const RowLists& IndexPool::Sums(const std::string& key, const std::function<RowLists()>& make) {
  std::unique_ptr<const RowLists>& lists = sums_[key];
  if (lists == nullptr) lists = std::make_unique<const RowLists>(make());
  return *lists;
}

void OrderExecutor::Give(int buffer, Tensor tensor) {
  if (buffers_.empty()) buffers_.resize(in_.schedule->buffers.size());
  buffers_[buffer] = std::move(tensor);
}

absl::Status OrderExecutor::Run(ConstTensorView input, TensorView output) {
  buffers_.resize(in_.schedule->buffers.size());
  arriving_.resize(in_.schedule->buffers.size());
  input_ = input;
  output_ = output;
  const absl::Status status = RunAll();
  // Queued work may still use the buffers that are about to go.
  if (!status.ok() && in_.exchange_stream != nullptr) in_.exchange_stream->Synchronize().IgnoreError();
  if (!status.ok() && !stream_.is_inline()) stream_.Synchronize().IgnoreError();
  return status;
}

absl::Status OrderExecutor::RunAll() {
  for (const Action& action : in_.schedule->actions) {
    for (int buffer : action.allocate) EK_RETURN_IF_ERROR(Allocate(buffer));
    EK_RETURN_IF_ERROR(WaitForExchanges(action));
    EK_RETURN_IF_ERROR(RunAction(action));
    if (action.ends_step && in_.observer) in_.observer(action.step, Read(action.out));
    for (int buffer : action.release) EK_RETURN_IF_ERROR(Release(buffer, StreamOf(action)));
  }
  return absl::OkStatus();
}

absl::Status OrderExecutor::Allocate(int buffer) {
  const BufferSpec& spec = in_.schedule->buffers[buffer];
  EK_ASSIGN_OR_RETURN(buffers_[buffer], Tensor::Create(device_, spec.dtype, Shape({spec.rows, spec.columns})));
  return absl::OkStatus();
}

Stream& OrderExecutor::StreamOf(const Action& action) {
  return IsPartOfExchange(action) && in_.exchange_stream != nullptr ? *in_.exchange_stream : stream_;
}

absl::Status OrderExecutor::WaitForExchanges(const Action& action) {
  if (IsPartOfExchange(action)) return absl::OkStatus();  // in order on the exchange stream
  for (int buffer : {action.in.buffer, action.out.buffer, action.saved_rows.buffer}) {
    if (buffer < 0) continue;
    for (Event* event : arriving_[buffer]) EK_RETURN_IF_ERROR(stream_.Wait(event));
    arriving_[buffer].clear();
  }
  return absl::OkStatus();
}

absl::Status OrderExecutor::BeginExchange() {
  if (in_.exchange_stream == nullptr) return absl::OkStatus();
  in_.events->push_back(device_->CreateEvent());
  EK_RETURN_IF_ERROR(stream_.Record(in_.events->back().get()));
  return in_.exchange_stream->Wait(in_.events->back().get());
}

absl::Status OrderExecutor::EndExchange(int buffer) {
  if (in_.exchange_stream == nullptr) return absl::OkStatus();
  in_.events->push_back(device_->CreateEvent());
  arriving_[buffer].push_back(in_.events->back().get());
  return in_.exchange_stream->Record(in_.events->back().get());
}

absl::Status OrderExecutor::Release(int buffer, Stream& stream) {
  Tensor tensor = std::move(buffers_[buffer]);
  buffers_[buffer] = Tensor();
  if (stream.is_inline()) return absl::OkStatus();  // `tensor` goes here
  // On a worker stream the memory goes when the work before it is done.
  return stream.Launch([owned = std::move(tensor)]() mutable {
    owned = Tensor();
    return absl::OkStatus();
  });
}

ConstTensorView OrderExecutor::Read(const RowsRef& ref) const {
  if (ref.buffer == kInputBuffer) return input_.Rows(ref.first_row, ref.rows);
  return Write(ref);
}

TensorView OrderExecutor::Write(const RowsRef& ref) const {
  const TensorView whole = ref.buffer == kOutputBuffer ? output_ : buffers_[ref.buffer].view();
  return whole.Rows(ref.first_row, ref.rows);
}

TensorView OrderExecutor::Work(int buffer) const { return buffer < 0 ? TensorView() : buffers_[buffer].view(); }

TensorView OrderExecutor::ScratchView(int buffer) const {
  if (buffer < 0) return TensorView();
  const TensorView scratch = buffers_[buffer].view();
  return scratch.Reshaped(Shape({scratch.num_elements()}));
}

ConstTensorView OrderExecutor::IndexView(absl::string_view map, const ValueType& type, const RowNesting& from,
                                         const RowNesting& to, const std::function<std::vector<int32_t>()>& make,
                                         Shape shape) {
  const std::string key = absl::StrCat(map, "/", TypeName(type), "/", NestingName(from), "/", NestingName(to));
  const IndexPool::Index index = indices_->Get(key, make);
  return ConstTensorView(index->data(), DType::kI32, std::move(shape));
}

absl::Status OrderExecutor::RunAction(const Action& action) {
  switch (action.kind) {
    case ActionKind::kNothing:
      return absl::OkStatus();
    case ActionKind::kDispatch:
      return Dispatch(action);
    case ActionKind::kDispatchTransposed:
      return DispatchTransposed(action);
    case ActionKind::kCombine:
      return Combine(action);
    case ActionKind::kCombineTransposed:
      return CombineTransposed(action);
    case ActionKind::kPermute:
      return Permute(action);
    case ActionKind::kRegroup:
      return Regroup(action);
    case ActionKind::kExpand:
    case ActionKind::kSpread:
      return Expand(action);
    case ActionKind::kCollect:
      return TreeSumRows(Read(action.in), in_.maps->node_middle.rows_of_arrival, Write(action.out), stream_);
    case ActionKind::kExpandTransposed:
      return TreeSumRows(Read(action.in), in_.maps->dedup_receive.expert_rows_unweighted, Write(action.out), stream_);
    case ActionKind::kFold:
      return TreeSumRows(Read(action.in), in_.maps->dedup_receive.expert_rows_of_arrival, Write(action.out), stream_);
    case ActionKind::kFoldTransposed:
      return FoldTransposed(action);
    case ActionKind::kExperts:
    case ActionKind::kExpertsTransposed:
      return Experts(action);
    case ActionKind::kAllGather:
      return Gather(action);
    case ActionKind::kAllReduce:
      return in_.tp->AllReduce(Read(action.in), Write(action.out), comm::ReduceOp::kSum, stream_);
    case ActionKind::kReduceScatter:
      return ReduceScatter(action);
    case ActionKind::kExchange:
      return Exchange(action);
    case ActionKind::kCopy:
      return stream_.Copy(Write(action.out).raw(), Read(action.in).raw(), Read(action.in).num_bytes());
  }
  return absl::InternalError("unknown action");
}

absl::Status OrderExecutor::Dispatch(const Action& action) {
  const RowsRef& rows = action.out;
  const ConstTensorView tokens = IndexView(
      "token_of_row", rows.type, {}, rows.nesting, [&] { return in_.maps->TokenOfRow(rows.type, rows.nesting); },
      Shape({rows.rows}));
  return GatherRows(Read(action.in), tokens, Write(rows), stream_);
}

absl::Status OrderExecutor::DispatchTransposed(const Action& action) {
  const RowsRef& rows = action.in;
  if (in_.maps->deduplicated) {
    return TreeSumRows(Read(rows), in_.maps->RowsOfToken(), Write(action.out), stream_);
  }
  if (in_.experts.canonical()) return SumOverExperts(action, rows, /*weighted=*/false);
  const ConstTensorView routes = IndexView(
      "row_of_route", rows.type, {}, rows.nesting, [&] { return in_.maps->RowOfRoute(rows.type, rows.nesting); },
      Shape({action.out.rows, in_.maps->sizes.top_k}));
  return GatherSumRows(Read(rows), routes, Write(action.out), stream_);
}

std::pair<int64_t, int64_t> OrderExecutor::RouteWindow(const ValueType& rows) const {
  const OrderSizes& sizes = in_.maps->sizes;
  if (!IsVarying(rows.tp) || rows.form == Dim::kSlots) return {0, sizes.tokens};
  const TokenRange own = OwnTokens(sizes.tokens, sizes.tp, sizes.lane);
  return {own.begin, own.size()};
}

absl::Status OrderExecutor::Combine(const Action& action) {
  const RowsRef& rows = action.in;
  if (in_.maps->deduplicated) {
    return TreeSumRows(Read(rows), in_.maps->RowsOfToken(), Write(action.out), stream_);
  }
  if (in_.experts.canonical()) return SumOverExperts(action, rows, /*weighted=*/true);
  const int64_t k = in_.maps->sizes.top_k;
  const auto [first, tokens] = RouteWindow(rows.type);
  const ConstTensorView routes = IndexView(
      "row_of_route", rows.type, {}, rows.nesting, [&] { return in_.maps->RowOfRoute(rows.type, rows.nesting); },
      Shape({tokens, k}));
  const ConstTensorView weights = in_.route_weights.Rows(first * k, tokens * k).Reshaped(Shape({tokens, k}));
  return CombineRows(Read(rows), routes, weights, Write(action.out), stream_);
}

absl::Status OrderExecutor::SumOverExperts(const Action& action, const RowsRef& rows, bool weighted) {
  const int64_t first = RouteWindow(rows.type).first;
  const std::string key =
      absl::StrCat(weighted ? "weighted/" : "sum/", TypeName(rows.type), "/", NestingName(rows.nesting));
  const RowLists& lists = indices_->Sums(key, [&] {
    const float* weights = weighted ? in_.route_weights.data<float>() : nullptr;
    return in_.maps->RowsByExpert(rows.type, rows.nesting, first, weights);
  });
  return TreeSumRows(Read(rows), lists, Write(action.out), stream_);
}

absl::Status OrderExecutor::CombineTransposed(const Action& action) {
  if (in_.maps->deduplicated) return Dispatch(action);  // every row of a token gets the token's gradient
  const RowsRef& rows = action.saved_rows;
  const int64_t k = in_.maps->sizes.top_k;
  const auto [first, tokens] = RouteWindow(rows.type);
  const ConstTensorView routes = IndexView(
      "row_of_route", rows.type, {}, rows.nesting, [&] { return in_.maps->RowOfRoute(rows.type, rows.nesting); },
      Shape({tokens, k}));
  const Shape window({tokens, k});
  return CombineRowsBackward(Read(rows), routes, in_.route_weights.Rows(first * k, tokens * k).Reshaped(window),
                             Read(action.in), Write(action.out),
                             in_.route_weight_gradient.Rows(first * k, tokens * k).Reshaped(window), stream_);
}

absl::Status OrderExecutor::Permute(const Action& action) {
  const RowsRef &from = action.in, &to = action.out;
  const ConstTensorView index = IndexView(
      absl::StrCat("permute", action.chunk), from.type, from.nesting, to.nesting,
      [&] { return in_.maps->Permutation(from.type, from.nesting, to.nesting, action.chunk); }, Shape({to.rows}));
  return GatherRows(Read(from), index, Write(to), stream_);
}

absl::Status OrderExecutor::Regroup(const Action& action) {
  const ConstTensorView index = IndexView(
      absl::StrCat("regroup", action.chunk, action.back ? "b" : "f"), action.in.type, {}, {},
      [&] { return in_.maps->Regrouping(action.in.type, action.chunk, action.back); }, Shape({action.out.rows}));
  EK_RETURN_IF_ERROR(BeginExchange());
  EK_RETURN_IF_ERROR(GatherRows(Read(action.in), index, Write(action.out), StreamOf(action)));
  return EndExchange(action.out.buffer);
}

absl::Status OrderExecutor::Expand(const Action& action) {
  const bool half_way = action.kind == ActionKind::kSpread;
  const ConstTensorView index = IndexView(
      half_way ? "spread" : "expand", action.out.type, {}, {},
      [&] { return half_way ? in_.maps->node_middle.arrival_of_row : in_.maps->dedup_receive.arrival_of_expert_row; },
      Shape({action.out.rows}));
  return GatherRows(Read(action.in), index, Write(action.out), stream_);
}

absl::Status OrderExecutor::FoldTransposed(const Action& action) {
  const RowLists& lists = in_.maps->dedup_receive.expert_rows_of_arrival;
  const Shape shape({lists.outputs(), lists.width});
  return CombineRowsBackward(Read(action.saved_rows), ConstTensorView(lists.rows.data(), DType::kI32, shape),
                             ConstTensorView(lists.weights.data(), DType::kF32, shape), Read(action.in),
                             Write(action.out), in_.fold_weight_gradient.Reshaped(shape), stream_);
}

absl::Status OrderExecutor::Experts(const Action& action) {
  const ExpertWork work = {.pre = Work(action.pre),
                           .gate = Work(action.gate),
                           .hidden = Work(action.hidden),
                           .dpre = Work(action.dpre),
                           .dgate = Work(action.dgate),
                           .sources = std::max(1, in_.maps->sizes.canonical_sources),
                           .positions_per_source = in_.maps->PositionsPerSource(),
                           .scratch = ScratchView(action.scratch)};
  const std::vector<int64_t> counts = in_.maps->RowsOfExpert(action.in.type, action.chunk);
  ExpertShape shape = in_.experts;
  const ExpertRange range = ChunkOfExperts(shape.local_experts, in_.maps->sizes.chunks, action.chunk);
  shape.local_experts = range.size;
  const ExpertWeights weights = ChunkOf(in_.weights, range.begin, range.size);
  if (action.kind == ActionKind::kExperts) {
    return ExpertsForward(shape, weights, Read(action.in), counts, work, Write(action.out), stream_);
  }
  if (in_.maps->sizes.merges_lanes) {
    return MergedExpertsBackward(action, shape, weights, ChunkOf(in_.gradients, range.begin, range.size), work);
  }
  if (action.recompute) {
    EK_RETURN_IF_ERROR(ExpertsRecompute(shape, weights, Read(action.saved_rows), counts, work, stream_));
  }
  const ExpertGradients gradients = ChunkOf(in_.gradients, range.begin, range.size);
  return ExpertsBackward(shape, weights, Read(action.saved_rows), counts, in_.maps->Positions(action.chunk), work,
                         Read(action.in), Write(action.out), gradients, stream_);
}

absl::Status OrderExecutor::MergedExpertsBackward(const Action& action, const ExpertShape& shape,
                                                  const ExpertWeights& weights, const ExpertGradients& gradients,
                                                  ExpertWork work) {
  const LaneMerge& merge = in_.maps->lane_merge;
  std::vector<int64_t> counts = merge.rows_of_lane;
  for (int64_t& count : counts) count *= shape.hidden;
  const auto index = [](const std::vector<int32_t>& rows) {
    return ConstTensorView(rows.data(), DType::kI32, Shape({static_cast<int64_t>(rows.size())}));
  };
  const auto bring = [&](ConstTensorView own, TensorView merged) -> absl::Status {
    EK_RETURN_IF_ERROR(in_.control_tp->AllGatherV(own, Work(action.gathered), counts, stream_));
    return GatherRows(Work(action.gathered), index(merge.gathered_of_merged), merged, stream_);
  };
  EK_RETURN_IF_ERROR(bring(Read(action.saved_rows), Work(action.merged_x)));
  EK_RETURN_IF_ERROR(bring(Read(action.in), Work(action.merged_dy)));
  work.adds_gradients = merge.adds_gradients;
  const ConstTensorView x = Work(action.merged_x);
  EK_RETURN_IF_ERROR(ExpertsRecompute(shape, weights, x, merge.rows_of_expert, work, stream_));
  EK_RETURN_IF_ERROR(ExpertsBackward(shape, weights, x, merge.rows_of_expert, merge.positions, work,
                                     Work(action.merged_dy), Work(action.merged_dx), gradients, stream_));
  return GatherRows(Work(action.merged_dx), index(merge.merged_of_own), Write(action.out), stream_);
}

std::vector<int64_t> OrderExecutor::LaneCounts(const Action& action) const {
  const OrderSizes& sizes = in_.maps->sizes;
  std::vector<int64_t> counts(sizes.tp, 0);
  if (action.in.type.form == Dim::kTokens) {
    for (int lane = 0; lane < sizes.tp; ++lane) counts[lane] = OwnTokens(sizes.tokens, sizes.tp, lane).size();
  } else {
    counts = in_.maps->RowsOfLane(action.chunk);
  }
  for (int64_t& count : counts) count *= sizes.hidden;
  return counts;
}

absl::Status OrderExecutor::Gather(const Action& action) {
  const ValueType& type = action.in.type;
  const bool even =
      type.form == Dim::kSlots || (type.form == Dim::kTokens && in_.maps->sizes.tokens % in_.maps->sizes.tp == 0);
  if (even) return in_.tp->AllGather(Read(action.in), Write(action.out), stream_);
  return in_.tp->AllGatherV(Read(action.in), Write(action.out), LaneCounts(action), stream_);
}

absl::Status OrderExecutor::ReduceScatter(const Action& action) {
  const ValueType& type = action.in.type;
  const bool even =
      type.form == Dim::kSlots || (type.form == Dim::kTokens && in_.maps->sizes.tokens % in_.maps->sizes.tp == 0);
  constexpr comm::ReduceOp kSum = comm::ReduceOp::kSum;
  if (even) return in_.tp->ReduceScatter(Read(action.in), Write(action.out), kSum, stream_);
  return in_.tp->ReduceScatterV(Read(action.in), Write(action.out), LaneCounts(action), kSum, stream_);
}

absl::Status OrderExecutor::Exchange(const Action& action) {
  Stream& stream = StreamOf(action);
  const Level level = (*in_.program)[action.step].step.level;
  comm::Communicator* group = level == Level::kPeers ? in_.ep_peers : level == Level::kNode ? in_.ep_node : in_.ep;
  EK_RETURN_IF_ERROR(BeginExchange());
  if (action.in.type.form == Dim::kSlots) {
    EK_RETURN_IF_ERROR(group->AllToAll(Read(action.in), Write(action.out), stream));
    return EndExchange(action.out.buffer);
  }
  RowMaps::ExchangeCounts counts = in_.maps->CountsOf(action.in.type, level, action.chunk);
  for (int64_t& count : counts.sent) count *= in_.maps->sizes.hidden;
  for (int64_t& count : counts.received) count *= in_.maps->sizes.hidden;
  EK_RETURN_IF_ERROR(group->AllToAllV(Read(action.in), counts.sent, Write(action.out), counts.received, stream));
  return EndExchange(action.out.buffer);
}

}  // namespace evenkeel::moe

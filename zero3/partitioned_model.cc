#include "evenkeel/zero3/partitioned_model.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/synchronization/mutex.h"
#include "evenkeel/runtime/base/error_context.h"
#include "evenkeel/runtime/base/status_macros.h"
#include "evenkeel/zero3/coordinator.h"
#include "evenkeel/zero3/fetch_policy.h"
#include "evenkeel/zero3/gradient_reducer.h"
#include "evenkeel/zero3/leaf_gradients.h"
#include "evenkeel/zero3/policy_layouts.h"
#include "evenkeel/zero3/replica_check.h"
#include "evenkeel/zero3/shard_guard.h"
#include "evenkeel/zero3/sharded_optimizer.h"
#include "evenkeel/zero3/unit.h"

namespace evenkeel::zero3 {
namespace {

absl::Status Error(absl::StatusCode code, absl::string_view operation, absl::string_view subject,
                   absl::string_view what) {
  ErrorContext where;
  where.module = "zero3";
  where.operation = std::string(operation);
  where.group = std::string(subject);
  return MakeError(code, where, what);
}

int SizeOfGroup(const comm::Communicator* group) { return group == nullptr ? 1 : group->size(); }

absl::Status CheckSelection(absl::Span<const ParameterSpec> parameters, const LeafSelection& selection) {
  std::vector<bool> used(parameters.size(), false);
  for (const Leaf& leaf : selection.leaves) {
    for (int p : leaf.parameters) {
      if (p < 0 || p >= static_cast<int>(parameters.size())) {
        return Error(absl::StatusCode::kInvalidArgument, "create", leaf.name,
                     absl::StrCat("parameter index ", p, " is outside [0, ", parameters.size(), ")"));
      }
      used[static_cast<size_t>(p)] = true;
    }
  }
  for (size_t p = 0; p < used.size(); ++p) {
    EK_RETURN_IF_ERROR(ValidateParameterSpec(parameters[p]));
    if (!used[p]) {
      return Error(absl::StatusCode::kInvalidArgument, "create", parameters[p].name, "the parameter is in no leaf");
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<ConstTensorView> LeafWeights::Get(int i) const {
  if (i < 0 || i >= size()) {
    return Error(absl::StatusCode::kInvalidArgument, "weights", "", absl::StrCat("parameter ", i, " of ", size()));
  }
  const uint64_t current = current_->load(std::memory_order_relaxed);
  if (current != generation_) {
    return Error(absl::StatusCode::kFailedPrecondition, "weights", "",
                 absl::StrCat("the leaf was released: view of fetch ", generation_, ", now at ", current));
  }
  return views_[static_cast<size_t>(i)];
}

// The facade locks `mutex` around every call; nothing in here does.
class PartitionedModel::Impl {
 public:
  absl::Status Init(std::vector<ParameterSpec> parameters, const LeafSelection& selection,
                    const PartitionedModelOptions& options, const ModelGroups& groups, Device* device, Stream* compute,
                    Stream* comm);

  absl::StatusOr<StepResult> Step();
  absl::Status ZeroGradients();
  absl::Status StateLoaded(const StepProgress& progress);
  absl::Status ReadTensor(int parameter, TensorKind kind, absl::string_view state, TensorView out);

  absl::Status CheckLeafIndex(int leaf) const;

  mutable absl::Mutex mutex;

  std::vector<ParameterSpec> parameters;
  std::vector<Leaf> leaves;
  std::vector<std::unique_ptr<Unit>> units;
  std::unique_ptr<Coordinator> coordinator;
  std::unique_ptr<StateAccess> access;
  std::unique_ptr<LeafGradients> gradients;
  std::unique_ptr<ShardedOptimizer> optimizer;
  const FetchPolicy* policy = nullptr;
  std::vector<std::string> state_names;

 private:
  absl::Status CreateUnits(const PartitionedModelOptions& options, const ModelGroups& groups);
  void PrepareReplicaCheck();

  std::unique_ptr<ShardGuard> guard_;
  std::unique_ptr<ReplicaCheck> replica_check_;
  int check_interval_ = 0;
  int64_t steps_seen_ = 0;
  bool check_due_ = false;
  OrderLog log_;
  Device* device_ = nullptr;
  Stream* compute_ = nullptr;
  Stream* comm_ = nullptr;
};

absl::Status PartitionedModel::Impl::Init(std::vector<ParameterSpec> specs, const LeafSelection& selection,
                                          const PartitionedModelOptions& options, const ModelGroups& groups,
                                          Device* device, Stream* compute, Stream* comm) {
  device_ = device;
  compute_ = compute;
  comm_ = comm;
  parameters = std::move(specs);
  leaves = selection.leaves;
  EK_RETURN_IF_ERROR(CheckSelection(parameters, selection));
  EK_RETURN_IF_ERROR(ValidateOptimizerOptions(options.optimizer));
  state_names = OptimizerStateNames(options.optimizer);
  EK_ASSIGN_OR_RETURN(policy, FindFetchPolicy(options.policy));
  EK_RETURN_IF_ERROR(CreateUnits(options, groups));
  std::vector<Unit*> all;
  for (const auto& unit : units) all.push_back(unit.get());
  CoordinatorOptions fetching;
  fetching.prefetch_bytes = options.prefetch_bytes;
  fetching.reuse_distance_bytes = options.reuse_distance_bytes;
  fetching.max_live_bytes = options.max_live_bytes;
  fetching.poison_released = options.poison_released;
  EK_ASSIGN_OR_RETURN(coordinator, Coordinator::Create(all, leaves, policy, fetching, &log_, device, compute, comm));
  if (options.micro_batches < 1 || (options.micro_batches & (options.micro_batches - 1)) != 0) {
    return Error(absl::StatusCode::kInvalidArgument, "create", "",
                 absl::StrCat("micro_batches ", options.micro_batches, " is not a power of two"));
  }
  const ReducerOptions reducing{.dp_size = SizeOfGroup(groups.dp),
                                .reduce_bucket_bytes = options.reduce_bucket_bytes,
                                .micro_batches = options.micro_batches};
  EK_ASSIGN_OR_RETURN(std::unique_ptr<GradientReducer> reducer,
                      GradientReducer::Create(all, reducing, &log_, device, compute, comm));
  access = std::make_unique<StateAccess>(all, parameters, state_names, device, comm);
  gradients = std::make_unique<LeafGradients>(all, leaves, access.get(), options.micro_batches, std::move(reducer));
  EK_ASSIGN_OR_RETURN(optimizer, ShardedOptimizer::Create(all, options, groups, device, compute, comm));
  for (const auto& unit : units) EK_RETURN_IF_ERROR(unit->Initialize(options.seed, *comm));
  if (options.verify_shards) guard_ = std::make_unique<ShardGuard>(all);
  coordinator->UseShardGuard(guard_.get());
  replica_check_ = std::make_unique<ReplicaCheck>(all, groups, device, compute, comm);
  check_interval_ = options.replica_check_interval;
  PrepareReplicaCheck();
  return absl::OkStatus();
}

absl::Status PartitionedModel::Impl::CreateUnits(const PartitionedModelOptions& options, const ModelGroups& groups) {
  const PersistenceOptions persistence{options.persistent_elements, options.max_persistent_bytes};
  Device* const offload = options.offload_device != nullptr ? options.offload_device : device_;
  const UnitDevices devices{options.offload_weights ? offload : device_, device_, offload};
  for (UnitMembers& members : BuildUnits(parameters, leaves, persistence)) {
    comm::Communicator* group = members.family == Family::kExpert ? groups.edp : groups.dp;
    EK_ASSIGN_OR_RETURN(std::unique_ptr<Unit> unit, Unit::Create(std::move(members), parameters, *policy, group,
                                                                 static_cast<int>(state_names.size()), devices));
    units.push_back(std::move(unit));
  }
  return absl::OkStatus();
}

absl::StatusOr<StepResult> PartitionedModel::Impl::Step() {
  EK_RETURN_IF_ERROR(coordinator->CheckNothingFetched());
  // Asking for gradients is no collective call: one rank may have done it where others have not.
  std::vector<int64_t> open = gradients->OpenUnits();
  EK_RETURN_IF_ERROR(optimizer->OrOverRanks(absl::MakeSpan(open)));
  EK_RETURN_IF_ERROR(gradients->FlushRest(open));
  EK_RETURN_IF_ERROR(compute_->Synchronize());
  EK_RETURN_IF_ERROR(comm_->Synchronize());
  EK_RETURN_IF_ERROR(coordinator->EndPass());
  absl::Status replicas;
  if (check_due_) EK_RETURN_IF_ERROR(replica_check_->Compare(&replicas));
  const std::vector<std::string> changed = guard_ != nullptr ? guard_->Changed() : std::vector<std::string>();
  EK_ASSIGN_OR_RETURN(StepResult result, optimizer->Step(log_, replicas, changed));
  log_.Forget();
  if (guard_ != nullptr && result.stepped) guard_->Remember();
  if (result.stepped) coordinator->WeightsChanged();
  PrepareReplicaCheck();
  return result;
}

// Steps are counted alike on all ranks, so they check in the same ones.
void PartitionedModel::Impl::PrepareReplicaCheck() {
  check_due_ = check_interval_ > 0 && ++steps_seen_ % check_interval_ == 0;
  if (check_due_) replica_check_->Begin();
  coordinator->UseReplicaCheck(check_due_ ? replica_check_.get() : nullptr);
}

absl::Status PartitionedModel::Impl::ZeroGradients() {
  gradients->Discard();
  EK_RETURN_IF_ERROR(compute_->Synchronize());
  return optimizer->ZeroGradients();
}

absl::Status PartitionedModel::Impl::StateLoaded(const StepProgress& progress) {
  EK_RETURN_IF_ERROR(coordinator->CheckNothingFetched());
  for (const auto& unit : units) EK_RETURN_IF_ERROR(unit->WeightsFromMasters(*comm_));
  EK_RETURN_IF_ERROR(comm_->Synchronize());
  EK_RETURN_IF_ERROR(compute_->Synchronize());
  EK_RETURN_IF_ERROR(coordinator->EndPass());
  coordinator->WeightsChanged();
  optimizer->set_progress(progress);
  if (guard_ != nullptr) guard_->Remember();
  return absl::OkStatus();
}

// Gradients that wait in a bucket belong to what is read.
absl::Status PartitionedModel::Impl::ReadTensor(int parameter, TensorKind kind, absl::string_view state,
                                                TensorView out) {
  EK_RETURN_IF_ERROR(access->CheckRead(parameter, kind, out));
  if (kind == TensorKind::kGradient) EK_RETURN_IF_ERROR(gradients->FinishBucketOf(parameter));
  return access->ReadTensor(parameter, kind, state, out);
}

absl::Status PartitionedModel::Impl::CheckLeafIndex(int leaf) const {
  if (leaf >= 0 && leaf < static_cast<int>(leaves.size())) return absl::OkStatus();
  return Error(absl::StatusCode::kInvalidArgument, "leaf", "", absl::StrCat("leaf ", leaf, " of ", leaves.size()));
}

PartitionedModel::PartitionedModel(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
PartitionedModel::~PartitionedModel() = default;

absl::StatusOr<std::unique_ptr<PartitionedModel>> PartitionedModel::Create(std::vector<ParameterSpec> parameters,
                                                                           const LeafSelection& selection,
                                                                           const PartitionedModelOptions& options,
                                                                           const ModelGroups& groups, Device* device,
                                                                           Stream* compute, Stream* comm) {
  auto impl = std::make_unique<Impl>();
  EK_RETURN_IF_ERROR(impl->Init(std::move(parameters), selection, options, groups, device, compute, comm));
  return std::unique_ptr<PartitionedModel>(new PartitionedModel(std::move(impl)));
}

int PartitionedModel::num_leaves() const { return static_cast<int>(impl_->leaves.size()); }
const Leaf& PartitionedModel::leaf(LeafId id) const { return impl_->leaves[static_cast<size_t>(id.value)]; }
absl::Span<const ParameterSpec> PartitionedModel::parameters() const { return impl_->parameters; }

absl::StatusOr<LeafId> PartitionedModel::FindLeaf(absl::string_view name) const {
  std::vector<std::string> names;
  for (size_t l = 0; l < impl_->leaves.size(); ++l) {
    if (impl_->leaves[l].name == name) return LeafId{static_cast<int>(l)};
    names.push_back(impl_->leaves[l].name);
  }
  return Error(absl::StatusCode::kNotFound, "find_leaf", name,
               absl::StrCat("there is no such leaf; there are: ", absl::StrJoin(names, ", ")));
}

absl::StatusOr<LeafWeights> PartitionedModel::Fetch(LeafId id) {
  EK_RETURN_IF_ERROR(impl_->CheckLeafIndex(id.value));
  absl::MutexLock lock(&impl_->mutex);
  EK_ASSIGN_OR_RETURN(const FetchedLeaf fetched, impl_->coordinator->Fetch(id.value));
  return LeafWeights(fetched.views, fetched.current_generation, fetched.generation);
}

absl::Status PartitionedModel::Release(LeafId id) {
  EK_RETURN_IF_ERROR(impl_->CheckLeafIndex(id.value));
  absl::MutexLock lock(&impl_->mutex);
  return impl_->coordinator->Release(id.value);
}

absl::StatusOr<absl::Span<const TensorView>> PartitionedModel::Gradients(LeafId id) {
  EK_RETURN_IF_ERROR(impl_->CheckLeafIndex(id.value));
  absl::MutexLock lock(&impl_->mutex);
  return impl_->gradients->Open(id.value);
}

absl::Status PartitionedModel::FlushGradients(LeafId id) {
  EK_RETURN_IF_ERROR(impl_->CheckLeafIndex(id.value));
  absl::MutexLock lock(&impl_->mutex);
  return impl_->gradients->Flush(id.value);
}

absl::StatusOr<StepResult> PartitionedModel::Step() {
  absl::MutexLock lock(&impl_->mutex);
  return impl_->Step();
}

void PartitionedModel::set_learning_rate(double rate) {
  absl::MutexLock lock(&impl_->mutex);
  impl_->optimizer->set_learning_rate(rate);
}

double PartitionedModel::loss_scale() const { return progress().loss_scale; }

absl::Status PartitionedModel::ZeroGradients() {
  absl::MutexLock lock(&impl_->mutex);
  return impl_->ZeroGradients();
}

absl::Status PartitionedModel::UseTrace(absl::string_view name) {
  absl::MutexLock lock(&impl_->mutex);
  return impl_->coordinator->UseTrace(name);
}

TraceState PartitionedModel::trace_state() const {
  absl::MutexLock lock(&impl_->mutex);
  return impl_->coordinator->trace_complete() ? TraceState::kComplete : TraceState::kRecording;
}

std::string PartitionedModel::PlanText() const {
  absl::MutexLock lock(&impl_->mutex);
  return impl_->coordinator->PlanText();
}

absl::Status PartitionedModel::ReadTensor(int parameter, TensorKind kind, absl::string_view state, TensorView out) {
  absl::MutexLock lock(&impl_->mutex);
  return impl_->ReadTensor(parameter, kind, state, out);
}

std::vector<StateTensor> PartitionedModel::StateTensors() {
  absl::MutexLock lock(&impl_->mutex);
  return impl_->access->StateTensors();
}

absl::Status PartitionedModel::StateLoaded(const StepProgress& progress) {
  absl::MutexLock lock(&impl_->mutex);
  return impl_->StateLoaded(progress);
}

StepProgress PartitionedModel::progress() const {
  absl::MutexLock lock(&impl_->mutex);
  return impl_->optimizer->progress();
}

ModelCounts PartitionedModel::counts() const {
  absl::MutexLock lock(&impl_->mutex);
  const CoordinatorCounts fetching = impl_->coordinator->counts();
  ModelCounts counts;
  counts.fetches = fetching.fetches;
  counts.gathers = fetching.gathers;
  counts.prefetched = fetching.prefetched;
  counts.prefetch_wasted = fetching.prefetch_wasted;
  counts.reused = fetching.reused;
  counts.flushes = impl_->gradients->reducer().num_collectives();
  counts.gathered_bytes = fetching.gathered_bytes;
  counts.peak_gathered_bytes = fetching.peak_gathered_bytes;
  counts.predicted_peak_gathered_bytes = fetching.predicted_peak_gathered_bytes;
  counts.arena_bytes = fetching.arena_bytes;
  counts.gradient_pool_bytes = impl_->gradients->reducer().pool_bytes();
  counts.pending_gradient_bytes = impl_->gradients->reducer().pending_bytes();
  counts.predicted_pending_gradient_bytes = impl_->gradients->PredictPendingBytes();
  counts.trace_changes = fetching.trace_changes;
  counts.fetch_host_operations = fetching.fetch_host_operations;
  counts.fetch_cycles = fetching.fetch_cycles;
  return counts;
}

void PartitionedModel::ResetPeak() {
  absl::MutexLock lock(&impl_->mutex);
  impl_->coordinator->ResetPeak();
}

std::string PartitionedModel::ToTable() const {
  std::string out = absl::StrFormat("policy %s\n%-44s %6s %6s %12s %12s %9s\n", std::string(impl_->policy->name()),
                                    "unit", "params", "ranks", "shard bytes", "gathered", "host ops");
  for (const auto& unit : impl_->units) {
    const UnitLayout& layout = unit->layout();
    const int64_t ops = unit->resident() ? 0 : impl_->policy->Cost(unit->specs(), unit->world_size()).host_operations;
    absl::StrAppendFormat(&out, "%-44s %6d %6d %12d %12d %9d\n", unit->name(), unit->specs().size(), layout.world_size,
                          layout.shard_bytes, layout.gathered_bytes, ops);
  }
  return out;
}

int64_t PartitionedModel::PredictedHostOperations(LeafId id) const {
  int64_t operations = 0;
  bool first = true;
  for (int u : impl_->coordinator->UnitsOf(id.value)) {
    const Unit& unit = *impl_->units[static_cast<size_t>(u)];
    if (unit.resident() || unit.members().persistent) continue;
    const FetchCost cost = impl_->policy->Cost(unit.specs(), unit.world_size());
    operations += cost.host_operations;
    // The units of a leaf share its edges.
    if (!first && impl_->policy->leaf_edges()) operations -= cost.event_records + cost.event_waits;
    first = false;
  }
  return operations;
}

}  // namespace evenkeel::zero3

#include "evenkeel/comm/host_communicator.h"

#include <algorithm>
#include <atomic>
#include <optional>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "evenkeel/comm/call_judgement.h"
#include "evenkeel/comm/call_plan.h"
#include "evenkeel/comm/fingerprint.h"
#include "evenkeel/comm/grouped_call.h"
#include "evenkeel/comm/grouped_plan.h"
#include "evenkeel/comm/phase_plan.h"
#include "evenkeel/comm/two_level.h"
#include "evenkeel/runtime/base/status_macros.h"

namespace evenkeel::comm {
namespace {

uint32_t DeadlineMs(absl::Duration deadline) {
  return static_cast<uint32_t>(absl::ToInt64Milliseconds(absl::Ceil(deadline, absl::Milliseconds(1))));
}

class Impl final : public Communicator {
 public:
  Impl(HostCommunicator::Options options, std::unique_ptr<Transport> transport)
      : options_(std::move(options)),
        transport_(std::move(transport)),
        group_digest_(GroupDigest(options_.group)),
        deadline_(options_.deadline),
        stragglers_(options_.group.ranks, options_.stragglers),
        pair_sequences_(options_.group.size(), 0) {
    EK_CHECK(transport_ != nullptr || size() == 1);
    if (options_.two_level) grid_ = NodeGrid::Create(options_.group, *options_.topology);
  }

  const Group& group() const override { return options_.group; }
  int rank() const override { return options_.rank; }
  int64_t epoch() const override { return options_.epoch; }

  absl::Status AllReduce(ConstTensorView send, TensorView recv, ReduceOp op, Stream& stream) override {
    return Issue(PlanAllReduce(send, recv, op, place()), stream);
  }
  absl::Status AllGather(ConstTensorView send, TensorView recv, Stream& stream) override {
    return Issue(PlanAllGather(send, recv, place()), stream);
  }
  absl::Status AllGatherV(ConstTensorView send, TensorView recv, absl::Span<const int64_t> counts,
                          Stream& stream) override {
    return Issue(PlanAllGatherV(send, recv, counts, place()), stream);
  }
  absl::Status ReduceScatter(ConstTensorView send, TensorView recv, ReduceOp op, Stream& stream) override {
    return Issue(PlanReduceScatter(send, recv, op, place()), stream);
  }
  absl::Status ReduceScatterV(ConstTensorView send, TensorView recv, absl::Span<const int64_t> counts, ReduceOp op,
                              Stream& stream) override {
    return Issue(PlanReduceScatterV(send, recv, counts, op, place()), stream);
  }
  absl::Status AllToAll(ConstTensorView send, TensorView recv, Stream& stream) override {
    return Issue(PlanAllToAll(send, recv, place()), stream);
  }
  absl::Status AllToAllV(ConstTensorView send, absl::Span<const int64_t> send_counts, TensorView recv,
                         absl::Span<const int64_t> recv_counts, Stream& stream) override {
    return Issue(PlanAllToAllV(send, send_counts, recv, recv_counts, place()), stream);
  }
  absl::Status Broadcast(TensorView buffer, int root, Stream& stream) override {
    return Issue(PlanBroadcast(buffer, root, place()), stream);
  }
  absl::Status Barrier(Stream& stream) override { return Issue(PlanBarrier(), stream); }
  absl::Status Send(ConstTensorView send, int peer, Stream& stream) override {
    return IssuePair(PlanSend(send, peer, place()), peer, stream);
  }
  absl::Status Recv(TensorView recv, int peer, Stream& stream) override {
    return IssuePair(PlanRecv(recv, peer, place()), peer, stream);
  }

  absl::Status RunGrouped(absl::Span<const GroupedCall> calls, Stream& stream) override {
    return Issue(PlanGrouped(calls, place()), stream);
  }

  absl::Status SetDeadline(absl::Duration deadline) override {
    EK_RETURN_IF_ERROR(CheckDeadline(deadline));
    deadline_ = deadline;
    return absl::OkStatus();
  }

  std::vector<StragglerCount> stragglers() const override { return stragglers_.counts(); }

  absl::Status status() const override {
    if (!is_broken_.load(std::memory_order_acquire)) return absl::OkStatus();  // asked by every call
    absl::MutexLock lock(&mutex_);
    return first_cause_;
  }

 private:
  // One issued call: what the stream carries. When the stream drops it unrun, the peers must not wait for this rank.
  // `stream` is set when somebody wants to hear of it.
  class Job {
   public:
    Job(Impl* comm, CallPlan plan, Call call, Transport* transport, const Stream* stream)
        : comm_(comm), plan_(std::move(plan)), call_(call), transport_(transport), stream_(stream) {
      if (stream_ != nullptr) comm_->options_.watch->Issued(Queued(*comm_), stream_);
    }
    Job(Job&& other) noexcept
        : comm_(std::exchange(other.comm_, nullptr)),
          plan_(std::move(other.plan_)),
          call_(other.call_),
          transport_(other.transport_),
          stream_(other.stream_) {}
    ~Job() {
      if (comm_ == nullptr) return;
      if (stream_ != nullptr) comm_->options_.watch->Ended(Queued(*comm_));
      comm_->Dropped(call_);
    }
    absl::Status operator()() {
      Impl& comm = *std::exchange(comm_, nullptr);
      if (stream_ == nullptr) return comm.Execute(plan_, call_, transport_);
      const QueuedCall queued = Queued(comm);
      comm.options_.watch->Began(queued, stream_);
      const absl::Status status = comm.Execute(plan_, call_, transport_);
      comm.options_.watch->Ended(queued);
      return status;
    }

   private:
    QueuedCall Queued(const Impl& comm) const {
      QueuedCall queued{.epoch = comm.epoch(), .rank = comm.rank(), .sequence = call_.sequence};
      if (!plan_.members.empty()) {
        queued.low = plan_.members[0];
        queued.high = plan_.members[1];
      }
      return queued;
    }

    Impl* comm_;
    CallPlan plan_;
    Call call_;
    Transport* transport_;
    const Stream* stream_;
  };

  Place place() const { return {options_.rank, size(), grid_.has_value() ? &*grid_ : nullptr, options_.scratch}; }
  ErrorContext Context(const Call& call) const { return CallContext(group(), epoch(), rank(), call); }

  absl::Status Issue(CallPlan plan, Stream& stream) {
    const Call call{.operation = plan.operation,
                    .sequence = sequence_.fetch_add(1, std::memory_order_relaxed),
                    .limit = deadline_,
                    .late_after = stragglers_.After(deadline_)};
    return Enqueue(std::move(plan), call, transport_.get(), stream);
  }

  absl::Status IssuePair(CallPlan plan, int peer, Stream& stream) {
    Call call{.operation = plan.operation, .limit = deadline_};
    if (peer < 0 || peer >= size() || peer == rank()) return FailOwn(call, plan.bad_argument);
    call.sequence = pair_sequences_[peer]++;
    absl::StatusOr<Transport*> pair = transport_->Pair(peer);
    if (!pair.ok()) return Fail(pair.status());
    return Enqueue(std::move(plan), call, *pair, stream);
  }

  absl::Status Enqueue(CallPlan plan, const Call& call, Transport* transport, Stream& stream) {
    const absl::Status bad = plan.bad_argument;
    const bool is_heard = options_.watch != nullptr && transport != nullptr && !stream.is_inline();
    Job job(this, std::move(plan), call, transport, is_heard ? &stream : nullptr);
    // A stream that runs the call at once gets it as it stands, without an allocation.
    const absl::Status issued = stream.is_inline() ? stream.LaunchCollective([&job] { return job(); })
                                                   : stream.LaunchCollective(std::move(job));
    // On a worker stream the refusal to the peers is under way; this rank can know at once.
    if (issued.ok() && !bad.ok()) return OwnError(call, bad);
    return issued;
  }

  absl::Status OwnError(const Call& call, const absl::Status& bad) const {
    return TransportError(bad.code(), Context(call), bad.message());
  }
  absl::Status FailOwn(const Call& call, const absl::Status& bad) { return Fail(OwnError(call, bad)); }

  // Keeps the first cause and lets the peers know.
  absl::Status Fail(const absl::Status& cause) {
    {
      absl::MutexLock lock(&mutex_);
      if (first_cause_.ok()) first_cause_ = cause;
      is_broken_.store(true, std::memory_order_release);
    }
    if (transport_ != nullptr) transport_->Abort(cause);
    return cause;
  }

  void Dropped(const Call& call) {
    (void)Fail(TransportError(absl::StatusCode::kAborted, Context(call),
                              "the stream of this rank had failed before and skipped the call"));
  }

  Fingerprint MakeFingerprint(const CallPlan& plan, const Call& call) const {
    Fingerprint f;
    f.operation = static_cast<uint8_t>(plan.operation);
    f.dtype = plan.dtype;
    f.reduce_op = plan.reduce_op;
    f.flags = static_cast<uint8_t>((plan.in_place ? kFlagInPlace : 0) | (plan.two_level ? kFlagTwoLevel : 0));
    f.root = plan.root;
    f.local_status = static_cast<uint32_t>(plan.bad_argument.code());
    f.group = group_digest_;
    f.epoch = epoch();
    f.sequence = call.sequence;
    f.count = plan.count;
    f.counts_digest = plan.counts_digest;
    f.deadline_ms = DeadlineMs(call.limit);
    return SealFingerprint(f);
  }

  absl::Status Execute(CallPlan& plan, const Call& call, Transport* transport) {
    if (busy_.exchange(true, std::memory_order_acquire)) {
      return Fail(TransportError(absl::StatusCode::kFailedPrecondition, Context(call),
                                 "two threads make calls of this communicator at the same time"));
    }
    const absl::Status status = ExecuteAlone(plan, call, transport);
    busy_.store(false, std::memory_order_release);
    return status;
  }

  absl::Status ExecuteAlone(CallPlan& plan, const Call& call, Transport* transport) {
    if (absl::Status broken = status(); !broken.ok()) return BrokenGroupError(Context(call), broken);
    if (size() == 1) return plan.bad_argument.ok() ? Move(plan, call, nullptr) : FailOwn(call, plan.bad_argument);
    const absl::Status result = AgreeAndMove(plan, call, transport);
    return result.ok() ? result : Fail(result);
  }

  absl::Status AgreeAndMove(CallPlan& plan, const Call& call, Transport* transport) {
    if (plan.bad_argument.ok()) plan.bad_argument = transport->Reserve(plan.combines());
    const bool refuses = !plan.bad_argument.ok();
    Posting posting{.fingerprint = MakeFingerprint(plan, call), .row = plan.row};
    Phase first;
    if (!refuses && !plan.phases.empty() && !plan.phases.front().is_local) {
      RunLocalSteps(plan.phases.front().before, size());
      plan.phases.front().before.clear();
      first = SpansOf(plan.phases.front());
      posting.first = &first;
    }
    Agreement agreement;
    const absl::Status agreed = transport->Agree(call, posting, &agreement);
    if (refuses) return OwnError(call, plan.bad_argument);
    EK_RETURN_IF_ERROR(agreed);
    BookControl(posting, transport);
    if (plan.members.empty() && !agreement.late.empty()) NoteLate(call, agreement);
    if (std::optional<Disagreement> odd = Judge(plan, agreement); odd.has_value()) {
      if (plan.operation == Operation::kGrouped && DifferOnlyInside(agreement)) {
        EK_ASSIGN_OR_RETURN(odd, FindDifferentPart(plan, call, agreement, transport));
      }
      return DisagreementError(call, *odd);
    }
    if (plan.needs_completion()) {
      plan.bad_argument = CompletePlan(agreement, place(), &plan);
      EK_RETURN_IF_ERROR(Vote(plan, call, transport));
    }
    if (plan.members.empty() && !plan.grouped_counts.has_value()) BookCollectives(plan);
    return Move(plan, call, transport);
  }

  // Which of the grouped calls it is in which the ranks differ.
  absl::StatusOr<Disagreement> FindDifferentPart(const CallPlan& plan, const Call& call, const Agreement& agreement,
                                                 Transport* transport) {
    return FindGroupedDifference(plan, agreement, [&](const CallPlan& part, Agreement* one) -> absl::Status {
      const Posting posting{.fingerprint = MakeFingerprint(part, call), .row = part.row};
      EK_RETURN_IF_ERROR(transport->Agree(call, posting, one));
      BookControl(posting, transport);
      return absl::OkStatus();
    });
  }

  // Grouped all_to_all_v, when everybody's counts have come.
  absl::Status JudgeCounts(CallPlan& plan, const Call& call, Transport* transport) {
    const std::optional<Disagreement> odd = JudgeGroupedCounts(place(), &plan);
    if (odd.has_value()) return DisagreementError(call, *odd);
    const bool is_complete = std::none_of(plan.parts.begin(), plan.parts.end(),
                                          [](const CallPlan& part) { return part.needs_completion(); });
    if (is_complete) return absl::OkStatus();
    plan.bad_argument = CompleteGroupedPlan(place(), &plan);
    return Vote(plan, call, transport);
  }

  // Whether all ranks have the memory for what only the agreed counts tell; else plan.bad_argument is set.
  absl::Status Vote(const CallPlan& plan, const Call& call, Transport* transport) {
    const Posting vote{.fingerprint = MakeFingerprint(plan, call)};
    Agreement votes;
    const absl::Status agreed = transport->Agree(call, vote, &votes);
    if (!plan.bad_argument.ok()) return OwnError(call, plan.bad_argument);
    EK_RETURN_IF_ERROR(agreed);
    BookControl(vote, transport);
    const std::optional<Disagreement> odd = FindDisagreement(votes.fingerprints);
    return odd.has_value() ? DisagreementError(call, *odd) : absl::OkStatus();
  }

  void NoteLate(const Call& call, const Agreement& agreement) {
    ErrorContext where = Context(call);
    where.limit = call.limit;
    stragglers_.Note(where, agreement.late, agreement.waited);
  }

  void BookCollectives(const CallPlan& plan) {
    const int64_t number = plan.operation == Operation::kGrouped ? plan.count : 1;
    for (int64_t i = 0; i < number; ++i) options_.ledger->AddCollective(group().axis);
  }

  void BookControl(const Posting& posting, const Transport* transport) {
    options_.ledger->AddControl((transport->size() - 1) *
                                static_cast<int64_t>(kFingerprintBytes + posting.row.size() * sizeof(int64_t)));
  }

  absl::Status DisagreementError(const Call& call, const Disagreement& odd) const {
    ErrorContext context = Context(call);
    context.findings = odd.findings;
    return TransportError(odd.code, std::move(context), absl::StrCat(odd.what, "; nothing was transferred"));
  }

  static Phase SpansOf(const PhasePlan& plan) {
    Phase phase;
    phase.sends = plan.sends;
    phase.receives = plan.receives;
    phase.block_bytes = plan.block_bytes;
    return phase;
  }

  // `transport` is null in a group of one, where only the own blocks are moved.
  absl::Status Move(CallPlan& plan, const Call& call, Transport* transport) {
    const int self = transport == nullptr ? 0 : transport->rank();
    for (size_t i = 0; i < plan.phases.size(); ++i) {
      const PhasePlan& step = plan.phases[i];
      RunLocalSteps(step.before, size());
      if (step.is_local) continue;
      Book(plan, step, self);
      Phase phase = SpansOf(step);
      const auto copy_own = [&step, self] { CopyOwnBlock(step, self); };
      const absl::FunctionRef<void()> meanwhile(copy_own);
      if (!step.reduces) phase.meanwhile = &meanwhile;
      const auto reduce = [&step](int64_t begin, int64_t length, absl::Span<const void* const> sources) {
        CombineBlocks(step, begin, length, sources);
      };
      const CombineFn combine(reduce);
      if (step.reduces) phase.combine = &combine;
      // Ranks that give up because of the counts must not take back what others still read.
      phase.more_follows =
          !step.is_control && std::any_of(plan.phases.begin() + static_cast<int64_t>(i) + 1, plan.phases.end(),
                                          [](const PhasePlan& later) { return !later.is_local; });
      if (transport != nullptr) {
        EK_RETURN_IF_ERROR(transport->Exchange(call, phase));
      } else if (!step.reduces) {
        copy_own();
      } else if (step.block_bytes > 0) {
        const void* const own[] = {step.sends[0].data};
        combine(0, step.block_bytes, own);
      }
      if (!step.is_control) continue;
      EK_RETURN_IF_ERROR(JudgeCounts(plan, call, transport));
      BookCollectives(plan);
    }
    return absl::OkStatus();
  }

  static void CopyOwnBlock(const PhasePlan& step, int self) {
    const SendSpan& from = step.sends[self];
    const ReceiveSpan& to = step.receives[self];
    if (from.data != to.data) CopyBytes(to.data, from.data, from.bytes);
  }

  void Book(const CallPlan& plan, const PhasePlan& step, int self) {
    const auto world_rank = [this, &plan](int index) {
      return group().ranks[plan.members.empty() ? index : plan.members[index]];
    };
    if (step.is_control) {
      for (const SendSpan& send : step.sends) options_.ledger->AddControl(send.bytes);
      return;
    }
    const int from = world_rank(self);
    for (int to = 0; to < static_cast<int>(step.sends.size()); ++to) {
      if (to == self || step.sends[to].bytes == 0) continue;
      options_.ledger->AddMessage(group().axis, options_.topology->Link(from, world_rank(to)), step.sends[to].bytes);
    }
  }

  const HostCommunicator::Options options_;
  const std::unique_ptr<Transport> transport_;
  const uint64_t group_digest_;
  std::optional<NodeGrid> grid_;
  absl::Duration deadline_;
  Stragglers stragglers_;
  std::atomic<int64_t> sequence_{0};  // also with two threads, so that they can be refused
  std::vector<int64_t> pair_sequences_;
  std::atomic<bool> busy_{false};
  std::atomic<bool> is_broken_{false};  // set after first_cause_
  mutable absl::Mutex mutex_;
  absl::Status first_cause_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace

std::unique_ptr<Communicator> HostCommunicator::Create(Options options, std::unique_ptr<Transport> transport) {
  return std::make_unique<Impl>(std::move(options), std::move(transport));
}

}  // namespace evenkeel::comm

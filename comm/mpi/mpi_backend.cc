#include "evenkeel/comm/mpi/mpi_backend.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "evenkeel/comm/fingerprint.h"
#include "evenkeel/comm/host_communicator.h"
#include "evenkeel/comm/message/message_backend.h"
#include "evenkeel/comm/mpi/build_id.h"
#include "evenkeel/comm/mpi/mpi_job.h"
#include "evenkeel/comm/mpi/mpi_wire.h"
#include "evenkeel/runtime/base/digest.h"
#include "evenkeel/runtime/base/status_macros.h"

namespace evenkeel::comm {
namespace {

MessageOptions MessageOptionsOf(const MpiOptions& options) {
  return {
      .eager_bytes = options.eager_bytes, .piece_bytes = options.piece_bytes, .payload_digest = options.payload_digest};
}

uint64_t OptionsDigest(const MpiOptions& options) {
  uint64_t digest = DigestOfMessageOptions(MessageOptionsOf(options));
  digest = CombineDigests(digest, Digest64(absl::StrCat(options.two_level ? 1 : 0)));
  if (options.topology.has_value()) {
    for (int rank = 0; rank < options.topology->world_size(); ++rank) {
      digest = CombineDigests(digest, static_cast<uint64_t>(options.topology->node(rank)));
    }
  }
  return digest;
}

class Impl final : public MpiBackend {
 public:
  Impl(MpiOptions options, std::unique_ptr<MpiJob> job, std::unique_ptr<MpiWire> wire)
      : options_(std::move(options)), job_(std::move(job)), wire_(std::move(wire)) {
    backend_ = std::make_unique<MessageBackend>(
        wire_.get(),
        MessageBackend::Options{
            .name = "mpi",
            .topology = options_.topology.has_value() ? *options_.topology : TopologyOfHosts(wire_->hellos()),
            .deadline = options_.deadline,
            .two_level = options_.two_level,
            .message = MessageOptionsOf(options_),
            .scratch = options_.scratch,
            .stragglers = options_.stragglers});
  }

  ~Impl() override {
    if (wire_->status().ok()) backend_->SayGoodbye();
    bool all_here = wire_->status().ok() && wire_->AwaitAll(options_.deadline);
    if (!all_here) backend_->SayLeftAlone();
    // A rank that waited in vain for this one, and went, left its part of AwaitAll behind: MPI_Finalize would wait for
    // it. In good order nobody ends before all are in MPI_Finalize.
    all_here = all_here && !backend_->AnyLeftAlone() && !AnyDead();
    backend_.reset();
    if (all_here && wire_->status().ok()) {
      job_->Leave(options_.finalize_limit, [this] { return wire_->DescribeWorld(); });
    }
  }

  absl::string_view name() const override { return backend_->name(); }
  int rank() const override { return backend_->rank(); }
  int size() const override { return wire_->size(); }
  const Topology& topology() const override { return backend_->topology(); }
  ByteLedger& ledger() override { return backend_->ledger(); }
  absl::StatusOr<std::unique_ptr<Communicator>> CreateGroup(const Group& group) override {
    return backend_->CreateGroup(group);
  }
  int64_t num_dropped_messages() override { return backend_->mailroom().num_dropped(); }

 private:
  bool AnyDead() const {
    for (int peer = 0; peer < size(); ++peer) {
      if (wire_->Health(peer, /*describe=*/false).state == PeerHealth::State::kDead) return true;
    }
    return false;
  }

  const MpiOptions options_;
  std::unique_ptr<MpiJob> job_;
  std::unique_ptr<MpiWire> wire_;
  std::unique_ptr<MessageBackend> backend_;
};

absl::Status CheckOptions(const MpiOptions& options) {
  EK_RETURN_IF_ERROR(CheckDeadline(options.deadline));
  EK_RETURN_IF_ERROR(CheckDeadline(options.start_deadline));
  EK_RETURN_IF_ERROR(CheckDeadline(options.finalize_limit));
  return CheckMessageOptions(MessageOptionsOf(options));
}

}  // namespace

absl::StatusOr<std::unique_ptr<MpiBackend>> MpiBackend::Create(const MpiOptions& options) {
  EK_RETURN_IF_ERROR(CheckOptions(options));
  if (options.catch_sigterm) CatchSigterm();
  EK_ASSIGN_OR_RETURN(std::unique_ptr<MpiJob> job, MpiJob::Join(options.start_deadline));
  MpiWire::Options wire_options{.spin = options.spin, .start_limit = options.start_deadline};
  wire_options.hello.protocol = kProtocol;
  wire_options.hello.build = options.build != 0 ? options.build : RunningBuildDigest();
  wire_options.hello.config = Digest64(options.config);
  wire_options.hello.options = OptionsDigest(options);
  absl::StatusOr<std::unique_ptr<MpiWire>> wire = MpiWire::Create(wire_options);
  if (!wire.ok()) return wire.status();
  if (options.topology.has_value() && options.topology->world_size() != (*wire)->size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("the topology has ", options.topology->world_size(), " ranks, the job ", (*wire)->size()));
  }
  return std::make_unique<Impl>(options, std::move(job), *std::move(wire));
}

}  // namespace evenkeel::comm

// The backend "mpi" by name.
#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "evenkeel/comm/backend_registry.h"
#include "evenkeel/comm/mpi/mpi_backend.h"
#include "evenkeel/runtime/base/error_context.h"
#include "evenkeel/runtime/base/status_macros.h"

namespace evenkeel::comm {
namespace {

// One rank of the job is this process.
class ProcessWorld final : public NamedWorld {
 public:
  explicit ProcessWorld(std::unique_ptr<MpiBackend> backend) : backend_(std::move(backend)) {}
  int size() const override { return backend_->size(); }
  std::vector<RankStatus> Run(const std::function<absl::Status(Backend&)>& body) override {
    return {{backend_->rank(), body(*backend_)}};
  }

 private:
  const std::unique_ptr<MpiBackend> backend_;
};

absl::StatusOr<std::unique_ptr<NamedWorld>> Create(const WorldOptions& options) {
  MpiOptions mpi;
  mpi.topology = options.topology;
  mpi.deadline = options.deadline;
  mpi.two_level = options.two_level;
  mpi.config = options.config;
  mpi.stragglers = options.stragglers;
  EK_ASSIGN_OR_RETURN(auto backend, MpiBackend::Create(mpi));
  if (options.world_size != 0 && options.world_size != backend->size()) {
    ErrorContext where{.module = "comm", .operation = "start", .group = "world"};
    where.rank = backend->rank();
    where.size = backend->size();
    where.next_step = absl::StrCat("start ", options.world_size, " processes");
    return MakeError(
        absl::StatusCode::kInvalidArgument, where,
        absl::StrCat("a world of ", options.world_size, " is wanted, the job has ", backend->size(), " ranks"));
  }
  return std::make_unique<ProcessWorld>(std::move(backend));
}

const bool registered = RegisterBackend("mpi", Create);

}  // namespace
}  // namespace evenkeel::comm

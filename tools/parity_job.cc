#include "evenkeel/tools/parity_job.h"

#include <algorithm>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "evenkeel/runtime/base/error_context.h"
#include "evenkeel/runtime/base/status_macros.h"
#include "evenkeel/testing/corpus.h"
#include "evenkeel/tools/late_ranks.h"
#include "evenkeel/tools/report/report_writer.h"

namespace evenkeel::tools {
namespace {

std::string RegisteredName(absl::string_view name) { return name == "threads" ? "in_process" : std::string(name); }

// What the ranks of this process share.
class Process {
 public:
  explicit Process(const ParityJob& job) : job_(job), late_(job.world.world_size) {}

  LateRanks& late() { return late_; }

  absl::Status RunRank(comm::Backend& backend) {
    EK_ASSIGN_OR_RETURN(const testutil::Corpus* corpus, Prepare(backend.rank()));
    testutil::ParityConfig config = job_.config;
    if (job_.prepare) EK_RETURN_IF_ERROR(job_.prepare(backend, &config));
    EK_ASSIGN_OR_RETURN(testutil::ParityResult result,
                        job_.run ? job_.run(config, *corpus, backend) : testutil::RunParity(config, *corpus, backend));
    EK_ASSIGN_OR_RETURN(result.late_ranks, late_.Gather(backend));
    absl::MutexLock lock(&mutex_);
    if (!result_.has_value() || backend.rank() == 0) result_ = std::move(result);
    return absl::OkStatus();
  }

  testutil::ParityResult TakeResult() {
    absl::MutexLock lock(&mutex_);
    return *std::exchange(result_, std::nullopt);
  }

 private:
  // The text, read once; and on rank 0 a place for the report, before anything takes time.
  absl::StatusOr<const testutil::Corpus*> Prepare(int rank) {
    if (rank == 0) EK_RETURN_IF_ERROR(PrepareOutputFolder(job_.out));
    absl::MutexLock lock(&mutex_);
    if (!corpus_.has_value()) corpus_ = testutil::Corpus::Read(job_.corpus);
    EK_RETURN_IF_ERROR(corpus_->status());
    return &**corpus_;
  }

  const ParityJob& job_;
  LateRanks late_;
  absl::Mutex mutex_;
  std::optional<absl::StatusOr<testutil::Corpus>> corpus_ ABSL_GUARDED_BY(mutex_);
  std::optional<testutil::ParityResult> result_ ABSL_GUARDED_BY(mutex_);
};

bool IsEcho(const absl::Status& status) { return absl::IsAborted(status) || absl::IsUnavailable(status); }

}  // namespace

absl::Status CheckBackend(absl::string_view name) {
  const std::string registered = RegisteredName(name);
  const std::vector<std::string> linked = comm::BackendNames();
  if (std::find(linked.begin(), linked.end(), registered) != linked.end()) return absl::OkStatus();
  return comm::CreateWorld(registered, {}).status();  // says what is missing
}

absl::StatusOr<testutil::ParityResult> RunParityJob(const ParityJob& job, bool* is_reporter) {
  Process process(job);
  comm::WorldOptions options = job.world;
  options.stragglers = process.late().Options();
  absl::StatusOr<std::unique_ptr<comm::NamedWorld>> world = comm::CreateWorld(RegisteredName(job.backend), options);
  if (!world.ok()) {
    // Every process has its own end of such an error; the first tells it, where they can be told apart.
    const std::optional<ErrorContext> where = GetErrorContext(world.status());
    *is_reporter = !where.has_value() || where->rank <= 0;
    return world.status();
  }
  const std::vector<comm::RankStatus> ranks =
      (*world)->Run([&process](comm::Backend& backend) { return process.RunRank(backend); });
  *is_reporter = std::any_of(ranks.begin(), ranks.end(), [](const auto& rank) { return rank.rank == 0; });
  for (const comm::RankStatus& rank : ranks) {
    if (!rank.status.ok() && !IsEcho(rank.status)) return rank.status;
  }
  for (const comm::RankStatus& rank : ranks) EK_RETURN_IF_ERROR(rank.status);
  return process.TakeResult();
}

}  // namespace evenkeel::tools

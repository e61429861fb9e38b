// The main job: trains the same MoE language model on the same text under a reference order and candidates, step by
// step, and compares.
//
//   parity                                               every built-in order against `reference`, 16 threads
//   parity --candidate=mine.textproto --steps=20
//   mpirun --oversubscribe -n 8 parity --backend=mpi --tp=2 --ep=2 --dp=4 --steps=10
//   parity --numerics=canonical --tp=2 --ep=4 --dp=4 --baseline_layout=tp=1,ep=1,dp=1      two layouts, the same bits
//
// Exit codes: 0 every candidate holds, 1 a mismatch, 2 bad usage or configuration, 3 a fault.
#include "evenkeel/testing/parity.h"

#include <gflags/gflags.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "evenkeel/comm/backend_registry.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/mesh.h"
#include "evenkeel/comm/topology.h"
#include "evenkeel/moe/builtin_orders.h"
#include "evenkeel/moe/canonical_blocks.h"
#include "evenkeel/moe/order.h"
#include "evenkeel/moe/order_cost.h"
#include "evenkeel/moe/order_planner.h"
#include "evenkeel/runtime/base/error_context.h"
#include "evenkeel/runtime/base/status_macros.h"
#include "evenkeel/testing/corpus.h"
#include "evenkeel/testing/layout_parity.h"
#include "evenkeel/testing/layout_text.h"
#include "evenkeel/testing/parity_result.h"
#include "evenkeel/testing/training_config.h"
#include "evenkeel/testing/training_options.h"
#include "evenkeel/tools/auto_order.h"
#include "evenkeel/tools/late_ranks.h"
#include "evenkeel/tools/parity_job.h"
#include "evenkeel/tools/program.h"
#include "evenkeel/tools/report/report_writer.h"

DEFINE_string(reference, "reference", "order name, path to an order textproto, or `dense` (naive run in double)");
DEFINE_string(
    candidate, "",
    "order names or paths, comma separated, or `auto` (the cost model picks); default: every built-in order that fits");
DEFINE_int32(tp, 2, "tensor-parallel size");
DEFINE_int32(ep, 4, "expert-parallel size");
DEFINE_int32(dp, 8, "data-parallel replicas; the world is tp * dp ranks");
DEFINE_int32(etp, 0, "expert tensor-parallel size, 1 or tp; default: what each order asks for");
DEFINE_string(backend, "threads", "threads, mpi (under mpirun), nccl, or the name of one that you link");
DEFINE_string(zero3, "flat", "off, per_parameter, coalesced, flat; a comma list compares fetch policies too");
DEFINE_string(dtype, "f32", "f32, f64, bf16, or f16 with a dynamic loss scale");
DEFINE_double(loss_scale, 65536, "of f16: what it begins with, a power of two; it falls where steps overflow");
DEFINE_string(optimizer, "sgd", "sgd or adamw");
DEFINE_double(learning_rate, 0, "0: what suits the optimizer");
DEFINE_int64(steps, 50, "training steps");
DEFINE_uint64(seed, 1, "of initial weights, batches and router noise");
DEFINE_int32(experts, 8, "experts of a layer");
DEFINE_int32(top_k, 2, "routes per token");
DEFINE_string(capacity_factor, "1.25", "0 is dropless");
DEFINE_string(drop, "by_top_k", "which routes of an over-full expert stay: by_top_k, probs, position, choices_first");
DEFINE_string(score, "softmax", "of the router: softmax or sigmoid");
DEFINE_double(route_scale, 1, "of the route weights");
DEFINE_int32(groups, 1, "groups of experts; only the best --groups_kept may be chosen from");
DEFINE_int32(groups_kept, 1, "see --groups");
DEFINE_double(z_coefficient, 0, "of the router z-loss");
DEFINE_string(activation, "gelu", "of the experts: gelu or swiglu");
DEFINE_bool(expert_bias, false, "biases in the experts");
DEFINE_bool(recompute, false, "compute activations again in the backward, with the routing replayed");
DEFINE_int32(shared_experts, 0, "experts that every token passes beside its routed ones (DeepSeekMoE)");
DEFINE_bool(shared_gate, false, "the shared experts' output is scaled by a sigmoid gate (Qwen2-MoE)");
DEFINE_bool(residual_moe, false, "a dense MLP in a learnt mixture with the experts (DeepSpeed's use_residual)");
DEFINE_string(numerics, "fast",
              "fast, or canonical: the same bits in every layout (docs/numerics.md), whatever order, tp, ep, etp, dp");
DEFINE_string(baseline_layout, "",
              "canonical numerics: the layout of the reference, such as tp=1,ep=1,dp=1; all else is compared with it "
              "bit by bit; default: the layout of --tp --ep --dp");
DEFINE_int64(batches, 0,
             "batches of a step over all replicas, taken in passes; 0: one for each replica, in canonical "
             "numerics for each of the layout that has more");
DEFINE_int32(heads, 0, "attention heads; 0: 4, in canonical numerics 8");
DEFINE_string(corpus, evenkeel::testutil::kDefaultCorpus, "any text file or folder, read as bytes");
DEFINE_string(out, "parity-report", "folder for report.json, report.html, report.md, loss.png");
DEFINE_int32(ranks_per_node, 0,
             "consecutive ranks on each node, for bytes by class of links and exchanges in two levels; 0: one node, or "
             "with mpi one per host");
DEFINE_int32(deadline_seconds, 60, "limit of every collective call");

namespace evenkeel::tools {
namespace {

constexpr char kAuto[] = "auto";  // a candidate that the cost model picks

using testutil::ParityConfig;
using testutil::ParityEntry;
using testutil::ParityResult;
using testutil::ParityRun;

constexpr char kUsage[] =
    "parity [--reference=ORDER] [--candidate=ORDER,...] [--tp=N --ep=N --dp=N] [--backend=threads|mpi|NAME]";

bool IsDefault(const char* flag) { return gflags::GetCommandLineFlagInfoOrDie(flag).is_default; }

std::vector<std::string> Words(const std::string& list) { return absl::StrSplit(list, ',', absl::SkipEmpty()); }

absl::Status BadFlag(absl::string_view flag, absl::string_view value, absl::string_view wanted) {
  return absl::InvalidArgumentError(absl::StrCat("--", flag, "=", value, ": ", wanted));
}

// Whether --etp allows the layout that the order runs in.
bool FitsEtp(const moe::Order& order) {
  if (IsDefault("etp")) return true;
  comm::MeshShape mesh{FLAGS_tp, FLAGS_ep, FLAGS_dp, FLAGS_etp};
  return testutil::MeshForOrder(mesh, order).etp == FLAGS_etp;
}

absl::StatusOr<ParityEntry> Entry(const std::string& name, const std::string& zero3) {
  if (name == kAuto) {  // a stand-in until the links are measured
    EK_ASSIGN_OR_RETURN(ParityEntry entry, testutil::NamedEntry("reference", zero3));
    entry.name = kAuto;
    return entry;
  }
  const bool registered = name == testutil::kDense || moe::FindOrder(name).ok();
  absl::StatusOr<ParityEntry> entry = testutil::NamedEntry(registered ? name : UserPath(name), zero3);
  if (absl::IsNotFound(entry.status())) {
    return absl::NotFoundError(absl::StrCat(moe::FindOrder(name).status().message(), "; nor is there a file ", name));
  }
  EK_RETURN_IF_ERROR(entry.status());
  entry->name = name;
  if (!entry->dense && !FitsEtp(entry->order)) {
    return absl::InvalidArgumentError(absl::StrCat("--etp=", FLAGS_etp, " contradicts order '", name, "', which runs ",
                                                   moe::ExpertLayoutName(entry->order.expert_layout),
                                                   " experts (--tp=", FLAGS_tp, ")"));
  }
  return entry;
}

// Replaces a candidate `auto` by the order that is fastest on these links. `backend` null: threads.
absl::Status ResolveAuto(comm::Backend* backend, bool is_reporter, ParityConfig* config) {
  for (ParityEntry& entry : config->entries) {
    if (entry.name != kAuto) continue;
    EK_ASSIGN_OR_RETURN(const comm::Mesh mesh, comm::Mesh::Create(config->base.mesh));
    EK_ASSIGN_OR_RETURN(const moe::OrderSizes sizes, LayerSizes(config->base));
    EK_ASSIGN_OR_RETURN(const moe::OrderPlan plan, backend == nullptr ? PlanOnThreads(mesh, sizes, FLAGS_ranks_per_node)
                                                                      : PlanOnBackend(mesh, sizes, *backend));
    if (is_reporter) std::printf("auto: every MoE layer runs %s: %s\n", plan.best().name.c_str(), plan.why.c_str());
    EK_ASSIGN_OR_RETURN(entry, Entry(plan.best().name, entry.zero3));
    entry.name = absl::StrCat(kAuto, "=", plan.best().name);
  }
  return absl::OkStatus();
}

// The reference first. Every order runs under the first policy, the reference under all of them.
absl::StatusOr<std::vector<ParityEntry>> Entries() {
  const std::vector<std::string> policies = Words(FLAGS_zero3);
  if (policies.empty())
    return BadFlag("zero3", FLAGS_zero3, "name at least one of off, per_parameter, coalesced, flat");
  for (const std::string& policy : policies) {
    if (policy != "off" && policy != "per_parameter" && policy != "coalesced" && policy != "flat") {
      return BadFlag("zero3", policy, "known are off, per_parameter, coalesced, flat");
    }
  }
  std::vector<std::string> candidates = Words(FLAGS_candidate);
  if (!IsDefault("candidate") && candidates.empty()) {
    return BadFlag("candidate", FLAGS_candidate, "names no order; leave the flag out for every built-in one");
  }
  if (IsDefault("candidate")) {
    for (const std::string& name : moe::OrderNames()) {
      EK_ASSIGN_OR_RETURN(const moe::Order order, moe::FindOrder(name));
      const bool replicated_tokens =
          order.input.placement == moe::Placement::kInvariant && order.output.placement == moe::Placement::kInvariant;
      if (name != FLAGS_reference && FitsEtp(order) && replicated_tokens) candidates.push_back(name);
    }
  }
  std::vector<ParityEntry> entries;
  EK_ASSIGN_OR_RETURN(ParityEntry reference, Entry(FLAGS_reference, policies[0]));
  entries.push_back(std::move(reference));
  for (size_t i = 1; i < policies.size() && !entries[0].dense; ++i) {
    EK_ASSIGN_OR_RETURN(ParityEntry entry, Entry(FLAGS_reference, policies[i]));
    entries.push_back(std::move(entry));
  }
  for (const std::string& name : candidates) {
    EK_ASSIGN_OR_RETURN(ParityEntry entry, Entry(name, policies[0]));
    entries.push_back(std::move(entry));
  }
  return entries;
}

// Takes over the flags of these names, which are those of training options.
absl::Status SetOptions(absl::Span<const char* const> flags, testutil::TrainingConfig* base) {
  for (const char* flag : flags) {
    const std::string value = gflags::GetCommandLineFlagInfoOrDie(flag).current_value;
    const absl::Status set = testutil::SetTrainingOption(flag, value, base);
    if (!set.ok()) return absl::Status(set.code(), absl::StrCat("--", set.message()));
  }
  return absl::OkStatus();
}

bool IsCanonical() { return FLAGS_numerics == "canonical"; }

// The reference's layout in canonical numerics.
absl::StatusOr<comm::MeshShape> BaselineLayout(const testutil::TrainingConfig& base) {
  if (FLAGS_baseline_layout.empty()) return base.mesh;
  const absl::StatusOr<comm::MeshShape> mesh = testutil::ParseLayout(FLAGS_baseline_layout);
  return mesh.ok() ? mesh : BadFlag("baseline_layout", FLAGS_baseline_layout, mesh.status().message());
}

absl::Status SetNumerics(testutil::TrainingConfig* base) {
  if (!FLAGS_baseline_layout.empty() && !IsCanonical()) {
    return BadFlag("baseline_layout", FLAGS_baseline_layout,
                   "layouts are compared in canonical numerics; fast ones promise no equal bits (compare with "
                   "--reference=dense)");
  }
  if (!FLAGS_baseline_layout.empty() && FLAGS_reference == testutil::kDense) {
    return BadFlag("baseline_layout", FLAGS_baseline_layout, "the naive run (--reference=dense) has no layout");
  }
  base->model.heads = FLAGS_heads != 0 ? FLAGS_heads : IsCanonical() ? moe::kCanonicalBlocks : base->model.heads;
  base->batches = FLAGS_batches;
  if (FLAGS_batches == 0 && IsCanonical()) {
    EK_ASSIGN_OR_RETURN(const comm::MeshShape baseline, BaselineLayout(*base));
    base->batches = std::max(base->mesh.dp, baseline.dp);
  }
  return absl::OkStatus();
}

absl::Status SetModel(testutil::TrainingConfig* base) {
  base->mesh = {FLAGS_tp, FLAGS_ep, FLAGS_dp, FLAGS_etp == 0 ? FLAGS_tp : FLAGS_etp};
  if (!IsDefault("loss_scale") && FLAGS_dtype != "f16") {
    return BadFlag("loss_scale", absl::StrCat(FLAGS_loss_scale), "only --dtype=f16 has one");
  }
  EK_RETURN_IF_ERROR(SetOptions(
      {"seed",        "experts",      "top_k",         "capacity_factor", "drop",        "score",     "route_scale",
       "groups",      "groups_kept",  "z_coefficient", "activation",      "expert_bias", "recompute", "shared_experts",
       "shared_gate", "residual_moe", "dtype",         "loss_scale",      "optimizer",   "numerics"},
      base));
  if (!IsDefault("learning_rate")) EK_RETURN_IF_ERROR(SetOptions({"learning_rate"}, base));
  return SetNumerics(base);
}

absl::StatusOr<ParityConfig> ConfigFromFlags() {
  if (FLAGS_backend == "nccl") {
    return BadFlag("backend", FLAGS_backend,
                   absl::StrCat("no NCCL backend is linked into this program; linked: ",
                                absl::StrJoin(comm::BackendNames(), ", "), "; threads is in_process"));
  }
  if (const absl::Status known = CheckBackend(FLAGS_backend); !known.ok()) {
    return BadFlag("backend", FLAGS_backend, absl::StrCat(known.message(), "; threads is in_process"));
  }
  if (FLAGS_tp < 1 || FLAGS_ep < 1 || FLAGS_dp < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("--tp=", FLAGS_tp, " --ep=", FLAGS_ep, " --dp=", FLAGS_dp, ": every size must be at least 1"));
  }
  if (!IsDefault("etp") && FLAGS_etp != 1 && FLAGS_etp != FLAGS_tp) {
    return BadFlag("etp", absl::StrCat(FLAGS_etp), absl::StrCat("must be 1 or tp (", FLAGS_tp, ")"));
  }
  if (FLAGS_ranks_per_node < 0) {
    return BadFlag("ranks_per_node", absl::StrCat(FLAGS_ranks_per_node), "must be at least 0");
  }
  if (FLAGS_deadline_seconds < 1) {
    return BadFlag("deadline_seconds", absl::StrCat(FLAGS_deadline_seconds), "must be at least 1");
  }
  ParityConfig config;
  EK_RETURN_IF_ERROR(SetModel(&config.base));
  EK_ASSIGN_OR_RETURN(config.entries, Entries());
  config.steps = FLAGS_steps;
  config.ranks_per_node = FLAGS_ranks_per_node;
  for (const char* flag : {"reference",
                           "candidate",
                           "tp",
                           "ep",
                           "dp",
                           "backend",
                           "zero3",
                           "dtype",
                           "loss_scale",
                           "optimizer",
                           "steps",
                           "seed",
                           "experts",
                           "top_k",
                           "capacity_factor",
                           "drop",
                           "score",
                           "route_scale",
                           "groups",
                           "groups_kept",
                           "z_coefficient",
                           "activation",
                           "expert_bias",
                           "recompute",
                           "shared_experts",
                           "shared_gate",
                           "residual_moe",
                           "numerics",
                           "baseline_layout",
                           "corpus",
                           "ranks_per_node"}) {
    config.description.push_back({flag, gflags::GetCommandLineFlagInfoOrDie(flag).current_value});
  }
  config.description.push_back({"batches", absl::StrCat(config.base.num_batches())});
  config.description.push_back({"heads", absl::StrCat(config.base.model.heads)});
  config.description.push_back({"learning_rate", absl::StrCat(config.base.zero3.optimizer.learning_rate)});
  EK_RETURN_IF_ERROR(testutil::ValidateParityConfig(config));
  return config;
}

// A line that follows the steps, on a terminal only.
template <typename Config>
void ShowProgress(Config* config) {
  if (isatty(STDERR_FILENO) == 0) return;
  config->progress = [](int64_t done, int64_t steps) {
    std::fprintf(stderr, "\rstep %lld of %lld%s", static_cast<long long>(done), static_cast<long long>(steps),
                 done == steps ? "\n" : "");
  };
}

absl::StatusOr<int> ShowResult(const ParityResult& result) {
  EK_ASSIGN_OR_RETURN(const ReportFiles files, WriteReport(result, UserPath(FLAGS_out)));
  for (const ParityRun& run : result.runs) {
    if (!run.note.empty()) std::printf("%s (zero3 %s): %s\n", run.order.c_str(), run.zero3.c_str(), run.note.c_str());
    if (run.first_difference.has_value()) std::printf("%s\n", RenderDifference(run).c_str());
  }
  if (!files.warning.empty()) std::fprintf(stderr, "warning: %s\n", files.warning.c_str());
  if (!result.late_ranks.empty()) std::fprintf(stderr, "late: %s\n", DescribeLateRanks(result.late_ranks).c_str());
  std::printf("report: %s\n\n%s\n", absl::StrJoin(files.written, ", ").c_str(), RenderTable(result).c_str());
  return result.AllHold() ? kExitHolds : kExitMismatch;
}

bool ComparesLayouts(const ParityConfig& config) { return IsCanonical() && !config.entries[0].dense; }

// Canonical numerics: every run on its own, compared with the reference across layouts; on processes with a backend.
absl::StatusOr<ParityResult> RunLayouts(const ParityConfig& job, const testutil::Corpus& corpus, comm::Backend* backend,
                                        bool shows_progress) {
  testutil::LayoutParityConfig config;
  config.base = job.base;
  config.steps = job.steps;
  config.description = job.description;
  config.deadline = absl::Seconds(FLAGS_deadline_seconds);
  EK_ASSIGN_OR_RETURN(const comm::MeshShape baseline, BaselineLayout(job.base));
  config.runs.push_back({job.entries[0], baseline});
  for (size_t i = baseline == job.base.mesh ? 1 : 0; i < job.entries.size(); ++i) {
    config.runs.push_back({job.entries[i], job.base.mesh});
  }
  if (shows_progress) ShowProgress(&config);
  return backend != nullptr ? testutil::RunLayoutParity(config, corpus, *backend)
                            : testutil::RunLayoutParity(config, corpus);
}

// One thread per rank in each layout.
absl::StatusOr<int> RunLayoutsOnThreads(ParityConfig config) {
  EK_RETURN_IF_ERROR(PrepareOutputFolder(UserPath(FLAGS_out)));
  EK_ASSIGN_OR_RETURN(const testutil::Corpus corpus, testutil::Corpus::Read(UserPath(FLAGS_corpus)));
  EK_RETURN_IF_ERROR(ResolveAuto(nullptr, true, &config));
  EK_ASSIGN_OR_RETURN(const ParityResult result, RunLayouts(config, corpus, nullptr, true));
  return ShowResult(result);
}

absl::StatusOr<int> RunOnBackend(ParityConfig config, bool* is_reporter) {
  ParityJob job;
  job.backend = FLAGS_backend;
  job.world.world_size = FLAGS_tp * FLAGS_dp;
  job.world.deadline = absl::Seconds(FLAGS_deadline_seconds);
  job.world.config = gflags::CommandlineFlagsIntoString();
  if (FLAGS_ranks_per_node > 0) {
    EK_ASSIGN_OR_RETURN(job.world.topology, comm::Topology::Blocks(job.world.world_size, FLAGS_ranks_per_node));
  }
  job.corpus = UserPath(FLAGS_corpus);
  job.out = UserPath(FLAGS_out);
  ShowProgress(&config);
  job.config = std::move(config);
  job.prepare = [](comm::Backend& backend, ParityConfig* of_rank) {
    return ResolveAuto(&backend, backend.rank() == 0, of_rank);
  };
  if (ComparesLayouts(job.config)) {
    job.run = [](const ParityConfig& of_rank, const testutil::Corpus& corpus, comm::Backend& backend) {
      return RunLayouts(of_rank, corpus, &backend, backend.rank() == 0);
    };
  }
  const absl::StatusOr<ParityResult> result = RunParityJob(job, is_reporter);
  if (!result.ok()) return Annotate(result.status(), absl::StrCat("--tp=", FLAGS_tp, " --dp=", FLAGS_dp));
  if (*is_reporter) return ShowResult(*result);
  return result->AllHold() ? kExitHolds : kExitMismatch;
}

int Run(const std::vector<std::string>& words) {
  if (!words.empty()) {
    return Report(absl::InvalidArgumentError(absl::StrCat("unexpected '", words[0], "'; usage: ", kUsage)));
  }
  bool is_reporter = true;
  absl::StatusOr<ParityConfig> config = ConfigFromFlags();
  if (!config.ok()) return Report(config.status());
  const bool across_layouts = FLAGS_backend == "threads" && ComparesLayouts(*config);
  const absl::StatusOr<int> code =
      across_layouts ? RunLayoutsOnThreads(*std::move(config)) : RunOnBackend(*std::move(config), &is_reporter);
  if (code.ok()) return *code;
  return is_reporter || ExitCode(code.status()) == kExitFault ? Report(code.status()) : ExitCode(code.status());
}

}  // namespace
}  // namespace evenkeel::tools

int main(int argc, char** argv) {
  gflags::SetUsageMessage(evenkeel::tools::kUsage);
  return evenkeel::tools::Run(evenkeel::tools::ParseFlags(&argc, &argv));
}

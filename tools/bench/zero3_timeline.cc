// One training step on worker streams, drawn for every fetch policy: where does the compute stream wait?
//
//   bazel run //tools/bench:zero3_timeline -- --out=timeline
//
// Two ranks (threads); on each, a host thread issues, the comm stream gathers and reduces, the compute stream
// "computes": it sleeps, as a device would that needs no processor of the host. Prints the idle share of the compute
// stream and writes timeline.json (chrome://tracing, ui.perfetto.dev) and timeline.png (gnuplot).
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "evenkeel/comm/in_process.h"
#include "evenkeel/comm/testing/chrome_trace.h"
#include "evenkeel/comm/testing/run_ranks.h"
#include "evenkeel/runtime/base/status_macros.h"
#include "evenkeel/runtime/device/host_device.h"
#include "evenkeel/tools/program.h"
#include "evenkeel/zero3/partitioned_model.h"
#include "gflags/gflags.h"

DEFINE_string(out, "timeline", "folder for timeline.json and timeline.png");
DEFINE_int32(layers, 6, "leaves of the model");
DEFINE_int32(params, 192, "parameters in a leaf");
DEFINE_int32(elements, 2048, "elements of a parameter");
DEFINE_int32(forward_us, 2000, "what a leaf computes in its forward; twice that in its backward");
DEFINE_bool(prefetch, true, "gather the next leaf early");

namespace evenkeel::zero3 {
namespace {

constexpr int kRanks = 2;
constexpr const char* kPolicies[] = {"per_parameter", "coalesced", "flat"};

struct Span {
  std::string track;
  std::string name;
  double begin_ms = 0;
  double end_ms = 0;
};

// Spans of rank 0, in milliseconds since the start of its step. Thread-safe.
class Timeline {
 public:
  void Start() {
    absl::MutexLock lock(&mutex_);
    spans_.clear();
    start_ = std::chrono::steady_clock::now();
    on_ = true;
  }
  void Stop() {
    absl::MutexLock lock(&mutex_);
    on_ = false;
  }
  double Now() const {
    absl::MutexLock lock(&mutex_);
    return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start_).count();
  }
  void Add(Span span) {
    absl::MutexLock lock(&mutex_);
    if (on_) spans_.push_back(std::move(span));
  }
  std::vector<Span> spans() const {
    absl::MutexLock lock(&mutex_);
    return spans_;
  }

 private:
  mutable absl::Mutex mutex_;
  std::vector<Span> spans_ ABSL_GUARDED_BY(mutex_);
  std::chrono::steady_clock::time_point start_ ABSL_GUARDED_BY(mutex_) = std::chrono::steady_clock::now();
  bool on_ ABSL_GUARDED_BY(mutex_) = false;
};

// Passes everything on and notes when it ran on the stream.
class TimelineStream final : public Stream {
 public:
  TimelineStream(std::unique_ptr<Stream> inner, Timeline* timeline) : inner_(std::move(inner)), timeline_(timeline) {}
  absl::string_view name() const override { return inner_->name(); }
  Device* device() const override { return inner_->device(); }
  absl::Status Launch(absl::AnyInvocable<absl::Status()> work) override {
    return inner_->Launch(Noted(label_, std::move(work)));
  }
  absl::Status LaunchCollective(absl::AnyInvocable<absl::Status()> work) override {
    return inner_->LaunchCollective(Noted("collective", std::move(work)));
  }
  absl::Status Copy(void* destination, const void* source, int64_t bytes) override {
    return inner_->Launch(Noted("copy", [=] {
      if (bytes > 0) std::memcpy(destination, source, static_cast<size_t>(bytes));
      return absl::OkStatus();
    }));
  }
  absl::Status Fill(void* destination, int value, int64_t bytes) override {
    return inner_->Launch(Noted("fill", [=] {
      if (bytes > 0) std::memset(destination, value, static_cast<size_t>(bytes));
      return absl::OkStatus();
    }));
  }
  absl::Status Record(Event* event) override { return inner_->Record(event); }
  absl::Status Wait(Event* event) override { return inner_->Wait(event); }
  absl::Status Synchronize() override { return inner_->Synchronize(); }
  absl::Status status() const override { return inner_->status(); }
  bool is_inline() const override { return inner_->is_inline(); }
  void set_label(std::string label) { label_ = std::move(label); }

 private:
  absl::AnyInvocable<absl::Status()> Noted(std::string name, absl::AnyInvocable<absl::Status()> work) {
    return [this, name = std::move(name), work = std::move(work)]() mutable {
      const double begin = timeline_->Now();
      const absl::Status status = work();
      timeline_->Add({std::string(inner_->name()), name, begin, timeline_->Now()});
      return status;
    };
  }

  const std::unique_ptr<Stream> inner_;
  Timeline* const timeline_;
  std::string label_ = "launch";
};

ModelDescription Layers() {
  ModelDescription model;
  model.root.type = "Model";
  for (int l = 0; l < FLAGS_layers; ++l) {
    ModuleNode leaf{absl::StrCat("layer", l), "Block", {}, {}, false};
    for (int i = 0; i < FLAGS_params; ++i) {
      ParameterSpec spec;
      spec.name = absl::StrCat("layer", l, ".", i);
      spec.shape = Shape({FLAGS_elements});
      leaf.parameters.push_back(static_cast<int>(model.parameters.size()));
      model.parameters.push_back(spec);
    }
    model.root.children.push_back(std::move(leaf));
  }
  return model;
}

// One rank of one policy.
class Runner {
 public:
  Runner(comm::Backend& backend, const std::string& policy, Timeline* timeline)
      : backend_(backend), policy_(policy), timeline_(timeline) {}

  absl::Status Run() {
    EK_RETURN_IF_ERROR(Setup());
    for (int step = 0; step < 3; ++step) {
      if (step == 2) timeline_->Start();
      const ModelCounts before = model_->counts();
      EK_RETURN_IF_ERROR(OneStep());
      if (step == 2) timeline_->Stop();
      const ModelCounts after = model_->counts();
      host_operations_ = static_cast<double>(after.fetch_host_operations - before.fetch_host_operations) /
                         static_cast<double>(after.fetch_cycles - before.fetch_cycles);
      EK_RETURN_IF_ERROR(model_->Step().status());
    }
    return absl::OkStatus();
  }

  // Of a fetch and release, in the last step.
  double host_operations() const { return host_operations_; }

 private:
  absl::Status Setup() {
    EK_ASSIGN_OR_RETURN(dp_, backend_.CreateGroup(comm::WorldGroup(kRanks)));
    device_ = HostDevice::Create({.stream_mode = HostDevice::StreamMode::kWorker});
    EK_ASSIGN_OR_RETURN(auto compute, device_->CreateStream("compute"));
    EK_ASSIGN_OR_RETURN(auto comm, device_->CreateStream("comm"));
    compute_ = std::make_unique<TimelineStream>(std::move(compute), timeline_);
    comm_ = std::make_unique<TimelineStream>(std::move(comm), timeline_);
    const ModelDescription description = Layers();
    EK_ASSIGN_OR_RETURN(const LeafSelection selection, SelectLeaves(description, {}));
    PartitionedModelOptions options;
    options.policy = policy_;
    options.reuse_distance_bytes = 0;
    if (FLAGS_prefetch) options.prefetch_bytes = int64_t{FLAGS_params} * FLAGS_elements * 4;
    EK_ASSIGN_OR_RETURN(model_, PartitionedModel::Create(description.parameters, selection, options, {.dp = dp_.get()},
                                                         device_.get(), compute_.get(), comm_.get()));
    return absl::OkStatus();
  }

  // Host work of the model's calls, as spans of their own track.
  template <typename Call>
  absl::Status OnHost(const char* name, const Call& call) {
    const double begin = timeline_->Now();
    const absl::Status status = call();
    timeline_->Add({"host", name, begin, timeline_->Now()});
    return status;
  }

  absl::Status Compute(const char* name, int micros) {
    compute_->set_label(name);
    return compute_->Launch([micros] {
      std::this_thread::sleep_for(std::chrono::microseconds(micros));
      return absl::OkStatus();
    });
  }

  absl::Status OneStep() {
    for (int l = 0; l < FLAGS_layers; ++l) {
      EK_RETURN_IF_ERROR(OnHost("fetch", [&] { return model_->Fetch({l}).status(); }));
      EK_RETURN_IF_ERROR(Compute("forward", FLAGS_forward_us));
      EK_RETURN_IF_ERROR(OnHost("release", [&] { return model_->Release({l}); }));
    }
    for (int l = FLAGS_layers; l-- > 0;) {
      EK_RETURN_IF_ERROR(OnHost("fetch", [&] { return model_->Fetch({l}).status(); }));
      EK_RETURN_IF_ERROR(model_->Gradients({l}).status());
      EK_RETURN_IF_ERROR(Compute("backward", 2 * FLAGS_forward_us));
      EK_RETURN_IF_ERROR(OnHost("flush", [&] { return model_->FlushGradients({l}); }));
      EK_RETURN_IF_ERROR(OnHost("release", [&] { return model_->Release({l}); }));
    }
    EK_RETURN_IF_ERROR(compute_->Synchronize());
    return comm_->Synchronize();
  }

  comm::Backend& backend_;
  const std::string policy_;
  Timeline* const timeline_;
  std::unique_ptr<comm::Communicator> dp_;
  std::unique_ptr<HostDevice> device_;
  std::unique_ptr<TimelineStream> compute_, comm_;
  std::unique_ptr<PartitionedModel> model_;
  double host_operations_ = 0;
};

bool IsCompute(const Span& span) { return span.name == "forward" || span.name == "backward"; }

struct Summary {
  double step_ms = 0;
  double busy_ms = 0;
  double host_ms = 0;
  double idle_share() const { return step_ms > 0 ? 1 - busy_ms / step_ms : 0; }
};

// The step of the compute stream: from the host's first call to the end of the last computation.
Summary Summarize(const std::vector<Span>& spans) {
  Summary summary;
  for (const Span& span : spans) {
    if (IsCompute(span)) {
      summary.busy_ms += span.end_ms - span.begin_ms;
      summary.step_ms = std::max(summary.step_ms, span.end_ms);
    }
    if (span.track == "host") summary.host_ms += span.end_ms - span.begin_ms;
  }
  return summary;
}

absl::Status WriteText(const std::filesystem::path& path, const std::string& text) {
  std::ofstream file(path);
  file << text;
  file.close();
  return file ? absl::OkStatus() : absl::UnavailableError(absl::StrCat("cannot write ", path.string()));
}

std::string Colour(const Span& span) {
  if (span.name == "forward") return "#4477aa";
  if (span.name == "backward") return "#66ccee";
  if (span.name == "collective") return "#ee6677";
  if (span.track == "host") return "#888888";
  return "#ccbb44";  // copies, fills, concatenations
}

// A panel per policy, a row per track.
std::string GnuplotScript(const std::vector<std::vector<Span>>& runs, const std::string& png) {
  double end = 1;
  for (const auto& spans : runs) end = std::max(end, Summarize(spans).step_ms);
  std::string script = absl::StrCat("set terminal pngcairo size 1400,720\nset output '", png,
                                    "'\nset multiplot layout 3,1\nset xrange [0:", end * 1.02,
                                    "]\nset yrange [0:3]\nset key off\n"
                                    "set ytics ('compute' 0.5, 'comm' 1.5, 'host' 2.5)\nset xlabel 'ms'\n");
  for (size_t i = 0; i < runs.size(); ++i) {
    const Summary summary = Summarize(runs[i]);
    absl::StrAppend(&script, "unset object\nset title \"",
                    absl::StrFormat("%s: step %.1f ms, compute stream idle %.0f %%", kPolicies[i], summary.step_ms,
                                    100 * summary.idle_share()),
                    "\" noenhanced\n");
    for (const Span& span : runs[i]) {
      const double row = span.track == "host" ? 2 : span.track == "comm" ? 1 : 0;
      absl::StrAppendFormat(&script, "set object rect from %.4f,%.2f to %.4f,%.2f fc rgb '%s' fs solid noborder\n",
                            span.begin_ms, row + 0.1, span.end_ms, row + 0.9, Colour(span));
    }
    absl::StrAppend(&script, "plot -1\n");
  }
  return script;
}

absl::StatusOr<std::vector<Span>> RunPolicy(const std::string& policy, double* host_operations) {
  EK_ASSIGN_OR_RETURN(auto world, comm::InProcessWorld::Create({.world_size = kRanks}));
  std::vector<Timeline> timelines(kRanks);
  std::vector<double> operations(kRanks);
  EK_RETURN_IF_ERROR(comm::FirstFailure(comm::RunRanks(*world, [&](comm::Backend& backend) -> absl::Status {
    const size_t rank = static_cast<size_t>(backend.rank());
    Runner runner(backend, policy, &timelines[rank]);
    EK_RETURN_IF_ERROR(runner.Run());
    operations[rank] = runner.host_operations();
    return absl::OkStatus();
  })));
  *host_operations = operations[0];
  return timelines[0].spans();
}

absl::Status Draw() {
  const std::filesystem::path out = tools::UserPath(FLAGS_out);
  std::error_code error;
  std::filesystem::create_directories(out, error);
  comm::ChromeTrace trace;
  std::vector<std::vector<Span>> runs;
  std::printf("%-14s %10s %10s %8s %12s %16s\n", "policy", "step ms", "compute ms", "idle", "host ms",
              "host ops/fetch");
  for (size_t i = 0; i < std::size(kPolicies); ++i) {
    double host_operations = 0;
    EK_ASSIGN_OR_RETURN(std::vector<Span> spans, RunPolicy(kPolicies[i], &host_operations));
    const Summary summary = Summarize(spans);
    std::printf("%-14s %10.1f %10.1f %7.1f%% %12.2f %16.1f\n", kPolicies[i], summary.step_ms, summary.busy_ms,
                100 * summary.idle_share(), summary.host_ms, host_operations);
    for (const Span& span : spans) {
      trace.AddSpan(static_cast<int>(i), absl::StrCat(kPolicies[i], " ", span.track), span.name,
                    absl::Milliseconds(span.begin_ms), absl::Milliseconds(span.end_ms));
    }
    runs.push_back(std::move(spans));
  }
  EK_RETURN_IF_ERROR(WriteText(out / "timeline.json", trace.ToJson()));
  const std::filesystem::path script = out / "timeline.gnuplot";
  EK_RETURN_IF_ERROR(WriteText(script, GnuplotScript(runs, (out / "timeline.png").string())));
  if (std::system(absl::StrCat("gnuplot '", script.string(), "' >/dev/null 2>&1").c_str()) != 0) {
    std::fprintf(stderr, "timeline.png was not drawn: gnuplot is missing or failed (package gnuplot-nox)\n");
  }
  std::printf("written to %s\n", out.string().c_str());
  return absl::OkStatus();
}

absl::Status CheckFlags() {
  if (FLAGS_layers >= 1 && FLAGS_params >= 1 && FLAGS_elements >= 1 && FLAGS_forward_us >= 0) return absl::OkStatus();
  return absl::InvalidArgumentError("--layers, --params and --elements must be at least 1, --forward_us at least 0");
}

}  // namespace
}  // namespace evenkeel::zero3

int main(int argc, char** argv) {
  evenkeel::tools::ParseFlags(&argc, &argv);
  absl::Status status = evenkeel::zero3::CheckFlags();
  if (status.ok()) status = evenkeel::zero3::Draw();
  return evenkeel::tools::Report(status);
}

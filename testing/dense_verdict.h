// Rank 0's side of the dense judge: one collected step against the double reference, value by value and route by route.
//
//   DenseVerdict verdict(config, dp, tp, std::move(model), &corpus);
//   EK_RETURN_IF_ERROR(verdict.JudgeStep(step, std::move(collected)));
//   verdict.finding().first;
#ifndef EVENKEEL_TESTING_DENSE_VERDICT_H_
#define EVENKEEL_TESTING_DENSE_VERDICT_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "evenkeel/comm/mesh.h"
#include "evenkeel/testing/corpus.h"
#include "evenkeel/testing/finding.h"
#include "evenkeel/testing/reference_model.h"
#include "evenkeel/testing/training_config.h"

namespace evenkeel::testutil {

// Roundings of a run of `dtype` in units of UnitRoundoff(dtype): its tensors, and its router, which is always f32.
double UnitRoundoff(DType dtype);
ReferenceRunOptions RoundingsOf(DType dtype, int lanes);

// Places inside a step, in the order in which a step computes.
enum Place : int64_t {
  kReplicaPlace = 0,
  kForwardPlace = 1000,
  kLossPlace = 100000,
  kBackwardPlace = 200000,
  kGradientPlace = 300000,
  kNormPlace = 400000,
  kParameterPlace = 500000,
};

// A step as all ranks showed it, put together.
struct Collected {
  ReferenceTensors parameters;
  ReferenceTensors gradients;
  std::vector<std::vector<std::vector<double>>> activations;           // [batch][boundary]
  std::vector<std::vector<std::vector<double>>> activation_gradients;  // [batch][boundary]
  std::vector<double> losses;                                          // [batch]
  std::vector<std::vector<ReferenceRoutes>> routes;                    // [batch][layer]
  double mean_loss = 0;
  double gradient_norm = 0;
  double clip_scale = 1;
  double loss_scale = 1;  // of this step's backward
  bool stepped = true;
};

// Not thread-safe.
class DenseVerdict {
 public:
  // `mesh` is the run's, with its own etp; `corpus` outlives the verdict.
  DenseVerdict(const TrainingConfig& config, const comm::MeshShape& mesh, ReferenceModel model, const Corpus* corpus);

  const ReferenceModel& model() const { return model_; }
  int64_t boundaries() const { return 1 + 2 * config_.model.layers; }
  // Lane 0 of the replica that computes a batch.
  int RankOf(int64_t batch) const { return static_cast<int>(batch % mesh_.dp) * mesh_.tp; }
  int64_t ForwardPlace(size_t boundary) const { return kForwardPlace + 10 * static_cast<int64_t>(boundary); }
  int64_t BackwardPlace(size_t boundary) const {
    return kBackwardPlace + 10 * (boundaries() - static_cast<int64_t>(boundary));
  }

  // Computes the step in double from its own parameters and with its own routes, and compares. Errors of the model.
  absl::Status JudgeStep(int64_t step, Collected collected);
  // With plain SGD, what the update must have made of the parameters before it.
  void JudgeParameters(int64_t step, const ReferenceTensors& after);
  // Notes a difference.
  void Differ(int64_t place, FirstDifference difference);

  const Finding& finding() const { return finding_; }
  // The double reference's loss of each step.
  const std::vector<double>& losses() const { return losses_; }
  // Of the last judged step.
  const ReferenceTensors& parameters() const { return before_.parameters; }

 private:
  struct Before {
    ReferenceTensors parameters;
    ReferenceTensors gradients;
    double clip_scale = 1;
    bool stepped = true;
  };

  void JudgeValue(int64_t place, int64_t step, const std::string& tensor, int rank, int64_t index, double wanted,
                  double got, double bound);
  void JudgeMatrix(int64_t place, int64_t step, const std::string& tensor, int rank, const reference::Matrix& wanted,
                   const std::vector<double>& got);
  std::vector<ReferenceBatch> Batches(int64_t step) const;
  double LossBound(double variance, double loss) const;
  void JudgeBackward(int64_t step, const ReferenceStep& wanted, const Collected& collected);
  void JudgeGradients(int64_t step, const ReferenceStep& wanted, const Collected& collected);
  void JudgeSkip(int64_t step, const ReferenceStep& wanted, const Collected& collected);
  double Margin(const reference::Matrix& scores, int64_t token, int64_t a, int64_t other_token, int64_t b) const;
  void DifferInRoute(int64_t step, int64_t layer, int rank, int64_t route, double wanted, double got, double margin);
  void JudgeRouting(int64_t step, int64_t layer, int rank, const ReferenceRouting& routing);
  void JudgeDrops(int64_t step, int64_t layer, int rank, const ReferenceRouting& routing,
                  const std::vector<uint8_t>& wanted);

  const TrainingConfig config_;
  const comm::MeshShape mesh_;
  const ReferenceModel model_;
  const Corpus& corpus_;
  const ReferenceRunOptions roundings_;
  const double unit_;
  const double store_unit_;
  Before before_;
  std::vector<double> losses_;
  Finding finding_;
};

}  // namespace evenkeel::testutil

#endif  // EVENKEEL_TESTING_DENSE_VERDICT_H_

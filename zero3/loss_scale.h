// The factor that keeps small f16 gradients from vanishing: dynamic loss scaling.
//
// The caller multiplies the loss by scale(); gradients then arrive multiplied by it, and the step divides it out again
// in f32, before the norm is judged and before the update. When any rank sees a non-finite gradient nobody steps and
// the scale falls; after a number of good steps in a row it rises. All factors are powers of two, so that the scale
// itself changes no bit of a gradient that fits. (Micikevicius et al., Mixed Precision Training, arXiv:1710.03740,
// section 3.2.)
#ifndef EVENKEEL_ZERO3_LOSS_SCALE_H_
#define EVENKEEL_ZERO3_LOSS_SCALE_H_

#include "absl/status/status.h"

namespace evenkeel::zero3 {

struct LossScaleOptions {
  bool dynamic = true;  // false: `initial` for ever
  double initial = 65536;
  double growth = 2;  // times, after `growth_interval` good steps in a row
  int growth_interval = 2000;
  double backoff = 0.5;  // times, after a step with non-finite gradients
  double minimum = 1;
  double maximum = 16777216;
};

// InvalidArgument with the number: everything is a positive power of two, backoff below 1, growth above,
// minimum <= initial <= maximum, the interval at least 1.
absl::Status ValidateLossScaleOptions(const LossScaleOptions& options);

// Every rank has one; the vote makes them change alike. A value.
class LossScale {
 public:
  // `enabled` false: the scale is 1 and stays 1 (models without f16 parameters).
  LossScale(const LossScaleOptions& options, bool enabled)
      : options_(options), enabled_(enabled), scale_(enabled ? options.initial : 1) {}

  bool enabled() const { return enabled_; }
  double scale() const { return scale_; }
  int good_steps() const { return good_steps_; }
  // All ranks stepped.
  void Stepped();
  // Some rank saw a non-finite gradient, nobody stepped. False: the scale is at its minimum and cannot fall.
  bool Skipped();
  // Continues from a checkpoint. Ignored where the scale is not enabled.
  void Restore(double scale, int good_steps);

 private:
  LossScaleOptions options_;
  bool enabled_;
  double scale_;
  int good_steps_ = 0;  // since the scale changed
};

}  // namespace evenkeel::zero3

#endif  // EVENKEEL_ZERO3_LOSS_SCALE_H_

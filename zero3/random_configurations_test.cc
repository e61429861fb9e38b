// Random models, layouts, orders and options: any policy gives the bits of the replicated run. The seed of a failing
// round is printed; ZERO3_TEST_ROUNDS in the test's environment runs more of them.
#include <algorithm>
#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "evenkeel/runtime/base/philox.h"
#include "evenkeel/runtime/base/status_matchers.h"
#include "evenkeel/zero3/testing/toy_training.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel::zero3 {
namespace {

class Dice {
 public:
  explicit Dice(uint64_t seed) : stream_(PhiloxKey(seed).Add("random configurations")) {}
  int64_t Below(int64_t n) { return static_cast<int64_t>(stream_.Below(next_++, static_cast<uint64_t>(n))); }
  bool Coin() { return Below(2) == 0; }
  template <typename T>
  T Of(const std::vector<T>& choices) {
    return choices[static_cast<size_t>(Below(static_cast<int64_t>(choices.size())))];
  }

 private:
  PhiloxStream stream_;
  uint64_t next_ = 0;
};

comm::MeshShape RandomMesh(Dice& dice) {
  const std::vector<comm::MeshShape> meshes = {
      {.tp = 1, .ep = 1, .dp = 2, .etp = 1}, {.tp = 1, .ep = 1, .dp = 3, .etp = 1},
      {.tp = 1, .ep = 1, .dp = 5, .etp = 1}, {.tp = 1, .ep = 2, .dp = 4, .etp = 1},
      {.tp = 2, .ep = 1, .dp = 3, .etp = 2}, {.tp = 2, .ep = 2, .dp = 4, .etp = 2},
      {.tp = 2, .ep = 4, .dp = 2, .etp = 1}, {.tp = 2, .ep = 2, .dp = 3, .etp = 1},
  };
  return dice.Of(meshes);
}

ToyConfig RandomConfig(Dice& dice) {
  ToyConfig config;
  config.mesh = RandomMesh(dice);
  config.layers = 1 + static_cast<int>(dice.Below(3));
  config.hidden = 1 + dice.Below(9);
  config.ffn = 2 * (1 + dice.Below(7));
  config.dtype = dice.Of<DType>({DType::kF32, DType::kF32, DType::kBF16, DType::kF64, DType::kF16});
  config.steps = 4;
  config.micro_batches = 1 + static_cast<int>(dice.Below(2));
  if (dice.Coin()) config.options.micro_batches = config.micro_batches;
  config.recompute = dice.Coin();
  config.tied_head = dice.Coin();
  config.eval_between = dice.Coin();
  config.device.poison = true;
  if (dice.Coin()) config.options.optimizer.kind = OptimizerOptions::Kind::kAdamW;
  config.options.optimizer.weight_decay = dice.Coin() ? 0.1 : 0;
  config.options.max_gradient_norm = dice.Coin() ? 1.0 : 0;
  const int64_t leaf_rule = dice.Below(3);
  if (leaf_rule == 0) config.leaves.rules = {LeafRule::Type("Layer")};
  if (leaf_rule == 1) {
    config.leaves.granularity_threshold = 200;
    config.leaves.max_leaf_bytes = 4000;
  }
  if (dice.Coin()) {
    const int64_t shift = dice.Below(100);
    config.order = [shift](int step, int num_leaves) {
      std::vector<int> order;
      for (int l = 0; l < num_leaves; ++l) order.push_back(l);
      std::rotate(order.begin(), order.begin() + (step < 2 ? 0 : shift % num_leaves), order.end());
      return order;
    };
  }
  return config;
}

void RandomFetching(Dice& dice, PartitionedModelOptions& options) {
  options.policy = dice.Of<std::string>({"flat", "flat", "coalesced", "per_parameter"});
  options.prefetch_bytes = dice.Of<int64_t>({0, 300, 2000, 100000});
  options.reuse_distance_bytes = dice.Of<int64_t>({-1, 0, 1500, 100000});
  options.persistent_elements = dice.Of<int64_t>({0, 5, 40, 1000});
  options.max_persistent_bytes = dice.Of<int64_t>({100, 100000});
  options.reduce_bucket_bytes = dice.Of<int64_t>({0, 0, 64, 1000, 20000});
  options.poison_released = true;
  options.verify_shards = dice.Coin();
  options.replica_check_interval = static_cast<int>(dice.Below(3));
}

TEST(RandomConfigurationsTest, AnyPolicyGivesTheBitsOfTheReplicatedRun) {
  int rounds = 16;
  const char* wanted = std::getenv("ZERO3_TEST_ROUNDS");
  if (wanted != nullptr) {
    ASSERT_TRUE(absl::SimpleAtoi(wanted, &rounds));
  }
  for (int seed = 1; seed <= rounds; ++seed) {
    SCOPED_TRACE(absl::StrCat("seed ", seed));
    Dice dice(static_cast<uint64_t>(seed));
    ToyConfig config = RandomConfig(dice);
    config.options.policy = "replicated";
    ASSERT_OK_AND_ASSIGN(const ToyRun expected, RunToy(config));
    RandomFetching(dice, config.options);
    if (dice.Coin()) config.device.stream_mode = HostDevice::StreamMode::kWorker;
    ASSERT_OK_AND_ASSIGN(const ToyRun run, RunToy(config));
    for (size_t r = 0; r < run.ranks.size(); ++r) {
      for (size_t s = 0; s < run.ranks[r].steps.size(); ++s) {
        const ToyStep& a = expected.ranks[r].steps[s];
        const ToyStep& b = run.ranks[r].steps[s];
        ASSERT_EQ(a.activation, b.activation) << "rank " << r << " step " << s;
        ASSERT_EQ(a.gradients_digest, b.gradients_digest) << "rank " << r << " step " << s;
        ASSERT_EQ(a.weights_digest, b.weights_digest) << "rank " << r << " step " << s;
        ASSERT_EQ(a.result.gradient_norm, b.result.gradient_norm) << "rank " << r << " step " << s;
      }
      // Also where the order changed.
      ASSERT_EQ(run.ranks[r].counts.peak_gathered_bytes, run.ranks[r].counts.predicted_peak_gathered_bytes);
    }
  }
}

}  // namespace
}  // namespace evenkeel::zero3

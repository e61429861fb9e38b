// Loads small synthetic checkpoints in the published layouts and compares the block with a naive one in double.
#include "evenkeel/moe/interop/published_block.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "evenkeel/runtime/base/philox.h"
#include "evenkeel/runtime/base/status_matchers.h"
#include "evenkeel/runtime/base/testing/disk_model.h"
#include "evenkeel/runtime/device/host_device.h"
#include "evenkeel/runtime/tensor/safetensors.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel::moe {
namespace {

using ::evenkeel::testutil::DiskModel;
using ::evenkeel::testutil::StatusIs;
using ::testing::HasSubstr;

constexpr int64_t kTokens = 11, kHidden = 12, kFfn = 10, kExperts = 8;

// A matrix [rows, columns] as stored, and its values in double.
struct Matrix {
  int64_t rows = 0, columns = 0;
  std::vector<double> values;
  double at(int64_t r, int64_t c) const { return values[r * columns + c]; }
};

// Everything a checkpoint holds, by tensor name. Values are what survives the file's dtype.
class FakeCheckpoint {
 public:
  explicit FakeCheckpoint(DType dtype) : dtype_(dtype) {}

  void Add(const std::string& name, int64_t rows, int64_t columns, double scale = 1) {
    Matrix matrix{rows, columns, {}};
    const PhiloxStream stream(PhiloxKey(3).Add(name));
    for (int64_t i = 0; i < rows * columns; ++i) {
      const float value = static_cast<float>(scale * stream.Normal(i));
      matrix.values.push_back(dtype_ == DType::kBF16 ? static_cast<float>(BF16(value)) : value);
    }
    tensors_[name] = std::move(matrix);
  }
  void AddMlp(const std::string& prefix, const std::string& gate, const std::string& up, const std::string& down,
              int64_t ffn) {
    Add(prefix + gate, ffn, kHidden, 0.4);
    Add(prefix + up, ffn, kHidden, 0.4);
    Add(prefix + down, kHidden, ffn, 0.4);
  }
  const Matrix& operator[](const std::string& name) const { return tensors_.at(name); }
  void Remove(const std::string& name) { tensors_.erase(name); }

  // As two files, as large checkpoints are.
  void Write(DiskModel* disk, const std::string& config) const {
    ASSERT_OK(disk->MakeDirectory("model"));
    WriteFile(disk, "model/config.json", config);
    std::vector<std::string> names;
    for (const auto& [name, matrix] : tensors_) names.push_back(name);
    const size_t half = names.size() / 2;
    WriteTensors(disk, "model/model-00001-of-00002.safetensors", {names.begin(), names.begin() + half});
    WriteTensors(disk, "model/model-00002-of-00002.safetensors", {names.begin() + half, names.end()});
  }

 private:
  static void WriteFile(DiskModel* disk, const std::string& path, const std::string& bytes) {
    ASSERT_OK_AND_ASSIGN(const auto file, disk->Create(path));
    ASSERT_OK(file->Append(bytes));
  }
  void WriteTensors(DiskModel* disk, const std::string& path, const std::vector<std::string>& names) const {
    std::vector<SafetensorsEntry> entries;
    std::string data;
    for (const std::string& name : names) {
      const Matrix& matrix = tensors_.at(name);
      entries.push_back({name, dtype_, {matrix.rows, matrix.columns}, 0, 0});
      for (double value : matrix.values) Append(static_cast<float>(value), &data);
    }
    ASSERT_OK_AND_ASSIGN(const std::string front, BuildSafetensorsHeader(entries, {{"format", "pt"}}));
    WriteFile(disk, path, front + data);
  }
  void Append(float value, std::string* data) const {
    const BF16 narrow(value);
    if (dtype_ == DType::kBF16) {
      data->append(reinterpret_cast<const char*>(&narrow), sizeof(narrow));
    } else {
      data->append(reinterpret_cast<const char*>(&value), sizeof(value));
    }
  }

  const DType dtype_;
  std::map<std::string, Matrix> tensors_;
};

using Row = std::vector<double>;

Row Multiply(const Matrix& matrix, const Row& x) {
  Row y(matrix.rows, 0.0);
  for (int64_t r = 0; r < matrix.rows; ++r) {
    for (int64_t c = 0; c < matrix.columns; ++c) y[r] += matrix.at(r, c) * x[c];
  }
  return y;
}

// down(silu(gate x) * up x): the MLP of every family.
Row Mlp(const Matrix& gate, const Matrix& up, const Matrix& down, const Row& x) {
  Row g = Multiply(gate, x), u = Multiply(up, x);
  for (size_t i = 0; i < g.size(); ++i) g[i] = g[i] / (1 + std::exp(-g[i])) * u[i];
  return Multiply(down, g);
}

Row Softmax(Row x) {
  const double top = *std::max_element(x.begin(), x.end());
  double sum = 0;
  for (double& v : x) sum += v = std::exp(v - top);
  for (double& v : x) v /= sum;
  return x;
}

std::vector<int> Best(const Row& scores, int count) {
  std::vector<int> order(scores.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return scores[a] > scores[b]; });
  order.resize(count);
  return order;
}

float InputAt(int64_t i) { return static_cast<float>(PhiloxStream(PhiloxKey(5).Add("input")).Normal(i)); }

// Runs the block and compares every token with `expected(x)`.
void Compare(DiskModel* disk, const std::function<Row(const Row&)>& expected) {
  const auto device = HostDevice::Create();
  ASSERT_OK_AND_ASSIGN(const auto stream, device->CreateStream("main"));
  ASSERT_OK_AND_ASSIGN(const auto block, PublishedBlock::Load(disk, "model", {.layer = 1}, device.get()));
  std::vector<float> x(kTokens * kHidden), y(kTokens * kHidden);
  for (size_t i = 0; i < x.size(); ++i) x[i] = InputAt(static_cast<int64_t>(i));
  ASSERT_OK(block->Forward(ConstTensorView(x.data(), DType::kF32, {kTokens, kHidden}),
                           TensorView(y.data(), DType::kF32, {kTokens, kHidden}), *stream));
  for (int64_t t = 0; t < kTokens; ++t) {
    const Row want = expected(Row(x.begin() + t * kHidden, x.begin() + (t + 1) * kHidden));
    // f32 sums of kHidden and kFfn terms, twice, over values of order 1.
    for (int64_t i = 0; i < kHidden; ++i) EXPECT_NEAR(y[t * kHidden + i], want[i], 2e-5) << t << " " << i;
  }
}

TEST(PublishedBlockTest, Mixtral) {
  const std::string at = "model.layers.1.block_sparse_moe.";
  FakeCheckpoint checkpoint(DType::kBF16);
  checkpoint.Add(at + "gate.weight", kExperts, kHidden);
  for (int e = 0; e < kExperts; ++e) {
    checkpoint.AddMlp(absl::StrCat(at, "experts.", e, "."), "w1.weight", "w3.weight", "w2.weight", kFfn);
  }
  checkpoint.Add("model.norm.weight", 1, kHidden);  // not the block's: ignored
  DiskModel disk;
  checkpoint.Write(
      &disk, absl::StrCat(R"({"model_type":"mixtral","hidden_size":)", kHidden, R"(,"intermediate_size":)", kFfn,
                          R"(,"num_local_experts":)", kExperts, R"(,"num_experts_per_tok":2,"hidden_act":"silu"})"));
  Compare(&disk, [&](const Row& x) {
    const Row g = Softmax(Multiply(checkpoint[at + "gate.weight"], x));
    const std::vector<int> best = Best(g, 2);
    Row y(kHidden, 0.0);
    for (int e : best) {
      const std::string expert = absl::StrCat(at, "experts.", e, ".");
      const Row out =
          Mlp(checkpoint[expert + "w1.weight"], checkpoint[expert + "w3.weight"], checkpoint[expert + "w2.weight"], x);
      for (int64_t i = 0; i < kHidden; ++i) y[i] += g[e] / (g[best[0]] + g[best[1]]) * out[i];
    }
    return y;
  });
}

FakeCheckpoint ProjectionNames(const std::string& at, DType dtype, const std::string& shared, int64_t shared_ffn) {
  FakeCheckpoint checkpoint(dtype);
  checkpoint.Add(at + "gate.weight", kExperts, kHidden);
  for (int e = 0; e < kExperts; ++e) {
    checkpoint.AddMlp(absl::StrCat(at, "experts.", e, "."), "gate_proj.weight", "up_proj.weight", "down_proj.weight",
                      kFfn);
  }
  if (shared_ffn > 0) {
    checkpoint.AddMlp(at + shared, "gate_proj.weight", "up_proj.weight", "down_proj.weight", shared_ffn);
  }
  return checkpoint;
}

Row RunMlp(const FakeCheckpoint& checkpoint, const std::string& prefix, const Row& x) {
  return Mlp(checkpoint[prefix + "gate_proj.weight"], checkpoint[prefix + "up_proj.weight"],
             checkpoint[prefix + "down_proj.weight"], x);
}

TEST(PublishedBlockTest, QwenMoeWithAGatedSharedExpertAndRawWeights) {
  const std::string at = "model.layers.1.mlp.";
  FakeCheckpoint checkpoint = ProjectionNames(at, DType::kF32, "shared_expert.", 7);
  checkpoint.Add(at + "shared_expert_gate.weight", 1, kHidden);
  DiskModel disk;
  checkpoint.Write(
      &disk, absl::StrCat(R"({"model_type":"qwen2_moe","hidden_size":)", kHidden, R"(,"moe_intermediate_size":)", kFfn,
                          R"(,"num_experts":)", kExperts, R"(,"num_experts_per_tok":3,"norm_topk_prob":false,)",
                          R"("shared_expert_intermediate_size":7})"));
  Compare(&disk, [&](const Row& x) {
    const Row g = Softmax(Multiply(checkpoint[at + "gate.weight"], x));
    Row y = RunMlp(checkpoint, at + "shared_expert.", x);
    const double gate = 1 / (1 + std::exp(-Multiply(checkpoint[at + "shared_expert_gate.weight"], x)[0]));
    for (double& v : y) v *= gate;
    for (int e : Best(g, 3)) {
      const Row out = RunMlp(checkpoint, absl::StrCat(at, "experts.", e, "."), x);
      for (int64_t i = 0; i < kHidden; ++i) y[i] += g[e] * out[i];
    }
    return y;
  });
}

TEST(PublishedBlockTest, DeepSeekV3WithBiasGroupsAndScale) {
  const std::string at = "model.layers.1.mlp.";
  FakeCheckpoint checkpoint = ProjectionNames(at, DType::kBF16, "shared_experts.", kFfn);
  checkpoint.Add(at + "gate.e_score_correction_bias", 1, kExperts, 0.3);
  DiskModel disk;
  checkpoint.Write(&disk, absl::StrCat(R"({"model_type":"deepseek_v3","hidden_size":)", kHidden,
                                       R"(,"moe_intermediate_size":)", kFfn, R"(,"n_routed_experts":)", kExperts,
                                       R"(,"num_experts_per_tok":2,"n_group":4,"topk_group":2,"n_shared_experts":1,)",
                                       R"("routed_scaling_factor":2.5,"norm_topk_prob":true,"scoring_func":"sigmoid",)",
                                       R"("topk_method":"noaux_tc"})"));
  Compare(&disk, [&](const Row& x) {
    Row scores = Multiply(checkpoint[at + "gate.weight"], x);
    for (double& v : scores) v = 1 / (1 + std::exp(-v));
    Row biased = scores;
    for (int e = 0; e < kExperts; ++e) biased[e] += checkpoint[at + "gate.e_score_correction_bias"].at(0, e);
    // A group of two experts is worth the sum of both; two of four groups stay.
    Row groups(4);
    for (int i = 0; i < 4; ++i) groups[i] = biased[2 * i] + biased[2 * i + 1];
    const std::vector<int> kept = Best(groups, 2);
    Row allowed(kExperts, -1e30);
    for (int i : kept) allowed[2 * i] = biased[2 * i], allowed[2 * i + 1] = biased[2 * i + 1];
    const std::vector<int> best = Best(allowed, 2);
    Row y = RunMlp(checkpoint, at + "shared_experts.", x);
    for (int e : best) {
      const Row out = RunMlp(checkpoint, absl::StrCat(at, "experts.", e, "."), x);
      for (int64_t i = 0; i < kHidden; ++i) y[i] += 2.5 * scores[e] / (scores[best[0]] + scores[best[1]]) * out[i];
    }
    return y;
  });
}

TEST(PublishedBlockTest, SaysWhatIsMissingOrDoesNotFit) {
  const std::string at = "model.layers.1.mlp.";
  const std::string config =
      absl::StrCat(R"({"model_type":"qwen3_moe","hidden_size":)", kHidden, R"(,"moe_intermediate_size":)", kFfn,
                   R"(,"num_experts":)", kExperts, R"(,"num_experts_per_tok":2,"norm_topk_prob":true})");
  const auto device = HostDevice::Create();
  const FakeCheckpoint whole = ProjectionNames(at, DType::kF32, "", 0);
  auto load = [&](const FakeCheckpoint& checkpoint, const std::string& text, int64_t layer) {
    DiskModel disk;
    checkpoint.Write(&disk, text);
    return PublishedBlock::Load(&disk, "model", {.layer = layer}, device.get()).status();
  };
  EXPECT_OK(load(whole, config, 1));
  EXPECT_THAT(load(whole, config, 2), StatusIs(absl::StatusCode::kNotFound, HasSubstr("model.layers.2.mlp.gate")));
  FakeCheckpoint missing = whole;
  missing.Remove(at + "experts.5.up_proj.weight");
  EXPECT_THAT(load(missing, config, 1), StatusIs(absl::StatusCode::kNotFound, HasSubstr("experts.5.up_proj")));
  FakeCheckpoint reshaped = whole;
  reshaped.Add(at + "experts.5.up_proj.weight", kFfn + 1, kHidden);
  EXPECT_THAT(load(reshaped, config, 1), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("[11, 12]")));
  for (const auto& [text, message] : std::vector<std::pair<std::string, std::string>>{
           {"[]", "not a JSON object"},
           {"{", "not a JSON object"},
           {R"({"model_type":"llama","hidden_size":1,"num_experts_per_tok":1})", "llama"},
           {R"({"model_type":"mixtral","hidden_size":-1})", "hidden_size"},
           {R"({"model_type":"mixtral","hidden_size":4,"num_experts_per_tok":1,"intermediate_size":4})",
            "num_local_experts"},
           {R"({"model_type":"mixtral","hidden_size":4,"num_experts_per_tok":9,"intermediate_size":4,)"
            R"("num_local_experts":8})",
            "9"}}) {
    EXPECT_THAT(load(whole, text, 1), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(message))) << text;
  }
}

}  // namespace
}  // namespace evenkeel::moe

// What one parameter is: a name, an element type, the slice this rank computes with, and how its replicas relate.
//
//   ParameterSpec w_in;
//   w_in.name = "layers.0.experts.w_in";           // the same on every rank
//   w_in.shape = Shape({2, 64, 128});              // experts 2 and 3 of 8, a TP half of 256 columns
//   w_in.global_shape = {8, 64, 256};
//   w_in.global_offset = {2, 0, 128};
//   w_in.family = Family::kExpert;                 // sharded and summed over EDP
//   w_in.expert_dim = 0;
//   w_in.initializer = Initializer::Normal(0.02);  // keyed by name and global index
#ifndef EVENKEEL_ZERO3_PARAMETER_SPEC_H_
#define EVENKEEL_ZERO3_PARAMETER_SPEC_H_

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "evenkeel/runtime/tensor/dtype.h"
#include "evenkeel/runtime/tensor/shape.h"

namespace evenkeel::zero3 {

// Which ranks hold replicas of a parameter. Dense parameters are sharded and summed over DP, expert parameters over
// EDP; both averages divide by the full DP size, so the number of expert groups never scales an update.
enum class Family : uint8_t { kDense = 0, kExpert = 1 };
const char* FamilyName(Family family);  // "dense", "expert"

// The first value of every element as a pure function of (seed, parameter name, global index): the layout of ranks
// does not matter.
struct Initializer {
  enum class Kind : uint8_t { kConstant, kNormal, kUniform, kFunction };

  Kind kind = Kind::kConstant;
  double scale = 0;  // the constant, the standard deviation, or the half width of the interval
  // The value at a global row-major index.
  std::function<double(int64_t global_index)> function;

  static Initializer Zeros() { return Constant(0); }
  static Initializer Ones() { return Constant(1); }
  static Initializer Constant(double value) { return {Kind::kConstant, value, nullptr}; }
  static Initializer Normal(double stddev) { return {Kind::kNormal, stddev, nullptr}; }
  // In [-half_width, half_width).
  static Initializer Uniform(double half_width) { return {Kind::kUniform, half_width, nullptr}; }
  static Initializer Function(std::function<double(int64_t)> f) { return {Kind::kFunction, 0, std::move(f)}; }
};

// Whether trainable parameters of this dtype have an f32 master copy that the optimizer updates.
constexpr bool HasMaster(DType dtype) { return dtype == DType::kBF16 || dtype == DType::kF16; }

// A value. Everything but `shape` and `global_offset` is equal on all ranks.
struct ParameterSpec {
  std::string name;           // unique in the model
  DType dtype = DType::kF32;  // f32, f64, or bf16 and f16 (with an f32 master copy)
  Shape shape = Shape({0});   // what this rank computes with; 0 elements are fine
  // Where `shape` sits in the whole tensor. Both empty: `shape` is the whole tensor.
  std::vector<int64_t> global_shape;
  std::vector<int64_t> global_offset;
  Family family = Family::kDense;
  bool trainable = true;  // frozen parameters are fetched like others, have no gradient and no optimizer state
  // All TP lanes hold equal copies with equal gradients: counted once in the norm.
  bool tp_replicated = false;
  bool weight_decay = true;  // whether AdamW's decay applies
  int expert_dim = -1;       // the dimension that counts experts, for global expert ids; -1: none
  int tp_dim = -1;           // the dimension that is cut over TP lanes, for resharding a checkpoint; -1: none
  Initializer initializer;

  int64_t num_elements() const { return shape.num_elements(); }
  int64_t num_bytes() const { return shape.num_elements() * SizeOf(dtype); }
};

// InvalidArgument naming the parameter and the numbers: empty name, unsupported dtype, a slice outside the global
// shape, expert_dim out of range, a function initializer without function.
absl::Status ValidateParameterSpec(const ParameterSpec& spec);

// The row-major index in the global tensor of local element `local_index`.
int64_t GlobalIndex(const ParameterSpec& spec, int64_t local_index);

// The initial value of local element `local_index` under `seed`.
double InitialValue(const ParameterSpec& spec, uint64_t seed, int64_t local_index);

// Fills `values[i]` with the initial value of local element `begin + i`, i < count. Same values as InitialValue.
void FillInitialValues(const ParameterSpec& spec, uint64_t seed, int64_t begin, int64_t count, double* values);

}  // namespace evenkeel::zero3

#endif  // EVENKEEL_ZERO3_PARAMETER_SPEC_H_

// Matrices in double that carry, beside each value, how far a low-precision run may be from it.
//
// The error model. A floating-point run computes each operation with relative roundings of at most one unit roundoff u
// (2^-24 for f32, 2^-53 for f64). Modelled as independent and uniform in [-u, u] (variance u^2 / 3; Higham and Mary, "A
// new approach to probabilistic rounding error analysis", SISC 2019), their variances add:
//
//   own rounding   A sum of n terms t_i in any order passes through at most n partial sums. By Cauchy-Schwarz the
//                  square of a partial sum of m terms is at most m sum t^2, so the variance is at most
//                  u^2 / 3 (1 + .. + n) sum t^2, about (n u)^2 / 6 sum t^2: the error is n u |t|_2 / sqrt(6), summation
//                  depth x u x magnitude, the magnitude being the root of the sum of squared terms (not the result,
//                  which cancellation may have made small).
//   inherited      To first order an input's error e enters the output times the partial derivative.
//   storing        One more rounding, u_store |value| / sqrt(3) (u_store: 2^-8 for bf16 storage, 2^-11 for f16, u
//                  otherwise). f16 also rounds to multiples of 2^-24 near zero: at most `floor`, half of that, more.
//
// `variance` holds the sum of these squares in units of u^2, so that the same numbers serve every dtype. A comparison
// allows kBoundDeviations standard deviations: u * kBoundDeviations * sqrt(variance). Nothing in the bound is fitted
// to observed errors. It can fail, and must: a row sent to the wrong slot changes values by far more
// (reference_model_test.cc plants one).
#ifndef EVENKEEL_TESTING_REFERENCE_MATH_H_
#define EVENKEEL_TESTING_REFERENCE_MATH_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace evenkeel::testutil::reference {

// Standard deviations that a comparison allows: eight leave room for inputs whose errors are correlated, which add
// linearly, over some hundred million comparisons.
inline constexpr double kBoundDeviations = 8;

// What an elementary function (exp, tanh, reciprocal root, division) may be off, in units of u.
inline constexpr double kElementary = 8;

// Roundings of one operation, in units of u.
struct Rounding {
  bool track = false;     // without it variances stay empty and nothing is spent on them
  double arithmetic = 1;  // of each multiplication and addition
  double store = 1;       // of writing the result
  double floor = 0;       // the same, absolute: near zero a format has no relative precision any more
  int64_t partials = 1;   // a product's sum is written in so many parts that are then added

  // Variance of a sum of `depth` terms over the sum of their squares.
  double SumVariance(int64_t depth) const {
    const double reach = static_cast<double>(depth) * arithmetic;
    return reach * reach / 6;
  }
  // The same for a product: each of several parts, written, is at most sqrt(depth / partials) |t|_2 of its terms.
  double ProductVariance(int64_t depth) const {
    const double parts =
        partials > 1 ? StoreVariance() * static_cast<double>(depth) / static_cast<double>(partials) : 0;
    return SumVariance(depth) + parts;
  }
  // Variance of writing a value over its square, and of writing `value`.
  double StoreVariance() const { return store * store / 3; }
  double Written(double value) const { return (store * store * value * value + floor * floor) / 3; }

  // Takes the largest magnitude that is written, partial sums of lanes included. Null: nobody asks.
  double* reach = nullptr;
  void Reach(double value) const {
    if (reach != nullptr) *reach = std::max(*reach, std::abs(value));
  }
};

// A dense row-major matrix. `variance` is empty when the values are exact (or nothing is tracked).
struct Matrix {
  Matrix() = default;
  Matrix(int64_t num_rows, int64_t num_cols) : rows(num_rows), cols(num_cols), value(num_rows * num_cols, 0.0) {}

  double& at(int64_t r, int64_t c) { return value[r * cols + c]; }
  double at(int64_t r, int64_t c) const { return value[r * cols + c]; }
  double var(int64_t r, int64_t c) const { return variance.empty() ? 0.0 : variance[r * cols + c]; }
  // Makes room for variances (zero) where there are none.
  void Track() {
    if (variance.empty()) variance.assign(value.size(), 0.0f);
  }

  int64_t rows = 0;
  int64_t cols = 0;
  std::vector<double> value;
  std::vector<float> variance;
};

// Matrices by name.
using Tensors = std::map<std::string, Matrix>;

Matrix Transpose(const Matrix& a);
// a [m, k] times b [k, n]; sums have depth k.
Matrix MatMul(const Matrix& a, const Matrix& b, const Rounding& rounding);
// Rows [first_row, first_row + m) of sum += a' b, a [r, m], b [r, n], sum [.., n]. `depth`: how many rows the real run
// sums into one element in all.
void AddTransposedProduct(const Matrix& a, const Matrix& b, int64_t depth, const Rounding& rounding, Matrix* sum,
                          int64_t first_row = 0);
// a + b.
Matrix Sum(const Matrix& a, const Matrix& b, const Rounding& rounding);
// sum += a, row r of a going to row `to[r]` of sum; sums have depth `depth`.
void AddRows(const Matrix& a, const std::vector<int64_t>& to, int64_t depth, const Rounding& rounding, Matrix* sum);
// Rows `from` of a.
Matrix TakeRows(const Matrix& a, const std::vector<int64_t>& from);
// Columns [begin, begin + count) of rows [row, row + rows) of a.
Matrix Block(const Matrix& a, int64_t row, int64_t rows, int64_t begin, int64_t count);
// a's place in sum, as Block takes it out; overwrites.
void PutBlock(const Matrix& a, int64_t row, int64_t begin, Matrix* whole);
void ScaleInPlace(double factor, Matrix* a);

// y = x / rms(x) * weight, row by row; weight is a row vector.
Matrix RmsNorm(const Matrix& x, const Matrix& weight, double epsilon, const Rounding& rounding);
// Returns the input's gradient and adds the weight's. `depth` as in AddTransposedProduct.
Matrix RmsNormBackward(const Matrix& x, const Matrix& weight, double epsilon, const Matrix& dy, int64_t depth,
                       const Rounding& rounding, Matrix* dweight);

// Row softmax; when causal, row r is over its first r + 1 columns and the rest is zero.
Matrix Softmax(const Matrix& x, bool causal, const Rounding& rounding);
Matrix SoftmaxBackward(const Matrix& p, const Matrix& dp, const Rounding& rounding);

// Value, first and second derivative of an activation at one point.
struct Curve {
  double value = 0;
  double first = 0;
  double second = 0;
};
// GELU in its tanh form (Hendrycks and Gimpel, arXiv:1606.08415): 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))).
Curve Gelu(double x);
Curve Silu(double x);

// f(x) elementwise, and dy * f'(x).
Matrix Apply(Curve (*f)(double), const Matrix& x, const Rounding& rounding);
Matrix ApplyBackward(Curve (*f)(double), const Matrix& x, const Matrix& dy, const Rounding& rounding);
// a * b elementwise.
Matrix Product(const Matrix& a, const Matrix& b, const Rounding& rounding);

}  // namespace evenkeel::testutil::reference

#endif  // EVENKEEL_TESTING_REFERENCE_MATH_H_

#include "evenkeel/testing/reference_math.h"

#include <algorithm>
#include <cmath>

namespace evenkeel::testutil::reference {
namespace {

double Square(double x) { return x * x; }

// One version per vector width where the compiler can choose at start-up; sanitizers cannot.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(__SANITIZE_ADDRESS__) && \
    !defined(__SANITIZE_THREAD__)
#define EK_REFERENCE_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define EK_REFERENCE_CLONES
#endif

// c[m, n] += a[m, k] b[k, n], four terms of the sum at a time.
template <typename T>
inline __attribute__((always_inline)) void AccumulateRows(const T* a, const T* b, int64_t m, int64_t k, int64_t n,
                                                          T* __restrict c) {
  for (int64_t i = 0; i < m; ++i) {
    T* __restrict out = c + i * n;
    const T* row = a + i * k;
    int64_t p = 0;
    for (; p + 4 <= k; p += 4) {
      const T a0 = row[p], a1 = row[p + 1], a2 = row[p + 2], a3 = row[p + 3];
      const T *b0 = b + p * n, *b1 = b0 + n, *b2 = b1 + n, *b3 = b2 + n;
      for (int64_t j = 0; j < n; ++j) out[j] += (a0 * b0[j] + a1 * b1[j]) + (a2 * b2[j] + a3 * b3[j]);
    }
    for (; p < k; ++p) {
      const T a0 = row[p];
      const T* b0 = b + p * n;
      for (int64_t j = 0; j < n; ++j) out[j] += a0 * b0[j];
    }
  }
}

EK_REFERENCE_CLONES void Accumulate(const double* a, const double* b, int64_t m, int64_t k, int64_t n, double* c) {
  AccumulateRows(a, b, m, k, n, c);
}
EK_REFERENCE_CLONES void Accumulate(const float* a, const float* b, int64_t m, int64_t k, int64_t n, float* c) {
  AccumulateRows(a, b, m, k, n, c);
}

std::vector<float> Squares(const Matrix& a) {
  std::vector<float> squares(a.value.size());
  for (size_t i = 0; i < squares.size(); ++i) squares[i] = static_cast<float>(Square(a.value[i]));
  return squares;
}

// own * a^2 + variance of a: what multiplies b^2 in the variance of a product with sums of depth sqrt(own).
std::vector<float> LeftFactor(const Matrix& a, double own) {
  std::vector<float> factor(a.value.size());
  for (size_t i = 0; i < factor.size(); ++i) {
    factor[i] = static_cast<float>(own * Square(a.value[i])) + (a.variance.empty() ? 0.0f : a.variance[i]);
  }
  return factor;
}

template <typename T>
std::vector<T> Transposed(const std::vector<T>& a, int64_t rows, int64_t cols) {
  std::vector<T> out(a.size());
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < cols; ++c) out[c * rows + r] = a[r * cols + c];
  }
  return out;
}

// Adds the rounding of writing each value of a.
void Store(const Rounding& rounding, Matrix* a) {
  if (!rounding.track) return;
  a->Track();
  for (size_t i = 0; i < a->value.size(); ++i) {
    a->variance[i] += static_cast<float>(rounding.Written(a->value[i]));
    rounding.Reach(a->value[i]);
  }
}

// What a product split over lanes adds: each part's rounding near zero. A part is at most sqrt(depth) |t|_2 of its
// terms, whose squares the variance in `c` is at least `own` times.
void StoreParts(const Rounding& rounding, int64_t depth, double own, Matrix* c) {
  if (rounding.partials <= 1) return;
  const double near_zero = static_cast<double>(rounding.partials) * Square(rounding.floor) / 3;
  for (float& variance : c->variance) {
    rounding.Reach(std::sqrt(static_cast<double>(depth) * variance / own));
    variance += static_cast<float>(near_zero);
  }
}

}  // namespace

Matrix Transpose(const Matrix& a) {
  Matrix out;
  out.rows = a.cols;
  out.cols = a.rows;
  out.value = Transposed(a.value, a.rows, a.cols);
  if (!a.variance.empty()) out.variance = Transposed(a.variance, a.rows, a.cols);
  return out;
}

Matrix MatMul(const Matrix& a, const Matrix& b, const Rounding& rounding) {
  Matrix c(a.rows, b.cols);
  Accumulate(a.value.data(), b.value.data(), a.rows, a.cols, b.cols, c.value.data());
  if (!rounding.track) return c;
  c.Track();
  const double own = rounding.ProductVariance(a.cols);
  Accumulate(LeftFactor(a, own).data(), Squares(b).data(), a.rows, a.cols, b.cols, c.variance.data());
  if (!b.variance.empty()) {
    Accumulate(Squares(a).data(), b.variance.data(), a.rows, a.cols, b.cols, c.variance.data());
  }
  StoreParts(rounding, a.cols, own, &c);
  Store(rounding, &c);
  return c;
}

void AddTransposedProduct(const Matrix& a, const Matrix& b, int64_t depth, const Rounding& rounding, Matrix* sum,
                          int64_t first_row) {
  const int64_t m = a.cols;
  const int64_t n = b.cols;
  const std::vector<double> left = Transposed(a.value, a.rows, a.cols);
  Accumulate(left.data(), b.value.data(), m, a.rows, n, sum->value.data() + first_row * n);
  if (!rounding.track) return;
  sum->Track();
  const double own = rounding.SumVariance(depth);
  const std::vector<float> factor = Transposed(LeftFactor(a, own), a.rows, a.cols);
  Accumulate(factor.data(), Squares(b).data(), m, a.rows, n, sum->variance.data() + first_row * n);
  if (!b.variance.empty()) {
    const std::vector<float> squares = Transposed(Squares(a), a.rows, a.cols);
    Accumulate(squares.data(), b.variance.data(), m, a.rows, n, sum->variance.data() + first_row * n);
  }
}

Matrix Sum(const Matrix& a, const Matrix& b, const Rounding& rounding) {
  Matrix c = a;
  for (size_t i = 0; i < c.value.size(); ++i) c.value[i] += b.value[i];
  if (!rounding.track) return c;
  c.Track();
  if (!b.variance.empty()) {
    for (size_t i = 0; i < c.variance.size(); ++i) c.variance[i] += b.variance[i];
  }
  Store(rounding, &c);
  return c;
}

void AddRows(const Matrix& a, const std::vector<int64_t>& to, int64_t depth, const Rounding& rounding, Matrix* sum) {
  if (rounding.track) sum->Track();
  const double own = rounding.SumVariance(depth);
  for (int64_t r = 0; r < a.rows; ++r) {
    for (int64_t c = 0; c < a.cols; ++c) {
      const double x = a.at(r, c);
      sum->at(to[r], c) += x;
      if (rounding.track) {
        sum->variance[to[r] * sum->cols + c] += static_cast<float>(own * Square(x) + a.var(r, c));
      }
    }
  }
}

Matrix TakeRows(const Matrix& a, const std::vector<int64_t>& from) {
  Matrix out(static_cast<int64_t>(from.size()), a.cols);
  if (!a.variance.empty()) out.Track();
  for (size_t r = 0; r < from.size(); ++r) {
    std::copy_n(a.value.begin() + from[r] * a.cols, a.cols, out.value.begin() + r * a.cols);
    if (!a.variance.empty()) {
      std::copy_n(a.variance.begin() + from[r] * a.cols, a.cols, out.variance.begin() + r * a.cols);
    }
  }
  return out;
}

Matrix Block(const Matrix& a, int64_t row, int64_t rows, int64_t begin, int64_t count) {
  Matrix out(rows, count);
  if (!a.variance.empty()) out.Track();
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t from = (row + r) * a.cols + begin;
    std::copy_n(a.value.begin() + from, count, out.value.begin() + r * count);
    if (!a.variance.empty()) std::copy_n(a.variance.begin() + from, count, out.variance.begin() + r * count);
  }
  return out;
}

void PutBlock(const Matrix& a, int64_t row, int64_t begin, Matrix* whole) {
  if (!a.variance.empty()) whole->Track();
  for (int64_t r = 0; r < a.rows; ++r) {
    const int64_t to = (row + r) * whole->cols + begin;
    std::copy_n(a.value.begin() + r * a.cols, a.cols, whole->value.begin() + to);
    if (!a.variance.empty()) std::copy_n(a.variance.begin() + r * a.cols, a.cols, whole->variance.begin() + to);
  }
}

void ScaleInPlace(double factor, Matrix* a) {
  for (double& x : a->value) x *= factor;
  const float square = static_cast<float>(Square(factor));
  for (float& x : a->variance) x *= square;
}

namespace {

// 1 / rms of a row and its variance.
struct InverseRms {
  double value = 0;
  double variance = 0;
};

InverseRms RowInverseRms(const Matrix& x, int64_t row, double epsilon, const Rounding& rounding) {
  const double n = static_cast<double>(x.cols);
  double sum = 0, inherited = 0, fourth = 0;
  for (int64_t c = 0; c < x.cols; ++c) {
    const double square = Square(x.at(row, c));
    sum += square;
    inherited += 4 * square * x.var(row, c);
    fourth += Square(square);
  }
  const double mean = sum / n + epsilon;
  InverseRms r;
  r.value = 1.0 / std::sqrt(mean);
  if (!rounding.track) return r;
  const double mean_variance = (inherited + rounding.SumVariance(x.cols) * fourth) / Square(n);
  r.variance = Square(r.value) * (0.25 * mean_variance / Square(mean) + Square(kElementary * rounding.arithmetic));
  return r;
}

}  // namespace

Matrix RmsNorm(const Matrix& x, const Matrix& weight, double epsilon, const Rounding& rounding) {
  Matrix y(x.rows, x.cols);
  if (rounding.track) y.Track();
  for (int64_t r = 0; r < x.rows; ++r) {
    const InverseRms inverse = RowInverseRms(x, r, epsilon, rounding);
    for (int64_t c = 0; c < x.cols; ++c) {
      const double w = weight.value[c];
      y.at(r, c) = x.at(r, c) * inverse.value * w;
      if (rounding.track) {
        y.variance[r * y.cols + c] =
            static_cast<float>(Square(w * inverse.value) * x.var(r, c) + Square(x.at(r, c) * w) * inverse.variance +
                               Square(2 * rounding.arithmetic * y.at(r, c)));
      }
    }
  }
  Store(rounding, &y);
  return y;
}

Matrix RmsNormBackward(const Matrix& x, const Matrix& weight, double epsilon, const Matrix& dy, int64_t depth,
                       const Rounding& rounding, Matrix* dweight) {
  Matrix dx(x.rows, x.cols);
  if (rounding.track) {
    dx.Track();
    dweight->Track();
  }
  const double n = static_cast<double>(x.cols);
  const double own_n = rounding.SumVariance(x.cols);
  const double own_rows = rounding.SumVariance(depth);
  for (int64_t row = 0; row < x.rows; ++row) {
    const InverseRms inverse = RowInverseRms(x, row, epsilon, rounding);
    const double r = inverse.value;
    double dot = 0, dot_variance = 0;
    for (int64_t c = 0; c < x.cols; ++c) {
      const double w = weight.value[c], g = dy.at(row, c) * w, xc = x.at(row, c);
      dot += g * xc;
      dot_variance += Square(g) * x.var(row, c) + Square(xc * w) * dy.var(row, c) + own_n * Square(g * xc);
    }
    const double along = r * r * r / n;  // dx = r g - x * along * dot
    for (int64_t c = 0; c < x.cols; ++c) {
      const double w = weight.value[c], g = dy.at(row, c) * w, xc = x.at(row, c), d = dy.at(row, c);
      dx.at(row, c) = r * g - xc * along * dot;
      dweight->value[c] += d * xc * r;
      if (!rounding.track) continue;
      const int64_t i = row * x.cols + c;
      const double few = Square(4 * rounding.arithmetic);
      dx.variance[i] = static_cast<float>(Square(r * w) * dy.var(row, c) +
                                          (Square(g) + 9 * Square(xc * along * dot / r)) * inverse.variance +
                                          Square(along * dot) * x.var(row, c) + Square(xc * along) * dot_variance +
                                          few * (Square(r * g) + Square(xc * along * dot)));
      dweight->variance[c] += static_cast<float>(Square(xc * r) * dy.var(row, c) + Square(d * r) * x.var(row, c) +
                                                 Square(d * xc) * inverse.variance + own_rows * Square(d * xc * r));
    }
  }
  Store(rounding, &dx);
  return dx;
}

Matrix Softmax(const Matrix& x, bool causal, const Rounding& rounding) {
  Matrix p(x.rows, x.cols);
  if (rounding.track) p.Track();
  for (int64_t r = 0; r < x.rows; ++r) {
    const int64_t valid = causal ? r + 1 : x.cols;
    double top = x.at(r, 0);
    for (int64_t c = 1; c < valid; ++c) top = std::max(top, x.at(r, c));
    double sum = 0;
    for (int64_t c = 0; c < valid; ++c) sum += p.at(r, c) = std::exp(x.at(r, c) - top);
    double shared = 0;  // sum_j p_j^2 var_j
    for (int64_t c = 0; c < valid; ++c) {
      p.at(r, c) /= sum;
      shared += Square(p.at(r, c)) * x.var(r, c);
    }
    if (!rounding.track) continue;
    for (int64_t c = 0; c < valid; ++c) {
      const double pc = p.at(r, c);
      const double own = (static_cast<double>(valid) + kElementary + std::abs(x.at(r, c) - top)) * rounding.arithmetic;
      p.variance[r * p.cols + c] =
          static_cast<float>(Square(pc) * (std::max(0.0, x.var(r, c) * (1 - 2 * pc) + shared) + Square(own)));
    }
  }
  Store(rounding, &p);
  return p;
}

Matrix SoftmaxBackward(const Matrix& p, const Matrix& dp, const Rounding& rounding) {
  Matrix dx(p.rows, p.cols);
  if (rounding.track) dx.Track();
  const double own = rounding.SumVariance(p.cols);
  for (int64_t r = 0; r < p.rows; ++r) {
    double dot = 0, dot_variance = 0;
    for (int64_t c = 0; c < p.cols; ++c) {
      const double pc = p.at(r, c), d = dp.at(r, c);
      dot += pc * d;
      dot_variance += Square(d) * p.var(r, c) + Square(pc) * dp.var(r, c) + own * Square(pc * d);
    }
    for (int64_t c = 0; c < p.cols; ++c) {
      const double pc = p.at(r, c), d = dp.at(r, c);
      dx.at(r, c) = pc * (d - dot);
      if (!rounding.track) continue;
      dx.variance[r * p.cols + c] =
          static_cast<float>(Square(d - dot) * p.var(r, c) + Square(pc) * (dp.var(r, c) + dot_variance) +
                             Square(2 * rounding.arithmetic * pc) * (Square(d) + Square(dot)));
    }
  }
  Store(rounding, &dx);
  return dx;
}

Curve Gelu(double x) {
  constexpr double kRoot = 0.79788456080286535588;  // sqrt(2 / pi)
  constexpr double kCube = 0.044715;
  const double inner = kRoot * (x + kCube * x * x * x);
  const double inner1 = kRoot * (1 + 3 * kCube * x * x);
  const double inner2 = kRoot * 6 * kCube * x;
  const double t = std::tanh(inner);
  const double s = 1 - t * t;
  return {0.5 * x * (1 + t), 0.5 * (1 + t) + 0.5 * x * s * inner1,
          s * inner1 + 0.5 * x * (s * inner2 - 2 * t * s * inner1 * inner1)};
}

Curve Silu(double x) {
  const double s = 1 / (1 + std::exp(-x));
  const double s1 = s * (1 - s);
  const double s2 = s1 * (1 - 2 * s);
  return {x * s, s + x * s1, 2 * s1 + x * s2};
}

Matrix Apply(Curve (*f)(double), const Matrix& x, const Rounding& rounding) {
  Matrix y(x.rows, x.cols);
  if (rounding.track) y.Track();
  for (size_t i = 0; i < x.value.size(); ++i) {
    const Curve curve = f(x.value[i]);
    y.value[i] = curve.value;
    if (!rounding.track) continue;
    const double inherited = x.variance.empty() ? 0 : Square(curve.first) * x.variance[i];
    y.variance[i] = static_cast<float>(inherited + Square(kElementary * rounding.arithmetic * x.value[i]));
  }
  Store(rounding, &y);
  return y;
}

Matrix ApplyBackward(Curve (*f)(double), const Matrix& x, const Matrix& dy, const Rounding& rounding) {
  Matrix dx(x.rows, x.cols);
  if (rounding.track) dx.Track();
  for (size_t i = 0; i < x.value.size(); ++i) {
    const Curve curve = f(x.value[i]);
    const double d = dy.value[i];
    dx.value[i] = d * curve.first;
    if (!rounding.track) continue;
    const double from_x = x.variance.empty() ? 0 : Square(d * curve.second) * x.variance[i];
    const double from_dy = dy.variance.empty() ? 0 : Square(curve.first) * dy.variance[i];
    const double own = kElementary * rounding.arithmetic * d * (1 + std::abs(x.value[i]));
    dx.variance[i] = static_cast<float>(from_x + from_dy + Square(own));
  }
  Store(rounding, &dx);
  return dx;
}

Matrix Product(const Matrix& a, const Matrix& b, const Rounding& rounding) {
  Matrix c(a.rows, a.cols);
  if (rounding.track) c.Track();
  for (size_t i = 0; i < c.value.size(); ++i) {
    c.value[i] = a.value[i] * b.value[i];
    if (!rounding.track) continue;
    const double from_a = a.variance.empty() ? 0 : Square(b.value[i]) * a.variance[i];
    const double from_b = b.variance.empty() ? 0 : Square(a.value[i]) * b.variance[i];
    c.variance[i] = static_cast<float>(from_a + from_b + Square(rounding.arithmetic * c.value[i]));
  }
  Store(rounding, &c);
  return c;
}

}  // namespace evenkeel::testutil::reference

#include "evenkeel/runtime/ops/gemm.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <thread>
#include <vector>

#include "evenkeel/runtime/ops/matmul.h"
#include "evenkeel/runtime/ops/op_test_util.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

using ::evenkeel::testutil::AsDouble;
using ::evenkeel::testutil::FirstDifference;
using ::evenkeel::testutil::kEpsilon;
using ::evenkeel::testutil::OpTest;
using ::evenkeel::testutil::RandomVector;
using ::evenkeel::testutil::StatusIs;
using ::evenkeel::testutil::StoreError;
using ::evenkeel::testutil::View;
using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

Shape Stored(bool transposed, int64_t rows, int64_t columns) {
  return transposed ? Shape{columns, rows} : Shape{rows, columns};
}

template <typename T>
class GemmTest : public OpTest {
 protected:
  // Compares alpha op(A) op(B) + beta C with double arithmetic, inside the bound k eps sum |a b|.
  void CheckValues(bool ta, bool tb, int64_t m, int64_t n, int64_t k, double alpha, double beta) {
    const std::vector<T> a = RandomVector<T>(m * k, 1), b = RandomVector<T>(k * n, 2);
    const std::vector<T> before = beta == 0 ? std::vector<T>(m * n, static_cast<T>(kNan)) : RandomVector<T>(m * n, 3);
    std::vector<T> c = before;
    ASSERT_OK(Gemm(ta, tb, alpha, View(a, Stored(ta, m, k)), View(b, Stored(tb, k, n)), beta, View(c, {m, n}),
                   this->stream_));
    const double wide_epsilon = sizeof(T) == 2 ? kEpsilon<float> : kEpsilon<T>;
    for (int64_t i = 0; i < m; ++i) {
      for (int64_t j = 0; j < n; ++j) {
        double sum = 0, magnitude = 0;
        for (int64_t p = 0; p < k; ++p) {
          const double term = AsDouble(a[ta ? p * m + i : i * k + p]) * AsDouble(b[tb ? j * k + p : p * n + j]);
          sum += term;
          magnitude += std::fabs(term);
        }
        const double old = beta == 0 ? 0 : beta * AsDouble(before[i * n + j]);
        const double wanted = alpha * sum + old;
        const double bound =
            (static_cast<double>(k) + 3) * wide_epsilon * (std::fabs(alpha) * magnitude + std::fabs(old)) +
            StoreError<T>(wanted);
        ASSERT_NEAR(AsDouble(c[i * n + j]), wanted, bound)
            << "m=" << m << " n=" << n << " k=" << k << " ta=" << ta << " tb=" << tb << " at " << i << "," << j;
      }
    }
  }
};
using Types = ::testing::Types<float, double, BF16, F16>;
TYPED_TEST_SUITE(GemmTest, Types);

TYPED_TEST(GemmTest, AgreesWithDoubleForAllTransposesAndOddExtents) {
  for (bool ta : {false, true}) {
    for (bool tb : {false, true}) {
      for (int64_t m : {1, 3, 17}) {
        for (int64_t n : {1, 33, 70}) {
          for (int64_t k : {1, 5, 129}) this->CheckValues(ta, tb, m, n, k, 1.0, 0.0);
        }
      }
      this->CheckValues(ta, tb, 7, 20, 12, -0.75, 0.0);
      this->CheckValues(ta, tb, 7, 20, 12, 1.0, 1.0);
      this->CheckValues(ta, tb, 7, 20, 12, 2.5, -0.5);
    }
  }
}

TYPED_TEST(GemmTest, EmptyExtentsGiveBetaC) {
  const std::vector<TypeParam> none;
  std::vector<TypeParam> c = RandomVector<TypeParam>(6, 9);
  const std::vector<TypeParam> before = c;
  ASSERT_OK(Gemm(false, false, 1, View(none, {2, 0}), View(none, {0, 3}), 1, View(c, {2, 3}), this->stream_));
  EXPECT_EQ(FirstDifference(c.data(), before.data(), 6), -1);
  ASSERT_OK(Gemm(false, false, 1, View(none, {2, 0}), View(none, {0, 3}), 0, View(c, {2, 3}), this->stream_));
  for (TypeParam value : c) EXPECT_EQ(AsDouble(value), 0);
  std::vector<TypeParam> empty;
  const std::vector<TypeParam> b = RandomVector<TypeParam>(12, 2);
  ASSERT_OK(Gemm(false, false, 1, View(none, {0, 4}), View(b, {4, 3}), 0, View(empty, {0, 3}), this->stream_));
  ASSERT_OK(Gemm(false, true, 1, View(none, {0, 4}), View(b, {3, 4}), 0, View(empty, {0, 3}), this->stream_));
}

using PlainOpTest = OpTest;

// The padded and the ragged orders hand an expert other numbers of rows; a row's bits must not notice.
template <typename T>
void CheckRowsDoNotDependOnBatch(const std::vector<int64_t>& sizes, const std::vector<int64_t>& extents,
                                 Stream& stream) {
  const int64_t all = *std::max_element(sizes.begin(), sizes.end()) + 53;
  for (bool tb : {false, true}) {
    for (int64_t k : extents) {
      const std::vector<T> a = RandomVector<T>(all * k, 11);
      for (int64_t n : extents) {
        const std::vector<T> b = RandomVector<T>(k * n, 12);
        std::vector<T> reference(all * n);
        const ConstTensorView weights = View(b, Stored(tb, k, n));
        ASSERT_OK(Gemm(false, tb, 1, View(a, {all, k}), weights, 0, View(reference, {all, n}), stream));
        std::vector<T> c(all * n);
        for (int64_t m : sizes) {
          const int64_t first = (m * 7) % 53;  // other places in the batch too
          ASSERT_OK(
              Gemm(false, tb, 1, View(a, {all, k}).Rows(first, m), weights, 0, View(c, {all, n}).Rows(0, m), stream));
          ASSERT_EQ(FirstDifference(c.data(), reference.data() + first * n, m * n), -1)
              << "m=" << m << " first=" << first << " k=" << k << " n=" << n << " transpose_b=" << tb;
        }
      }
    }
  }
}

TEST_F(PlainOpTest, RowsDoNotDependOnTheBatchF32) {
  std::vector<int64_t> small;
  for (int64_t m = 1; m <= 300; ++m) small.push_back(m);
  CheckRowsDoNotDependOnBatch<float>(small, {16, 64, 256}, stream_);
  std::vector<int64_t> some = {1, 2, 3, 5, 8, 15, 16, 17, 31, 33, 47, 63, 64, 65, 100, 127, 129, 191, 255, 300};
  CheckRowsDoNotDependOnBatch<float>(some, {16, 32, 64, 128, 256, 512}, stream_);
  CheckRowsDoNotDependOnBatch<float>({1, 17, 384, 511, 1024, 2048}, {64, 256}, stream_);
  CheckRowsDoNotDependOnBatch<float>({1, 2, 17, 40, 200}, {7, 65, 100}, stream_);
}

// Few rows run in the panel kernel, the reference's 1100 in the library: the seam must not show, whatever the blocks of
// k.
TEST_F(PlainOpTest, FewRowsHaveTheBitsOfMany) {
  for (int64_t k : {1, 511, 512, 513, 1024, 1025, 2048, 2500}) {
    for (int64_t n : {64, 192}) {
      const std::vector<float> a = RandomVector<float>(1100 * k, 1), b = RandomVector<float>(k * n, 2);
      std::vector<float> many(1100 * n), few(1100 * n);
      const auto product = [&](int64_t first, int64_t rows, std::vector<float>& c) {
        return Gemm(false, false, 1, View(a, {1100, k}).Rows(first, rows), View(b, {k, n}), 0,
                    View(c, {1100, n}).Rows(0, rows), stream_);
      };
      ASSERT_OK(product(0, 1100, many));
      for (int64_t rows : {1, 2, 5, 6, 7, 11, 12, 13, 61, 512, 1024, 1025}) {
        const int64_t first = rows % 53;
        ASSERT_OK(product(first, rows, few));
        ASSERT_EQ(FirstDifference(few.data(), many.data() + first * n, rows * n), -1) << rows << " " << n << " " << k;
      }
    }
  }
}

TEST_F(PlainOpTest, RowsDoNotDependOnTheBatchSixteenBitsAndF64) {
  const std::vector<int64_t> sizes = {1, 2, 3, 4, 5, 7, 15, 16, 17, 64, 100};
  CheckRowsDoNotDependOnBatch<BF16>(sizes, {16, 64, 96}, stream_);
  CheckRowsDoNotDependOnBatch<F16>(sizes, {16, 64, 96}, stream_);
  CheckRowsDoNotDependOnBatch<double>(sizes, {16, 64, 96}, stream_);
}

// The plain kernel is what machines without AVX-512 run; it must keep the promise everywhere.
TEST_F(PlainOpTest, PlainKernelRowsDoNotDependOnTheBatch) {
  for (int64_t k : {1, 16, 200}) {
    for (int64_t n : {1, 31, 32, 33, 100}) {
      const std::vector<float> a = RandomVector<float>(40 * k, 1), b = RandomVector<float>(k * n, 2);
      for (bool tb : {false, true}) {
        ops_internal::MatmulShape shape{.m = 40, .n = n, .k = k, .transpose_b = tb};
        std::vector<float> reference(40 * n), c(40 * n);
        ops_internal::PlainMatmul(shape, a.data(), b.data(), reference.data());
        for (int64_t m = 1; m < 20; ++m) {
          shape.m = m;
          ops_internal::PlainMatmul(shape, a.data() + m * k, b.data(), c.data());
          ASSERT_EQ(FirstDifference(c.data(), reference.data() + m * n, m * n), -1) << m << " " << n << " " << k;
        }
      }
    }
  }
}

// Or else every product would quietly run in the slower kernel.
TEST_F(PlainOpTest, TheLibraryMultipliesWhereItHasAvx512) {
  if (!__builtin_cpu_supports("avx512vl") || std::getenv("DNNL_MAX_CPU_ISA") != nullptr) {
    EXPECT_TRUE(std::getenv("DNNL_MAX_CPU_ISA") == nullptr || !ops_internal::LibraryMultiplies({.n = 64, .k = 64}));
    return;
  }
  for (bool tb : {false, true}) {
    EXPECT_TRUE(ops_internal::LibraryMultiplies({.n = 64, .k = 64, .transpose_b = tb}));
    EXPECT_TRUE(ops_internal::LibraryMultiplies({.n = 2048, .k = 512, .transpose_b = tb}));
  }
  EXPECT_TRUE(ops_internal::PanelAgrees({.n = 64, .k = 64}));
  EXPECT_TRUE(ops_internal::PanelAgrees({.n = 512, .k = 2048}));
  EXPECT_FALSE(ops_internal::PanelAgrees({.n = 65, .k = 64}));
  EXPECT_TRUE(ops_internal::LibrarySumsInOrder({.m = 64, .n = 256, .transpose_a = true}));
  EXPECT_TRUE(ops_internal::LibrarySumsInOrder({.m = 512, .n = 256, .transpose_a = true}));
}

TEST_F(PlainOpTest, PlainKernelSumsInOrder) {
  const ops_internal::MatmulShape shape{.m = 5, .n = 37, .k = 50};
  const std::vector<float> a = RandomVector<float>(250, 1), b = RandomVector<float>(50 * 37, 2);
  std::vector<float> c(5 * 37);
  ops_internal::PlainMatmul(shape, a.data(), b.data(), c.data());
  for (int64_t i = 0; i < 5; ++i) {
    for (int64_t j = 0; j < 37; ++j) {
      float sum = 0;
      for (int64_t p = 0; p < 50; ++p) {
        const float product = a[i * 50 + p] * b[p * 37 + j];
        sum += product;
      }
      ASSERT_EQ(c[i * 37 + j], sum);
    }
  }
}

TEST_F(PlainOpTest, SameBitsOnAnotherThreadAndOnAgain) {
  const std::vector<float> a = RandomVector<float>(77 * 64, 1), b = RandomVector<float>(64 * 96, 2);
  auto run = [&](std::vector<float>& c, Stream& stream) {
    return Gemm(false, false, 1, View(a, {77, 64}), View(b, {64, 96}), 0, View(c, {77, 96}), stream);
  };
  std::vector<float> first(77 * 96), again(77 * 96), other(77 * 96);
  ASSERT_OK(run(first, stream_));
  ASSERT_OK(run(again, stream_));
  absl::Status status;
  std::thread([&] { status = run(other, **device_->CreateStream("other")); }).join();
  ASSERT_OK(status);
  EXPECT_EQ(FirstDifference(first.data(), again.data(), 77 * 96), -1);
  EXPECT_EQ(FirstDifference(first.data(), other.data(), 77 * 96), -1);
}

TEST_F(PlainOpTest, GroupedGivesEachRowTheBitsOfItsOwnProduct) {
  const int64_t k = 32, n = 48;
  for (bool tb : {false, true}) {
    for (const std::vector<int64_t>& counts :
         {std::vector<int64_t>{0, 5, 0, 40, 1}, {46, 0, 0, 0, 0}, {0, 0, 0, 0, 46}, {9, 9, 9, 9, 10}}) {
      const std::vector<float> a = RandomVector<float>(46 * k, 1), b = RandomVector<float>(5 * k * n, 2);
      std::vector<float> c(46 * n, kNan), wanted(46 * n);
      const Shape b_shape = tb ? Shape{5, n, k} : Shape{5, k, n};
      ASSERT_OK(GemmGrouped(tb, 1, View(a, {46, k}), View(b, b_shape), counts, 0, View(c, {46, n}), stream_));
      int64_t row = 0;
      for (int64_t g = 0; g < 5; ++g) {
        const ConstTensorView own = View(b, b_shape).Rows(g, 1).Reshaped({b_shape.dim(1), b_shape.dim(2)});
        ASSERT_OK(Gemm(false, tb, 1, View(a, {46, k}).Rows(row, counts[g]), own, 0,
                       View(wanted, {46, n}).Rows(row, counts[g]), stream_));
        row += counts[g];
      }
      EXPECT_EQ(FirstDifference(c.data(), wanted.data(), 46 * n), -1);
    }
  }
}

// Rows of x and dy at canonical positions; absent ones are zero.
template <typename T>
std::vector<T> WeightGradient(const std::vector<T>& x, const std::vector<T>& dy, const std::vector<int64_t>& positions,
                              int64_t k, int64_t n, Stream& stream) {
  const int64_t rows = static_cast<int64_t>(x.size()) / k;
  std::vector<T> dw(k * n, T(0.0f));
  EXPECT_OK(GemmWeightGradient(View(x, {rows, k}), View(dy, {rows, n}), positions, View(dw, {k, n}), stream));
  return dw;
}

template <typename T>
std::vector<T> WithZeroRows(const std::vector<T>& rows, const std::vector<int64_t>& positions, int64_t total,
                            int64_t n) {
  std::vector<T> all(total * n, T(0.0f));
  for (size_t i = 0; i < positions.size(); ++i) std::copy_n(rows.begin() + i * n, n, all.begin() + positions[i] * n);
  return all;
}

template <typename T>
class WeightGradientTest : public OpTest {};
TYPED_TEST_SUITE(WeightGradientTest, Types);

// In the backward: empty slots of the padded orders add nothing, bit by bit.
TYPED_TEST(WeightGradientTest, InsertedEmptyPositionsChangeNoBit) {
  const PhiloxStream random(PhiloxKey(7).Add("positions"));
  for (const auto& [k, n] : std::vector<std::pair<int64_t, int64_t>>{{16, 32}, {64, 48}, {5, 7}, {300, 200}}) {
    for (int64_t total : {1, 100, 128, 129, 700, 1500}) {
      if (k == 300 && total != 100 && total != 700) continue;
      for (uint64_t keep_percent : {0, 3, 50, 97, 100}) {
        std::vector<int64_t> positions;
        for (int64_t p = 0; p < total; ++p) {
          if (random.Below(p + 10000 * keep_percent, 100) < keep_percent) positions.push_back(p);
        }
        const int64_t rows = static_cast<int64_t>(positions.size());
        const auto x = RandomVector<TypeParam>(rows * k, 21), dy = RandomVector<TypeParam>(rows * n, 22);
        const auto sparse = WeightGradient(x, dy, positions, k, n, this->stream_);
        if (rows == 0) {
          for (TypeParam value : sparse) ASSERT_EQ(AsDouble(value), 0);
        }
        for (int64_t behind : {0, 1, 300}) {
          const auto padded = WeightGradient(WithZeroRows(x, positions, total + behind, k),
                                             WithZeroRows(dy, positions, total + behind, n), {}, k, n, this->stream_);
          ASSERT_EQ(FirstDifference(sparse.data(), padded.data(), k * n), -1)
              << "k=" << k << " n=" << n << " total=" << total << " kept=" << rows << " behind=" << behind;
        }
      }
    }
  }
}

TYPED_TEST(WeightGradientTest, AgreesWithDoubleAndAccumulates) {
  const int64_t k = 24, n = 40, rows = 333;
  const auto x = RandomVector<TypeParam>(rows * k, 1), dy = RandomVector<TypeParam>(rows * n, 2);
  auto dw = RandomVector<TypeParam>(k * n, 3);
  const auto before = dw;
  ASSERT_OK(GemmWeightGradient(View(x, {rows, k}), View(dy, {rows, n}), {}, View(dw, {k, n}), this->stream_));
  const double wide_epsilon = sizeof(TypeParam) == 2 ? kEpsilon<float> : kEpsilon<TypeParam>;
  for (int64_t i = 0; i < k; ++i) {
    for (int64_t j = 0; j < n; ++j) {
      double sum = AsDouble(before[i * n + j]), magnitude = std::fabs(sum);
      for (int64_t p = 0; p < rows; ++p) {
        const double term = AsDouble(x[p * k + i]) * AsDouble(dy[p * n + j]);
        sum += term;
        magnitude += std::fabs(term);
      }
      // Depth: 128 rows, three levels of tree, one accumulation.
      ASSERT_NEAR(AsDouble(dw[i * n + j]), sum, 132 * wide_epsilon * magnitude + StoreError<TypeParam>(sum));
    }
  }
}

TEST_F(PlainOpTest, WeightGradientIsTheCanonicalTreeOfBlocks) {
  const int64_t k = 16, n = 16, rows = 5 * 128 - 3;
  const auto x = RandomVector<float>(rows * k, 1), dy = RandomVector<float>(rows * n, 2);
  auto block = [&](int64_t b) {
    const int64_t first = b * 128, count = std::min<int64_t>(128, rows - first);
    return WeightGradient(std::vector<float>(x.begin() + first * k, x.begin() + (first + count) * k),
                          std::vector<float>(dy.begin() + first * n, dy.begin() + (first + count) * n), {}, k, n,
                          stream_);
  };
  auto add = [](std::vector<float> a, const std::vector<float>& b) {
    for (size_t i = 0; i < a.size(); ++i) a[i] += b[i];
    return a;
  };
  const auto wanted = add(add(add(block(0), block(1)), add(block(2), block(3))), block(4));
  const auto got = WeightGradient(x, dy, {}, k, n, stream_);
  EXPECT_EQ(FirstDifference(got.data(), wanted.data(), k * n), -1);
}

TEST_F(PlainOpTest, GroupedWeightGradientIsOnePerGroup) {
  const int64_t k = 16, n = 24;
  const std::vector<int64_t> counts = {3, 0, 150};
  const std::vector<int64_t> positions = [] {
    std::vector<int64_t> p = {0, 7, 131};
    for (int64_t i = 0; i < 150; ++i) p.push_back(3 * i);
    return p;
  }();
  const auto x = RandomVector<float>(153 * k, 1), dy = RandomVector<float>(153 * n, 2);
  std::vector<float> dw(3 * k * n, 0.0f);
  std::fill_n(dw.begin() + k * n, k * n, kNan);  // the empty group's: must not be touched
  ASSERT_OK(GemmGroupedWeightGradient(View(x, {153, k}), View(dy, {153, n}), counts, positions, View(dw, {3, k, n}),
                                      stream_));
  const auto slice = [](const std::vector<float>& v, int64_t from, int64_t to) {
    return std::vector<float>(v.begin() + from, v.begin() + to);
  };
  const auto first = WeightGradient(slice(x, 0, 3 * k), slice(dy, 0, 3 * n), {0, 7, 131}, k, n, stream_);
  const auto last = WeightGradient(slice(x, 3 * k, 153 * k), slice(dy, 3 * n, 153 * n),
                                   std::vector<int64_t>(positions.begin() + 3, positions.end()), k, n, stream_);
  EXPECT_EQ(FirstDifference(dw.data(), first.data(), k * n), -1);
  for (int64_t i = k * n; i < 2 * k * n; ++i) ASSERT_TRUE(std::isnan(dw[i]));
  EXPECT_EQ(FirstDifference(dw.data() + 2 * k * n, last.data(), k * n), -1);
}

TEST_F(PlainOpTest, BiasesAddAndSumInCanonicalOrder) {
  const int64_t rows = 300, n = 37;
  const auto x = RandomVector<float>(rows * n, 1), bias = RandomVector<float>(n, 2);
  std::vector<float> y(rows * n);
  ASSERT_OK(AddBias(View(x, {rows, n}), View(bias, {n}), View(y, {rows, n}), stream_));
  for (int64_t i = 0; i < rows * n; ++i) ASSERT_EQ(y[i], x[i] + bias[i % n]);
  std::vector<int64_t> positions(rows);
  for (int64_t i = 0; i < rows; ++i) positions[i] = 5 * i + i % 3;
  std::vector<float> sparse(n, 0.0f), padded(n, 0.0f);
  ASSERT_OK(BiasGradient(View(x, {rows, n}), positions, View(sparse, {n}), stream_));
  const auto with_zeros = WithZeroRows(x, positions, 1600, n);
  ASSERT_OK(BiasGradient(View(with_zeros, {1600, n}), {}, View(padded, {n}), stream_));
  EXPECT_EQ(FirstDifference(sparse.data(), padded.data(), n), -1);
  double sum = 0;
  for (int64_t i = 0; i < rows; ++i) sum += x[i * n + 4];
  EXPECT_NEAR(sparse[4], sum, 1e-4);  // 300 addends below 1: error below 300 * 300 * 2^-24 at the very worst
}

TEST_F(PlainOpTest, BadArgumentsNameTheNumbers) {
  std::vector<float> floats(2048);
  std::vector<double> doubles(2048);
  const auto f = [&](Shape shape) { return TensorView(floats.data(), DType::kF32, shape); };
  const auto d = [&](Shape shape) { return TensorView(doubles.data(), DType::kF64, shape); };
  auto gemm = [&](TensorView a, TensorView b, TensorView c) { return Gemm(false, false, 1, a, b, 0, c, stream_); };
  EXPECT_THAT(gemm(f({8, 8}), f({4, 16}), f({4, 16})),
              StatusIs(absl::StatusCode::kInvalidArgument, AllOf(HasSubstr("f32 [8, 8]"), HasSubstr("f32 [4, 16]"))));
  EXPECT_THAT(gemm(f({8, 8}), f({8, 8}), f({4, 16})),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("must be [8, 8]")));
  EXPECT_THAT(gemm(f({8, 8}), d({8, 8}), f({8, 8})),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("f64 [8, 8]")));
  EXPECT_THAT(gemm(f({8, 8}), f({8, 8}), d({8, 8})),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("must be f32")));
  EXPECT_THAT(gemm(f({64}), f({8, 8}), f({8, 8})),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("2 dimensions")));
  EXPECT_THAT(GemmGrouped(false, 1, f({8, 8}), f({1, 8, 8}), {7}, 0, f({8, 8}), stream_),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("leave 1 of 8 rows out")));
  EXPECT_THAT(GemmGrouped(false, 1, f({8, 8}), f({1, 8, 8}), {9}, 0, f({8, 8}), stream_),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("is 9")));
  EXPECT_THAT(GemmGrouped(false, 1, f({8, 8}), f({1, 8, 8}), {4, 4}, 0, f({8, 8}), stream_),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("2 row counts for 1 groups")));
  EXPECT_THAT(GemmWeightGradient(f({2, 32}), f({2, 2}), {5, 5}, d({32, 2}), stream_),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("position 1 is 5")));
  EXPECT_THAT(GemmWeightGradient(f({2, 32}), f({2, 32}), {0}, f({32, 2}), stream_),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("[1, 32, 32]")));
}

}  // namespace
}  // namespace evenkeel

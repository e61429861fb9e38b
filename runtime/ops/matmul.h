// The matrix product kernels under gemm.h. Private to runtime/ops.
//
// f32 goes to oneDNN's batch-reduce GEMM ("brg", AVX-512 machines), whose rows do not depend on the number of rows.
// Its older kernels (dnnl_sgemm, and matmul on machines without AVX-512) do not keep that promise, nor does
// dnnl_sgemm for few rows; there, and for f64, a plain kernel with one running sum per element does the work. The
// choice is made by matrix B alone, never by the number of rows, and the library's kernel is first tried on the
// machine: where its rows were not independent, the plain one would do the work. The same for the order of sums.
// Few rows take a kernel of ours that spares them the library's copy of B (panel_matmul.cc); its bits are the
// library's, which is tried as well, so that the number of rows decides on nothing but time.
#ifndef EVENKEEL_RUNTIME_OPS_MATMUL_H_
#define EVENKEEL_RUNTIME_OPS_MATMUL_H_

#include <cstdint>

#include "absl/status/status.h"

namespace evenkeel::ops_internal {

struct MatmulShape {
  int64_t m = 0;
  int64_t n = 0;
  int64_t k = 0;
  bool transpose_a = false;  // a is stored [k, m]
  bool transpose_b = false;  // b is stored [n, k]

  friend bool operator==(const MatmulShape&, const MatmulShape&) = default;
  template <typename H>
  friend H AbslHashValue(H h, const MatmulShape& s) {
    return H::combine(std::move(h), s.m, s.n, s.k, s.transpose_a, s.transpose_b);
  }
};

// c = op(a) op(b); all extents at least 1. Internal when the library refuses a shape it must take.
absl::Status Matmul(const MatmulShape& shape, const float* a, const float* b, float* c);
absl::Status Matmul(const MatmulShape& shape, const double* a, const double* b, double* c);

// The same by the plain kernel: per element one sum in the order of k, each product rounded.
void PlainMatmul(const MatmulShape& shape, const float* a, const float* b, float* c);
void PlainMatmul(const MatmulShape& shape, const double* a, const double* b, double* c);

// True when this machine has a kernel for few rows that takes such a B (a row of it 64 columns or a multiple, k >= 1).
bool PanelMultiplies(const MatmulShape& shape);
// c = a b by that kernel: per element the library's sums, bit by bit, for any number of rows.
void PanelMatmul(const MatmulShape& shape, const float* a, const float* b, float* c);

// c = op(a) op(b), each element summed in the order of k, so that zero rows in between change no bit. The kernel is
// chosen by m, n and the transposes alone, never by k.
absl::Status OrderedMatmul(const MatmulShape& shape, const float* a, const float* b, float* c);
absl::Status OrderedMatmul(const MatmulShape& shape, const double* a, const double* b, double* c);

// True when Matmul of f32 with these n, k and transposes runs in oneDNN.
bool LibraryMultiplies(const MatmulShape& shape);
// True when few rows of these n and k take the panel kernel, because it gives the library's bits.
bool PanelAgrees(const MatmulShape& shape);
// True when OrderedMatmul of f32 with these m, n and transposes runs in oneDNN.
bool LibrarySumsInOrder(const MatmulShape& shape);

}  // namespace evenkeel::ops_internal

#endif  // EVENKEEL_RUNTIME_OPS_MATMUL_H_

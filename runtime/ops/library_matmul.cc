// oneDNN's matmul primitive through its C interface (no exceptions), one thread per call. Making a primitive costs
// about 0.15 ms the first time and microseconds from the library's own cache, so each thread keeps those it has used.

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "evenkeel/runtime/base/status_macros.h"
#include "evenkeel/runtime/ops/matmul.h"
#include "oneapi/dnnl/dnnl.h"

extern "C" {
void omp_set_num_threads(int);
int omp_get_max_threads();
}

namespace evenkeel::ops_internal {
namespace {

// A primitive takes about 50 KB, most of it shared between threads.
constexpr size_t kMaxPrimitivesPerThread = 2048;
// So many numbers of rows get a primitive of their own for each matrix B; others are cut into what exists anyway.
constexpr int kExactRowNumbers = 8;
constexpr int64_t kRowUnit = 16;
// Up to here a product waits for B more than for its own arithmetic, and the panel kernel is ahead of the library.
constexpr int64_t kFewRows = 1024;

template <typename T, dnnl_status_t (*kDestroy)(T*)>
struct Destroy {
  void operator()(T* object) const { kDestroy(object); }
};
using PrimitiveDescription =
    std::unique_ptr<dnnl_primitive_desc, Destroy<dnnl_primitive_desc, dnnl_primitive_desc_destroy>>;
using Primitive = std::unique_ptr<dnnl_primitive, Destroy<dnnl_primitive, dnnl_primitive_destroy>>;
using Memory = std::unique_ptr<dnnl_memory, Destroy<dnnl_memory, dnnl_memory_destroy>>;
using Attributes = std::unique_ptr<dnnl_primitive_attr, Destroy<dnnl_primitive_attr, dnnl_primitive_attr_destroy>>;

// OpenMP's thread count belongs to the calling thread: one here, the caller's again afterwards.
class OneThread {
 public:
  OneThread() : before_(omp_get_max_threads()) {
    if (before_ != 1) omp_set_num_threads(1);
  }
  ~OneThread() {
    if (before_ != 1) omp_set_num_threads(before_);
  }
  OneThread(const OneThread&) = delete;
  OneThread& operator=(const OneThread&) = delete;

 private:
  const int before_;
};

// A primitive with the memory objects it runs on; the pointers inside are set before each run.
struct Entry {
  Primitive primitive;
  Memory a, b, c, scratch;
  std::unique_ptr<std::byte[]> scratch_bytes;
};

dnnl_engine_t Engine() {
  static const dnnl_engine_t engine = [] {
    dnnl_engine_t made = nullptr;
    EK_CHECK(dnnl_engine_create(&made, dnnl_cpu, 0) == dnnl_success);
    return made;
  }();
  return engine;
}

dnnl_memory_desc_t Matrix(int64_t rows, int64_t columns, bool transposed) {
  dnnl_memory_desc_t description;
  const dnnl_dims_t dims = {rows, columns};
  EK_CHECK(dnnl_memory_desc_init_by_tag(&description, 2, dims, dnnl_f32, transposed ? dnnl_ba : dnnl_ab) ==
           dnnl_success);
  return description;
}

// The library's choice for `shape`, or null when it has none or not the kind whose rows are independent.
PrimitiveDescription Describe(const MatmulShape& shape) {
  const dnnl_memory_desc_t a = Matrix(shape.m, shape.k, shape.transpose_a);
  const dnnl_memory_desc_t b = Matrix(shape.k, shape.n, shape.transpose_b);
  const dnnl_memory_desc_t c = Matrix(shape.m, shape.n, false);
  dnnl_matmul_desc_t matmul;
  if (dnnl_matmul_desc_init(&matmul, &a, &b, nullptr, &c) != dnnl_success) return nullptr;
  dnnl_primitive_attr_t raw_attributes = nullptr;
  if (dnnl_primitive_attr_create(&raw_attributes) != dnnl_success) return nullptr;
  const Attributes attributes(raw_attributes);
  if (dnnl_primitive_attr_set_scratchpad_mode(raw_attributes, dnnl_scratchpad_mode_user) != dnnl_success) {
    return nullptr;
  }
  dnnl_primitive_desc_t raw = nullptr;
  if (dnnl_primitive_desc_create(&raw, &matmul, raw_attributes, Engine(), nullptr) != dnnl_success) return nullptr;
  PrimitiveDescription description(raw);
  const char* name = nullptr;
  if (dnnl_primitive_desc_query(raw, dnnl_query_impl_info_str, 0, &name) != dnnl_success) return nullptr;
  if (absl::string_view(name).substr(0, 4) != "brg:") return nullptr;
  return description;
}

Memory MakeMemory(const dnnl_memory_desc_t& description) {
  dnnl_memory_t raw = nullptr;
  if (dnnl_memory_create(&raw, &description, Engine(), DNNL_MEMORY_NONE) != dnnl_success) return nullptr;
  return Memory(raw);
}

// Null when the library refuses.
std::unique_ptr<Entry> MakeEntry(const MatmulShape& shape) {
  const PrimitiveDescription description = Describe(shape);
  if (description == nullptr) return nullptr;
  auto entry = std::make_unique<Entry>();
  dnnl_primitive_t raw = nullptr;
  if (dnnl_primitive_create(&raw, description.get()) != dnnl_success) return nullptr;
  entry->primitive.reset(raw);
  entry->a = MakeMemory(Matrix(shape.m, shape.k, shape.transpose_a));
  entry->b = MakeMemory(Matrix(shape.k, shape.n, shape.transpose_b));
  entry->c = MakeMemory(Matrix(shape.m, shape.n, false));
  const dnnl_memory_desc_t* scratch = dnnl_primitive_desc_query_md(description.get(), dnnl_query_scratchpad_md, 0);
  entry->scratch = MakeMemory(*scratch);
  if (!entry->a || !entry->b || !entry->c || !entry->scratch) return nullptr;
  const size_t bytes = dnnl_memory_desc_get_size(scratch);
  entry->scratch_bytes = std::make_unique<std::byte[]>(bytes + 64);
  const uintptr_t aligned = (reinterpret_cast<uintptr_t>(entry->scratch_bytes.get()) + 63) & ~uintptr_t{63};
  if (dnnl_memory_set_data_handle(entry->scratch.get(), reinterpret_cast<void*>(aligned)) != dnnl_success) {
    return nullptr;
  }
  return entry;
}

struct ThreadEntries {
  absl::flat_hash_map<MatmulShape, std::unique_ptr<Entry>> by_shape;
  absl::flat_hash_map<MatmulShape, int> row_numbers;  // how many m have an entry, by shape with m = 0
};

ThreadEntries& Entries() {
  static thread_local ThreadEntries entries;
  if (entries.by_shape.size() >= kMaxPrimitivesPerThread) entries = ThreadEntries();
  return entries;
}

// This thread's entry for `shape`; null when the library refuses it.
Entry* FindEntry(const MatmulShape& shape) {
  ThreadEntries& entries = Entries();
  auto found = entries.by_shape.find(shape);
  if (found != entries.by_shape.end()) return found->second.get();
  MatmulShape any_rows = shape;
  any_rows.m = 0;
  ++entries.row_numbers[any_rows];
  return entries.by_shape.emplace(shape, MakeEntry(shape)).first->second.get();
}

// True when `shape` should get a primitive of its own, or has one.
bool WantsEntry(const MatmulShape& shape) {
  if (shape.transpose_a || shape.m < kRowUnit || shape.m % kRowUnit == 0) return true;
  ThreadEntries& entries = Entries();
  if (entries.by_shape.contains(shape)) return true;
  MatmulShape any_rows = shape;
  any_rows.m = 0;
  return entries.row_numbers[any_rows] < kExactRowNumbers;
}

dnnl_stream_t ThreadStream() {
  struct Owner {
    Owner() { EK_CHECK(dnnl_stream_create(&stream, Engine(), dnnl_stream_default_flags) == dnnl_success); }
    ~Owner() { dnnl_stream_destroy(stream); }
    dnnl_stream_t stream = nullptr;
  };
  static thread_local const Owner owner;
  return owner.stream;
}

absl::Status LibraryError(absl::string_view what, const MatmulShape& shape) {
  return absl::InternalError(absl::StrCat("oneDNN ", what, " m=", shape.m, " n=", shape.n, " k=", shape.k,
                                          " transposes ", shape.transpose_a, shape.transpose_b));
}

absl::Status Execute(const MatmulShape& shape, const float* a, const float* b, float* c) {
  const OneThread one_thread;
  Entry* entry = FindEntry(shape);
  if (entry == nullptr) return LibraryError("has no product for", shape);
  // The library takes non-const pointers for inputs too; it only reads them.
  const bool set = dnnl_memory_set_data_handle(entry->a.get(), const_cast<float*>(a)) == dnnl_success &&
                   dnnl_memory_set_data_handle(entry->b.get(), const_cast<float*>(b)) == dnnl_success &&
                   dnnl_memory_set_data_handle(entry->c.get(), c) == dnnl_success;
  const dnnl_exec_arg_t arguments[] = {{DNNL_ARG_SRC, entry->a.get()},
                                       {DNNL_ARG_WEIGHTS, entry->b.get()},
                                       {DNNL_ARG_DST, entry->c.get()},
                                       {DNNL_ARG_SCRATCHPAD, entry->scratch.get()}};
  if (!set || dnnl_primitive_execute(entry->primitive.get(), ThreadStream(), 4, arguments) != dnnl_success) {
    return LibraryError("failed at", shape);
  }
  return absl::OkStatus();
}

// Where rows come in ever new numbers, as ragged orders bring them, making primitives would cost more than the
// products: those are cut after a multiple of 16 rows. Rows are independent, so the cut changes no bit.
absl::Status LibraryMatmul(MatmulShape shape, const float* a, const float* b, float* c) {
  if (WantsEntry(shape)) return Execute(shape, a, b, c);
  const int64_t rows = shape.m;
  shape.m = rows / kRowUnit * kRowUnit;
  const int64_t done = shape.m;
  EK_RETURN_IF_ERROR(Execute(shape, a, b, c));
  shape.m = rows - done;
  return Execute(shape, a + done * shape.k, b, c + done * shape.n);
}

// True when the library takes B of this kind for any number of rows.
bool TakesAnyRows(MatmulShape shape) {
  const OneThread one_thread;
  for (int64_t m : {int64_t{1}, int64_t{64}, int64_t{4096}}) {
    shape.m = m;
    if (Describe(shape) == nullptr) return false;
  }
  return true;
}

void FillRandom(std::vector<float>& values) {
  uint32_t state = static_cast<uint32_t>(values.size());
  for (float& value : values) {
    state = state * 1664525u + 1013904223u;  // the generator of "Numerical Recipes"
    value = static_cast<float>(state >> 8) * 0x1p-24f - 0.5f;
  }
}

// Tries on this machine what the kernel's construction promises: rows alone and among others have the same bits.
bool RowsAreIndependent(MatmulShape shape) {
  constexpr int64_t kRows = 48;
  std::vector<float> a(kRows * shape.k), b(shape.k * shape.n), all(kRows * shape.n), some(kRows * shape.n);
  FillRandom(a);
  FillRandom(b);
  shape.m = kRows;
  if (!Execute(shape, a.data(), b.data(), all.data()).ok()) return false;
  for (const auto& [first, count] : {std::pair<int64_t, int64_t>{0, 1}, {29, 1}, {3, 7}, {10, 17}, {1, 32}}) {
    shape.m = count;
    if (!Execute(shape, a.data() + first * shape.k, b.data(), some.data()).ok()) return false;
    const size_t bytes = static_cast<size_t>(count * shape.n) * sizeof(float);
    if (std::memcmp(some.data(), all.data() + first * shape.n, bytes) != 0) return false;
  }
  return true;
}

// Tries on this machine whether the panel kernel gives the library's bits.
bool PanelGivesSameBits(MatmulShape shape) {
  if (!PanelMultiplies(shape)) return false;
  for (int64_t m : {1, 2, 21, 48}) {  // one tile, tiles of unequal heights, whole tiles
    shape.m = m;
    std::vector<float> a(m * shape.k), b(shape.k * shape.n), library(m * shape.n), panel(m * shape.n);
    FillRandom(a);
    FillRandom(b);
    if (!Execute(shape, a.data(), b.data(), library.data()).ok()) return false;
    PanelMatmul(shape, a.data(), b.data(), panel.data());
    if (std::memcmp(library.data(), panel.data(), library.size() * sizeof(float)) != 0) return false;
  }
  return true;
}

// Tries on this machine whether each element is one fused sum in the order of k, starting at zero: zero terms anywhere
// then change nothing. A sample of the elements, for few and for many terms.
bool SumsAreOrdered(MatmulShape shape) {
  for (int64_t k : {int64_t{1}, int64_t{37}, int64_t{64}, int64_t{128}}) {
    shape.k = k;
    std::vector<float> a(k * shape.m), b(k * shape.n), c(shape.m * shape.n);
    FillRandom(a);
    FillRandom(b);
    if (!Execute(shape, a.data(), b.data(), c.data()).ok()) return false;
    const int64_t count = shape.m * shape.n, step = count / 61 + 1;
    for (int64_t at = 0; at < count; at += step) {
      float sum = 0;
      for (int64_t p = 0; p < k; ++p) {
        sum = std::fma(a[p * shape.m + at / shape.n], b[p * shape.n + at % shape.n], sum);
      }
      if (std::memcmp(&sum, &c[at], sizeof(float)) != 0) return false;
    }
  }
  return true;
}

// An answer per shape, found once per process and remembered by each thread.
class Answers {
 public:
  explicit Answers(bool (*find)(MatmulShape)) : find_(find) {}
  bool Get(const MatmulShape& key) {
    absl::MutexLock lock(&mutex_);
    auto found = answers_.find(key);
    if (found != answers_.end()) return found->second;
    return answers_.emplace(key, find_(key)).first->second;
  }

 private:
  bool (*const find_)(MatmulShape);
  absl::Mutex mutex_;
  absl::flat_hash_map<MatmulShape, bool> answers_ ABSL_GUARDED_BY(mutex_);
};

using ThreadAnswers = absl::flat_hash_map<MatmulShape, bool>;

bool Remembered(const MatmulShape& key, Answers& process, ThreadAnswers& thread) {
  auto found = thread.find(key);
  if (found != thread.end()) return found->second;
  if (thread.size() >= kMaxPrimitivesPerThread) thread.clear();
  return thread.emplace(key, process.Get(key)).first->second;
}

}  // namespace

bool LibraryMultiplies(const MatmulShape& shape) {
  static auto* const process = new Answers([](MatmulShape key) {
    // Products with A transposed sum over rows and promise nothing about them.
    return TakesAnyRows(key) && (key.transpose_a || RowsAreIndependent(key));
  });
  static thread_local ThreadAnswers thread;
  MatmulShape key = shape;
  key.m = 0;
  return Remembered(key, *process, thread);
}

bool PanelAgrees(const MatmulShape& shape) {
  static auto* const process =
      new Answers([](MatmulShape key) { return LibraryMultiplies(key) && PanelGivesSameBits(key); });
  static thread_local ThreadAnswers thread;
  MatmulShape key = shape;
  key.m = 0;
  return Remembered(key, *process, thread);
}

bool LibrarySumsInOrder(const MatmulShape& shape) {
  static auto* const process = new Answers(&SumsAreOrdered);
  static thread_local ThreadAnswers thread;
  MatmulShape key = shape;
  key.k = 0;
  // Only what weight gradients need is tried.
  return key.transpose_a && !key.transpose_b && Remembered(key, *process, thread);
}

absl::Status Matmul(const MatmulShape& shape, const float* a, const float* b, float* c) {
  if (shape.m <= kFewRows && PanelAgrees(shape)) {
    PanelMatmul(shape, a, b, c);
  } else if (LibraryMultiplies(shape)) {
    return LibraryMatmul(shape, a, b, c);
  } else {
    PlainMatmul(shape, a, b, c);
  }
  return absl::OkStatus();
}

absl::Status Matmul(const MatmulShape& shape, const double* a, const double* b, double* c) {
  PlainMatmul(shape, a, b, c);
  return absl::OkStatus();
}

absl::Status OrderedMatmul(const MatmulShape& shape, const float* a, const float* b, float* c) {
  if (LibrarySumsInOrder(shape)) return Execute(shape, a, b, c);
  PlainMatmul(shape, a, b, c);
  return absl::OkStatus();
}

absl::Status OrderedMatmul(const MatmulShape& shape, const double* a, const double* b, double* c) {
  PlainMatmul(shape, a, b, c);
  return absl::OkStatus();
}

}  // namespace evenkeel::ops_internal

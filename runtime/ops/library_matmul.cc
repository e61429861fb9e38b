// oneDNN's matmul primitive through its C interface (no exceptions), one thread per call. Making a primitive costs
// about 0.15 ms the first time and microseconds from the library's own cache, so each thread keeps those it has used.

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "absl/base/const_init.h"
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

constexpr size_t kMaxPrimitivesPerThread = 4096;

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

// This thread's entry for `shape`; null when the library refuses it.
Entry* FindEntry(const MatmulShape& shape) {
  static thread_local absl::flat_hash_map<MatmulShape, std::unique_ptr<Entry>> entries;
  auto found = entries.find(shape);
  if (found != entries.end()) return found->second.get();
  if (entries.size() >= kMaxPrimitivesPerThread) entries.clear();
  return entries.emplace(shape, MakeEntry(shape)).first->second.get();
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

// True when the library takes B of this kind for any number of rows.
bool TakesAnyRows(MatmulShape shape) {
  const OneThread one_thread;
  for (int64_t m : {int64_t{1}, int64_t{64}, int64_t{4096}}) {
    shape.m = m;
    if (Describe(shape) == nullptr) return false;
  }
  return true;
}

// Tries on this machine what the kernel's construction promises: rows alone and among others have the same bits.
bool RowsAreIndependent(MatmulShape shape) {
  constexpr int64_t kRows = 48;
  std::vector<float> a(kRows * shape.k), b(shape.k * shape.n), all(kRows * shape.n), some(kRows * shape.n);
  uint32_t state = 1;
  const auto fill = [&state](std::vector<float>& values) {
    for (float& value : values) {
      state = state * 1664525u + 1013904223u;  // the generator of "Numerical Recipes"
      value = static_cast<float>(state >> 8) * 0x1p-24f - 0.5f;
    }
  };
  fill(a);
  fill(b);
  shape.m = kRows;
  if (!LibraryMatmul(shape, a.data(), b.data(), all.data()).ok()) return false;
  for (const auto& [first, count] : {std::pair<int64_t, int64_t>{0, 1}, {29, 1}, {3, 7}, {10, 17}, {1, 32}}) {
    shape.m = count;
    if (!LibraryMatmul(shape, a.data() + first * shape.k, b.data(), some.data()).ok()) return false;
    const size_t bytes = static_cast<size_t>(count * shape.n) * sizeof(float);
    if (std::memcmp(some.data(), all.data() + first * shape.n, bytes) != 0) return false;
  }
  return true;
}

// The answer for all shapes with the n, k and transposes of `key`; found once per process. Products with A
// transposed sum over rows and promise nothing about them.
bool AnswerOfProcess(const MatmulShape& key) {
  static absl::Mutex mutex(absl::kConstInit);
  static auto* const answers = new absl::flat_hash_map<MatmulShape, bool>;
  absl::MutexLock lock(&mutex);
  auto found = answers->find(key);
  if (found != answers->end()) return found->second;
  const bool answer = TakesAnyRows(key) && (key.transpose_a || RowsAreIndependent(key));
  return answers->emplace(key, answer).first->second;
}

}  // namespace

bool LibraryMultiplies(const MatmulShape& shape) {
  static thread_local absl::flat_hash_map<MatmulShape, bool> answers;
  MatmulShape key = shape;
  key.m = 0;
  auto found = answers.find(key);
  if (found != answers.end()) return found->second;
  if (answers.size() >= kMaxPrimitivesPerThread) answers.clear();
  return answers.emplace(key, AnswerOfProcess(key)).first->second;
}

absl::Status LibraryMatmul(const MatmulShape& shape, const float* a, const float* b, float* c) {
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

absl::Status Matmul(const MatmulShape& shape, const float* a, const float* b, float* c) {
  if (LibraryMultiplies(shape)) return LibraryMatmul(shape, a, b, c);
  PlainMatmul(shape, a, b, c);
  return absl::OkStatus();
}

absl::Status Matmul(const MatmulShape& shape, const double* a, const double* b, double* c) {
  PlainMatmul(shape, a, b, c);
  return absl::OkStatus();
}

}  // namespace evenkeel::ops_internal

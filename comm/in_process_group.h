// What the ranks of one in-process group share: postings, the rendezvous, who has left, why it broke.
//
// Internal to in_process.cc. Postings are double buffered: a rank writes posting k + 2 only after everybody has come to
// the rendezvous of posting k + 1, and so has finished reading posting k.
#ifndef EVENKEEL_COMM_IN_PROCESS_GROUP_H_
#define EVENKEEL_COMM_IN_PROCESS_GROUP_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "evenkeel/comm/fingerprint.h"
#include "evenkeel/comm/mesh.h"
#include "evenkeel/comm/rendezvous.h"
#include "evenkeel/comm/scratch_memory.h"
#include "evenkeel/comm/transport.h"
#include "evenkeel/runtime/base/error_context.h"

namespace evenkeel::comm {

// How a rank waits before it sleeps; see Rendezvous.
struct WaitPolicy {
  int64_t wait_ns = 0;
  bool yields = false;
};

// Memory that begins with a cache line.
template <typename T>
struct CacheLineAllocator {
  using value_type = T;
  CacheLineAllocator() = default;
  template <typename U>
  explicit CacheLineAllocator(const CacheLineAllocator<U>&) {}
  T* allocate(size_t n) { return static_cast<T*>(::operator new (n * sizeof(T), std::align_val_t{64})); }
  void deallocate(T* data, size_t) { ::operator delete (data, std::align_val_t{64}); }
  friend bool operator==(const CacheLineAllocator&, const CacheLineAllocator&) { return true; }
};

// Thread-safe where it says so; postings are ordered by the rendezvous.
class InProcessGroup {
 public:
  // `parent` is set for a pair, and outlives its users: ranks 0 and 1 are its group ranks members[0] and members[1].
  InProcessGroup(Group group, int64_t epoch, const WaitPolicy& wait, int64_t eager_bytes, ScratchMemory* scratch,
                 InProcessGroup* parent = nullptr, std::vector<int> members = {});

  const Group& group() const { return group_; }
  int size() const { return group_.size(); }
  int64_t epoch() const { return epoch_; }
  Rendezvous& rendezvous() { return rendezvous_; }
  bool is_pair() const { return parent_ != nullptr; }
  // `rank` in the numbering that messages use: of a pair, that of its parent.
  int OuterRank(int rank) const { return members_.empty() ? rank : members_[rank]; }

  struct Posted {
    // The blocks of rank `from`, by receiver.
    const void** blocks(int from) { return lines[static_cast<size_t>(from) * lines_per_rank].words + 1; }
    // Not null: they lie in its own buffers, not in `eager`.
    const void*& lends(int from) { return lines[static_cast<size_t>(from) * lines_per_rank].words[0]; }

    // Each in one cache line: they have its length.
    std::vector<Fingerprint, CacheLineAllocator<Fingerprint>> fingerprints;
    std::vector<int64_t> rows;  // size * 2 * size
    // Each rank writes cache lines of its own.
    struct alignas(64) Line {
      const void* words[8] = {};
    };
    size_t lines_per_rank = 1;
    std::vector<Line> lines;
  };
  Posted& posted(uint32_t index) { return posted_[index & 1u]; }
  // Writes the blocks that `rank` sends in `phase` (null: none) into posting `index`, copying small ones.
  void PostBlocks(uint32_t index, int rank, const Phase* phase);
  bool AnyLends(uint32_t index);
  // Everybody has come: asks for the lines of posting `index` that `rank` will read, all at once, where reading would
  // wait for one to learn of the next.
  void PrefetchPosted(uint32_t index, int rank) const;

  // Around every piece that `rank` copies out of memory that others lend. False when the group is broken: the lenders
  // may be gone, and nothing may be read.
  bool BeginReading(int rank) {
    ranks_[rank].reading.store(true, std::memory_order_seq_cst);
    if (!rendezvous_.is_broken()) return true;
    EndReading(rank);
    return false;
  }
  void EndReading(int rank) { ranks_[rank].reading.store(false, std::memory_order_release); }
  // After the group has broken: returns when nobody reads a piece of what `rank` lends any more, so that its call may
  // return to the owner of that memory.
  void AwaitReaders(int rank);

  // What `rank` called last; for messages.
  void NoteCall(int rank, const Call& call);

  // `rank` makes no more calls. Breaks what waits for it. Thread-safe, idempotent.
  void Depart(int rank);
  // Breaks `phase` with Unavailable when a rank that has left has not come to it.
  void CheckDeparted(uint64_t phase);
  // Breaks `phase` with DeadlineExceeded naming the absent ranks, which `state` ("has not come").
  void TimeOut(uint64_t phase, absl::string_view state, absl::Duration elapsed, absl::Duration limit);
  // Breaks `phase` because nobody can run any more; `waits` says for absent group ranks what they wait for. Sleepers
  // learn when the caller wakes them, after all groups of the cycle are broken.
  void ReportDeadlock(uint64_t phase, const std::string& what, std::vector<RankFinding> waits);
  // A rank has given up because of `cause`: breaks the group and its pairs.
  void Abort(const absl::Status& cause);

  // The error of a call that was waiting when the group broke, and of the first that comes later.
  absl::Status WaitError(int rank, const Call& call);
  absl::Status LateError(int rank, const Call& call);
  // This group, or for a pair its parent, is broken.
  bool IsBroken() const;

  // The shared state of the pair of group ranks `low` < `high`, made on first use.
  std::shared_ptr<InProcessGroup> PairOf(int low, int high);

 private:
  struct Breakage {
    absl::StatusCode code = absl::StatusCode::kInternal;
    std::string what = {};
    std::vector<RankFinding> findings = {};  // in the numbering of the outer group
    absl::Duration elapsed = absl::ZeroDuration();
    absl::Duration limit = absl::ZeroDuration();
    absl::Status aborted_by = {};  // set when a rank gave up
  };

  // Written by its rank, read by others only when something is wrong.
  struct alignas(64) RankState {
    std::atomic<uint64_t> last_call{0};
    std::atomic<bool> reading{false};
    std::atomic<bool> departed{false};
  };

  ErrorContext Context(int rank, const Call& call) const;
  std::string LastCall(int rank) const;
  std::vector<RankFinding> DescribeAbsent(uint64_t phase, absl::string_view state) const;
  absl::Status Describe(int rank, const Call& call, const Breakage& breakage) const;
  std::vector<std::shared_ptr<InProcessGroup>> Pairs();

  const Group group_;
  const int64_t epoch_;
  const WaitPolicy wait_;
  const int64_t eager_bytes_;
  InProcessGroup* const parent_;
  const std::vector<int> members_;
  Rendezvous rendezvous_;
  Posted posted_[2];
  ScratchMemory* const scratch_;
  std::vector<ScratchBlock> eager_[2];
  std::vector<RankState> ranks_;
  std::atomic<int> num_departed_{0};
  absl::Mutex mutex_;
  std::optional<Breakage> breakage_ ABSL_GUARDED_BY(mutex_);
  std::map<std::pair<int, int>, std::shared_ptr<InProcessGroup>> pairs_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace evenkeel::comm

#endif  // EVENKEEL_COMM_IN_PROCESS_GROUP_H_

// Copies of payload blocks, the way that suits how much of them the caches can keep.
//
//   const bool past_cache = OutgrowsCache(bytes_that_arrive_at_each_rank, num_ranks);
//   CopyBlock(to, from, bytes, past_cache);
#ifndef EVENKEEL_COMM_BLOCK_COPY_H_
#define EVENKEEL_COMM_BLOCK_COPY_H_

#include <cstdint>

namespace evenkeel::comm {

// Whether what a call stores into the memory of `ranks` ranks, `bytes` each, is more than the last cache of this
// machine holds, so that most of it leaves the cache before anybody reads it.
bool OutgrowsCache(int64_t bytes, int ranks);

// Copies `bytes` bytes between places that do not overlap; with 0 bytes both may be null. With `past_cache` the stores
// go around the caches, where the machine can: memory is not read before it is overwritten, and what others have in the
// cache stays. A third faster for what does not fit there, half as fast for what does.
void CopyBlock(void* to, const void* from, int64_t bytes, bool past_cache);

}  // namespace evenkeel::comm

#endif  // EVENKEEL_COMM_BLOCK_COPY_H_

#include "evenkeel/comm/block_copy.h"

#include <cstddef>
#include <vector>

#include "gtest/gtest.h"

namespace evenkeel::comm {
namespace {

std::byte Expected(size_t i) { return static_cast<std::byte>(i * 131 + (i >> 8)); }
constexpr std::byte kGuard{0xa5};

TEST(BlockCopyTest, EveryByteAndNoOther) {
  for (const bool past_cache : {false, true}) {
    for (const int64_t bytes : {0, 1, 63, 64, 4095, 4096, 4097, 5000, (256 << 10) + 77, 600'000}) {
      for (const size_t to_offset : {0, 1, 15, 16, 63}) {
        for (const size_t from_offset : {0, 7, 32}) {
          const auto n = static_cast<size_t>(bytes);
          std::vector<std::byte> from(n + 64), to(n + 128, kGuard);
          std::vector<std::byte> wanted = to;
          for (size_t i = 0; i < n; ++i) from[from_offset + i] = wanted[to_offset + i] = Expected(i);
          CopyBlock(to.data() + to_offset, from.data() + from_offset, bytes, past_cache);
          ASSERT_TRUE(to == wanted) << bytes << " bytes to " << to_offset << " from " << from_offset << ", past_cache "
                                    << past_cache;
        }
      }
    }
  }
  CopyBlock(nullptr, nullptr, 0, true);
}

TEST(BlockCopyTest, WhatFitsTheCacheStaysInIt) {
  EXPECT_FALSE(OutgrowsCache(0, 0));
  EXPECT_FALSE(OutgrowsCache(0, 4));
  EXPECT_FALSE(OutgrowsCache(1 << 10, 64));
  EXPECT_TRUE(OutgrowsCache(int64_t{1} << 40, 2));
  EXPECT_TRUE(OutgrowsCache(int64_t{1} << 62, 1'000)) << "no overflow";
}

}  // namespace
}  // namespace evenkeel::comm

#include "evenkeel/runtime/device/mapped_file_device.h"

#include <cstdlib>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "evenkeel/runtime/base/status_matchers.h"
#include "evenkeel/runtime/device/host_device.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

using ::evenkeel::testutil::StatusIs;
using ::testing::HasSubstr;

std::string TempFolder() { return ::testing::TempDir(); }

TEST(MappedFileDeviceTest, BuffersAreZeroApartAndKeepWhatStreamsWrite) {
  auto host = HostDevice::Create();
  ASSERT_OK_AND_ASSIGN(auto device, MappedFileDevice::Create(host.get(), {.folder = TempFolder()}));
  ASSERT_OK_AND_ASSIGN(auto stream, device->CreateStream("work"));
  std::vector<Buffer> buffers;
  for (int64_t bytes : {1, 4096, 4097, 0, 100000}) {
    ASSERT_OK_AND_ASSIGN(Buffer buffer, device->Allocate(bytes));
    EXPECT_EQ(reinterpret_cast<uintptr_t>(buffer.data()) % 64, 0u);
    for (int64_t i = 0; i < bytes; i += 97) ASSERT_EQ(static_cast<int>(buffer.data()[i]), 0);
    ASSERT_OK(stream->Fill(buffer.data(), static_cast<int>(buffers.size()) + 1, bytes));
    buffers.push_back(std::move(buffer));
  }
  ASSERT_OK(stream->Synchronize());
  EXPECT_EQ(device->counters().Snapshot().live_bytes, 1 + 4096 + 4097 + 100000);
  buffers[1].Reset();
  for (size_t b : {size_t{0}, size_t{2}, size_t{4}}) {
    for (int64_t i = 0; i < buffers[b].bytes(); i += 97) {
      ASSERT_EQ(static_cast<size_t>(buffers[b].data()[i]), b + 1);
    }
  }
  EXPECT_EQ(device->counters().Snapshot().live_bytes, 1 + 4097 + 100000);
}

TEST(MappedFileDeviceTest, ErrorsNameTheNumbers) {
  auto host = HostDevice::Create();
  EXPECT_THAT(MappedFileDevice::Create(host.get(), {.folder = "/no/such/folder"}),
              StatusIs(absl::StatusCode::kUnavailable, HasSubstr("/no/such/folder")));
  ASSERT_OK_AND_ASSIGN(auto device,
                       MappedFileDevice::Create(host.get(), {.folder = TempFolder(), .max_live_bytes = 100}));
  EXPECT_THAT(device->Allocate(101), StatusIs(absl::StatusCode::kResourceExhausted, HasSubstr("limit of 100")));
  EXPECT_THAT(device->Allocate(-1), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("-1")));
  ASSERT_OK_AND_ASSIGN(Buffer buffer, device->Allocate(100));
  EXPECT_THAT(device->Allocate(1), StatusIs(absl::StatusCode::kResourceExhausted, HasSubstr("100 live")));
  buffer.Reset();
  EXPECT_OK(device->Allocate(50));
}

}  // namespace
}  // namespace evenkeel

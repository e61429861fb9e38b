#include "evenkeel/comm/fingerprint.h"

#include <cstddef>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "evenkeel/comm/reduce_op.h"
#include "evenkeel/runtime/base/status_matchers.h"
#include "evenkeel/runtime/tensor/dtype.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel::comm {
namespace {

using ::evenkeel::testutil::StatusIs;
using ::testing::HasSubstr;

Fingerprint Sample() {
  Fingerprint f;
  f.operation = static_cast<uint8_t>(Operation::kAllReduce);
  f.dtype = static_cast<uint8_t>(DType::kF32);
  f.reduce_op = static_cast<uint8_t>(ReduceOp::kSum);
  f.group = 77;
  f.epoch = 3;
  f.sequence = 12;
  f.count = 8;
  f.deadline_ms = 2000;
  return SealFingerprint(f);
}

TEST(FingerprintTest, LayoutIsFixed) {
  EXPECT_EQ(sizeof(Fingerprint), 64u);
  EXPECT_EQ(offsetof(Fingerprint, operation), 4u);
  EXPECT_EQ(offsetof(Fingerprint, root), 8u);
  EXPECT_EQ(offsetof(Fingerprint, group), 16u);
  EXPECT_EQ(offsetof(Fingerprint, count), 40u);
  EXPECT_EQ(offsetof(Fingerprint, checksum), 60u);
}

TEST(FingerprintTest, ParsesBackAndRefusesEveryFlippedBit) {
  const Fingerprint f = Sample();
  std::vector<uint8_t> bytes(kFingerprintBytes);
  std::memcpy(bytes.data(), &f, bytes.size());
  ASSERT_OK_AND_ASSIGN(const Fingerprint parsed, ParseFingerprint(bytes));
  EXPECT_EQ(DescribeFingerprint(parsed), "all_reduce f32 sum count 8 seq 12 epoch 3");
  for (size_t bit = 0; bit < bytes.size() * 8; ++bit) {
    std::vector<uint8_t> flipped = bytes;
    flipped[bit / 8] ^= static_cast<uint8_t>(1u << (bit % 8));
    const auto result = ParseFingerprint(flipped);
    ASSERT_FALSE(result.ok()) << "bit " << bit;
    // The protocol word is looked at first: another build may also have another checksum.
    EXPECT_EQ(result.status().code(), bit < 32 ? absl::StatusCode::kFailedPrecondition : absl::StatusCode::kDataLoss);
  }
  for (size_t size = 0; size < bytes.size(); ++size) {
    EXPECT_THAT(ParseFingerprint(absl::MakeSpan(bytes).subspan(0, size)),
                StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("64 bytes")));
  }
}

TEST(FingerprintTest, RefusesFieldsOutsideTheirEnumerations) {
  const auto status = [](const std::function<void(Fingerprint*)>& change) {
    Fingerprint f = Sample();
    change(&f);
    return CheckFingerprint(SealFingerprint(f));
  };
  constexpr auto kBad = absl::StatusCode::kInvalidArgument;
  EXPECT_THAT(status([](Fingerprint* f) { f->operation = kNumOperations; }), StatusIs(kBad, HasSubstr("operation 13")));
  EXPECT_THAT(status([](Fingerprint* f) { f->dtype = 7; }), StatusIs(kBad, HasSubstr("dtype 7")));
  EXPECT_THAT(status([](Fingerprint* f) { f->reduce_op = 5; }), StatusIs(kBad, HasSubstr("operator 5")));
  EXPECT_THAT(status([](Fingerprint* f) { f->count = -1; }), StatusIs(kBad, HasSubstr("count -1")));
}

struct Change {
  const char* name;
  void (*apply)(Fingerprint*);
  const char* what;
  const char* odd_had;
};

const Change kChanges[] = {
    {"group", [](Fingerprint* f) { f->group = 78; }, "groups differ", "is in group 000000000000004e"},
    {"epoch", [](Fingerprint* f) { f->epoch = 4; }, "epochs differ", "is in epoch 4"},
    {"operation", [](Fingerprint* f) { f->operation = static_cast<uint8_t>(Operation::kBarrier); }, "operations differ",
     "calls barrier"},
    {"sequence", [](Fingerprint* f) { f->sequence = 13; }, "sequence numbers differ", "is at sequence 13"},
    {"dtype", [](Fingerprint* f) { f->dtype = static_cast<uint8_t>(DType::kI32); }, "dtypes differ", "has dtype i32"},
    {"operator", [](Fingerprint* f) { f->reduce_op = static_cast<uint8_t>(ReduceOp::kMax); },
     "reduction operators differ", "has operator max"},
    {"root", [](Fingerprint* f) { f->root = 2; }, "roots differ", "has root 2"},
    {"form", [](Fingerprint* f) { f->flags = kFlagTwoLevel; }, "forms differ", "uses the two-level form"},
    {"count", [](Fingerprint* f) { f->count = 9; }, "element counts differ", "has count 9"},
    {"counts", [](Fingerprint* f) { f->counts_digest = 1; }, "counts vectors differ", "digest 0000000000000001"},
    {"deadline", [](Fingerprint* f) { f->deadline_ms = 3000; }, "deadlines differ", "deadline of 3000 ms"},
    {"refusal", [](Fingerprint* f) { f->local_status = 3; }, "refuses the call",
     "refuses all_reduce: INVALID_ARGUMENT"},
};

// Every field, the odd rank rotated, up to 12 ranks.
TEST(FingerprintTest, FindsEveryDifferingFieldAndTheOddRank) {
  for (const Change& change : kChanges) {
    for (const int size : {2, 3, 4, 5, 8, 12}) {
      for (int odd = 0; odd < size; ++odd) {
        std::vector<Fingerprint> all(size, Sample());
        change.apply(&all[odd]);
        all[odd] = SealFingerprint(all[odd]);
        const auto found = FindDisagreement(all);
        ASSERT_TRUE(found.has_value()) << change.name;
        EXPECT_EQ(found->code, absl::StatusCode::kFailedPrecondition);
        EXPECT_THAT(found->what, HasSubstr(change.what));
        bool named = false;
        for (const RankFinding& finding : found->findings) {
          if (finding.rank == odd) {
            named = true;
            EXPECT_THAT(finding.had, HasSubstr(change.odd_had));
          }
        }
        EXPECT_TRUE(named) << change.name << " rank " << odd << " of " << size;
        // All ranks of a small group, the odd one and one other of a large one.
        if (std::string(change.name) != "refusal") {
          EXPECT_EQ(static_cast<int>(found->findings.size()), size <= 8 ? size : 2);
        }
      }
    }
  }
}

// A rank without memory is everybody's ResourceExhausted; one with bad arguments beside it is the graver reason.
TEST(FingerprintTest, C31_RanksWithoutMemory) {
  std::vector<Fingerprint> all(3, Sample());
  all[1].local_status = static_cast<uint32_t>(absl::StatusCode::kResourceExhausted);
  all[1] = SealFingerprint(all[1]);
  auto found = FindDisagreement(all);
  ASSERT_TRUE(found.has_value());
  EXPECT_EQ(found->code, absl::StatusCode::kResourceExhausted);
  ASSERT_EQ(found->findings.size(), 1u);
  EXPECT_EQ(found->findings[0], (RankFinding{1, "refuses all_reduce: RESOURCE_EXHAUSTED"}));
  all[2].local_status = static_cast<uint32_t>(absl::StatusCode::kInvalidArgument);
  all[2] = SealFingerprint(all[2]);
  found = FindDisagreement(all);
  EXPECT_EQ(found->code, absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(found->findings.size(), 2u);
}

TEST(FingerprintTest, AgreementAndWhatMayDiffer) {
  std::vector<Fingerprint> all(4, Sample());
  EXPECT_EQ(FindDisagreement(all), std::nullopt);
  all[2].flags |= kFlagInPlace;  // the caller's own business
  all[2] = SealFingerprint(all[2]);
  EXPECT_EQ(FindDisagreement(all), std::nullopt);
}

TEST(FingerprintTest, DamagedRecordIsDataLossAndNamed) {
  std::vector<Fingerprint> all(3, Sample());
  all[1].count ^= 1;
  const auto found = FindDisagreement(all);
  ASSERT_TRUE(found.has_value());
  EXPECT_EQ(found->code, absl::StatusCode::kDataLoss);
  ASSERT_EQ(found->findings.size(), 1u);
  EXPECT_EQ(found->findings[0].rank, 1);
}

TEST(FingerprintTest, C10_OtherProtocolIsNamedWithBothVersions) {
  std::vector<Fingerprint> all(3, Sample());
  all[2].protocol = 0x314b4502;
  const auto found = FindDisagreement(all);
  ASSERT_TRUE(found.has_value());
  EXPECT_EQ(found->code, absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(found->findings[0].had, HasSubstr("protocol 314b4502, this build speaks 314b4501"));
}

}  // namespace
}  // namespace evenkeel::comm

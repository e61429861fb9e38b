// The tests that this program registered, by name: for tests of lists of tests, which may not shrink unseen.
#ifndef EVENKEEL_COMM_TESTING_REGISTERED_TESTS_H_
#define EVENKEEL_COMM_TESTING_REGISTERED_TESTS_H_

#include <set>
#include <string>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"

namespace evenkeel::comm {

// "Suite.Test", whatever filter the program runs with. For use inside a test.
inline std::set<std::string> RegisteredTests() {
  std::set<std::string> names;
  const ::testing::UnitTest& all = *::testing::UnitTest::GetInstance();
  for (int s = 0; s < all.total_test_suite_count(); ++s) {
    const ::testing::TestSuite& suite = *all.GetTestSuite(s);
    for (int t = 0; t < suite.total_test_count(); ++t) {
      names.insert(absl::StrCat(suite.name(), ".", suite.GetTestInfo(t)->name()));
    }
  }
  return names;
}

}  // namespace evenkeel::comm

#endif  // EVENKEEL_COMM_TESTING_REGISTERED_TESTS_H_

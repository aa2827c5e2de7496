// Which units each policy recomputes, odd sizes included, and what it refuses.
#include <gtest/gtest.h>

#include "poise/checkpointing.h"
#include "poise/error.h"

namespace poise::checkpointing {
namespace {

std::string flags(const std::string& policy, int count, std::int64_t n = 1,
                  std::vector<std::string> patterns = {}) {
  std::vector<std::string> units;
  for (int i = 0; i < count; ++i) units.push_back("block." + std::to_string(i));
  std::string text;
  for (bool flag :
       recomputed_units({.policy = policy, .n = n, .units = std::move(patterns)}, units)) {
    text += flag ? 'x' : '-';
  }
  return text;
}

TEST(Policy, None) {
  EXPECT_EQ(flags("none", 3), "---");
  EXPECT_EQ(flags("none", 0), "");
}

TEST(Policy, EveryNthUnitCountedFromOne) {
  EXPECT_EQ(flags("every_n", 4, 1), "xxxx");
  EXPECT_EQ(flags("every_n", 5, 2), "-x-x-");
  EXPECT_EQ(flags("every_n", 7, 3), "--x--x-");
  EXPECT_EQ(flags("every_n", 3, 3), "--x");
}

TEST(Policy, SqrtKeepsAboutSqrtUnitsTheLastAmongThem) {
  EXPECT_EQ(flags("sqrt", 1), "-");
  EXPECT_EQ(flags("sqrt", 2), "x-");
  EXPECT_EQ(flags("sqrt", 4), "x-x-");
  EXPECT_EQ(flags("sqrt", 5), "x-xx-");
  EXPECT_EQ(flags("sqrt", 9), "xx-xx-xx-");
}

TEST(Policy, FirstM) {
  EXPECT_EQ(flags("first_m", 5, 2), "xx---");
  EXPECT_EQ(flags("first_m", 1, 1), "x");
}

TEST(Policy, ListTakesShellPatterns) {
  EXPECT_EQ(flags("list", 12, 1, {"block.1?", "block.[03]"}), "x--x------xx");
}

TEST(Policy, SelectiveTakesAll) { EXPECT_EQ(flags("selective", 3), "xxx"); }

void expect_error(const std::string& part, const std::function<void()>& call) {
  try {
    call();
    FAIL() << "no error; expected one about " << part;
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
  }
}

TEST(Policy, RefusesWhatMeansNothing) {
  expect_error("unknown policy 'every-n'", [] { flags("every-n", 3); });
  expect_error("n = 0", [] { flags("every_n", 3, 0); });
  expect_error("n = 4", [] { flags("every_n", 3, 4); });
  expect_error("n = 4", [] { flags("first_m", 3, 4); });
  expect_error("n = -1", [] { flags("first_m", 3, -1); });
  expect_error("'blok.*' matches no unit", [] { flags("list", 3, 1, {"block.*", "blok.*"}); });
  expect_error("without units", [] { flags("list", 3); });
  expect_error("without units", [] { flags("sqrt", 0); });
}

}  // namespace
}  // namespace poise::checkpointing

#include "poise/error.h"

#include <gtest/gtest.h>

#include "poise/log.h"

namespace poise {
namespace {

TEST(Error, NamesTheRoomFirst) {
  try {
    fail("config", "bad value: ", 7, "; use 8");
    FAIL() << "fail() returned";
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "[config] bad value: 7; use 8");
  }
}

TEST(Check, ThrowsBugWithExpressionAndMessage) {
  EXPECT_NO_THROW(POISE_CHECK(1 + 1 == 2));
  try {
    POISE_CHECK(1 + 1 == 3, "sum was ", 2);
    FAIL() << "the check passed";
  } catch (const Bug& bug) {
    const std::string what = bug.what();
    EXPECT_NE(what.find("1 + 1 == 3"), std::string::npos);
    EXPECT_NE(what.find("sum was 2"), std::string::npos);
  }
}

TEST(Log, SinkGetsLinesAtOrAboveTheLevel) {
  std::vector<std::string> lines;
  auto old = log::set_sink([&](log::Level, const std::string& line) { lines.push_back(line); });
  log::write(log::Level::debug, "hidden");
  log::info("seen ", 1);
  log::set_sink(old);
  EXPECT_EQ(lines, std::vector<std::string>{"seen 1"});
}

}  // namespace
}  // namespace poise

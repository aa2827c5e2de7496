#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <set>
#include <string>

#include "poise/error.h"
#include "poise/memory.h"

namespace poise::memory {
namespace {

TEST(ParseBytes, ReadsEveryUnit) {
  EXPECT_EQ(parse_bytes("1048576"), 1048576);
  EXPECT_EQ(parse_bytes("0"), 0);
  EXPECT_EQ(parse_bytes("7B"), 7);
  EXPECT_EQ(parse_bytes("3KB"), 3000);
  EXPECT_EQ(parse_bytes("3KiB"), 3072);
  EXPECT_EQ(parse_bytes("512MiB"), 536870912);
  EXPECT_EQ(parse_bytes("1.5GB"), 1500000000);
  EXPECT_EQ(parse_bytes("20GiB"), 21474836480);
  EXPECT_EQ(parse_bytes("2TB"), 2000000000000);
  EXPECT_EQ(parse_bytes("1TiB"), 1099511627776);
}

TEST(ParseBytes, CaseAndSpacesDoNotMatter) {
  EXPECT_EQ(parse_bytes(" 20 gib "), 21474836480);
  EXPECT_EQ(parse_bytes("5mb"), 5000000);
}

TEST(ParseBytes, KeepsEveryByteOfALargeCount) {
  EXPECT_EQ(parse_bytes("9007199254740993"), 9007199254740993);  // 2^53 + 1
  EXPECT_EQ(parse_bytes("9223372036854775807"), std::numeric_limits<std::int64_t>::max());
}

TEST(ParseBytes, RefusesNamingTextAndUnits) {
  for (const char* bad :
       {"", "  ", "GiB", "-1", "-1GiB", "1.5.2GiB", "20G", "3 bytes", "inf", "nan", "1e3", "0x10",
        "9223372036854775808", "99999999TiB", "1GiB2", ".5GiB"}) {
    try {
      parse_bytes(bad);
      ADD_FAILURE() << "read \"" << bad << '"';
    } catch (const Error& error) {
      const std::string what = error.what();
      EXPECT_NE(what.find("[memory] "), std::string::npos) << what;
      EXPECT_NE(what.find('"' + std::string(bad) + '"'), std::string::npos) << what;
      EXPECT_NE(what.find("MiB"), std::string::npos) << what;
    }
  }
}

TEST(FormatBytes, ReadsWell) {
  EXPECT_EQ(format_bytes(0), "0 B");
  EXPECT_EQ(format_bytes(1023), "1023 B");
  EXPECT_EQ(format_bytes(1024), "1.00 KiB");
  EXPECT_EQ(format_bytes(1048575), "1.00 MiB");
  EXPECT_EQ(format_bytes(1610612736), "1.50 GiB");
  EXPECT_EQ(format_bytes(-1610612736), "-1.50 GiB");
  EXPECT_EQ(format_bytes(std::int64_t{5000} << 40), "5000.00 TiB");
}

TEST(Accounts, HaveDistinctNames) {
  std::set<std::string> names;
  for (int i = 0; i < kAccounts; ++i) names.insert(name_of(static_cast<Account>(i)));
  EXPECT_EQ(names.size(), static_cast<std::size_t>(kAccounts));
  EXPECT_STREQ(name_of(Account::activations), "activations");
}

}  // namespace
}  // namespace poise::memory

// Numbers of bytes as text.
#include <gtest/gtest.h>

#include "poise/config.h"

namespace poise::config {
namespace {

TEST(Bytes, ReadsUnits) {
  const std::pair<const char*, std::int64_t> cases[] = {
      {"0", 0},
      {"1048576", 1048576},
      {"7B", 7},
      {"20GiB", 20LL * 1024 * 1024 * 1024},
      {" 512 MiB ", 512LL * 1024 * 1024},
      {"1.5GB", 1500000000},
      {"1.5kib", 1536},
      {"0.3B", 0},
      {"2TiB", 2199023255552LL},
      {"3TB", 3000000000000LL},
      {"8388607TiB", 8388607LL << 40},
      {"9007199254740993", 9007199254740993},  // 2^53 + 1
      {"9223372036854775807", 9223372036854775807},
  };
  for (const auto& [text, expected] : cases) {
    std::int64_t bytes = -1;
    EXPECT_TRUE(read_bytes(text, bytes)) << text;
    EXPECT_EQ(bytes, expected) << text;
  }
}

TEST(Bytes, RefusesTheRest) {
  for (const char* text :
       {"", "GiB", "-1", "-1GiB", "+1", "1e3", "nan", "inf", "20 Gi", "20GiBs", "20G iB", "1,5GB",
        "0x10", "  ", "8388608TiB", "1\n", "9223372036854775808", ".5GiB"}) {
    std::int64_t bytes = 77;
    EXPECT_FALSE(read_bytes(text, bytes)) << '"' << text << '"';
    EXPECT_EQ(bytes, 77) << text;
  }
}

}  // namespace
}  // namespace poise::config

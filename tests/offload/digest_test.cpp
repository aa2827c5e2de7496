// The checksum against published values of xxHash.
#include "offload/digest.h"

#include <gtest/gtest.h>

#include <random>

namespace poise::offload {
namespace {

TEST(Digest, HasTheValuesOfXxh64) {
  EXPECT_EQ(hex(digest_of("")), "ef46db3751d8e999");
  EXPECT_EQ(hex(digest_of("a")), "d24ec4f1a98c6e5b");
  EXPECT_EQ(hex(digest_of("abc")), "44bc2cf5ad770999");
  EXPECT_EQ(hex(digest_of("xxhash")), "32dd38952c4bc720");
  EXPECT_EQ(hex(digest_of("Nobody inspects the spammish repetition")), "fbcea83c8a378bf1");
}

TEST(Digest, DoesNotDependOnPieces) {
  std::mt19937 random(1);
  std::string bytes(1000, '\0');
  for (auto& byte : bytes) byte = static_cast<char>(random());
  for (int round = 0; round < 50; ++round) {
    Digest digest;
    for (std::size_t at = 0; at < bytes.size();) {
      const auto size = std::min<std::size_t>(random() % 70, bytes.size() - at);
      digest.update(bytes.data() + at, size);
      at += size;
    }
    EXPECT_EQ(digest.value(), digest_of(bytes));
  }
}

TEST(Digest, ChangesWithEveryBit) {
  const std::string bytes(67, 'x');
  for (std::size_t bit = 0; bit < 8 * bytes.size(); ++bit) {
    auto other = bytes;
    other[bit / 8] = static_cast<char>(other[bit / 8] ^ (1 << bit % 8));
    EXPECT_NE(digest_of(other), digest_of(bytes));
  }
}

TEST(Digest, TellsPartsThatChangedPlaces) {
  std::mt19937 random(2);
  std::string bytes(4096, '\0');
  for (auto& byte : bytes) byte = static_cast<char>(random());
  for (const std::size_t size : {4, 8, 32, 1024}) {  // half a lane, a lane, a stripe, many of them
    const auto swapped = bytes.substr(size, size) + bytes.substr(0, size) + bytes.substr(2 * size);
    EXPECT_NE(digest_of(swapped), digest_of(bytes)) << size;
  }
}

}  // namespace
}  // namespace poise::offload

// Permutation and Sampler: bijective, uniform, frozen; every sample once whatever the ranks and
// cursor.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <set>

#include "poise/data.h"
#include "support/temp_folder.h"

namespace poise::data {
namespace {

using testing::message_of;

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Indices = std::vector<std::int64_t>;

Indices all_of(std::int64_t n, std::uint64_t seed, std::uint64_t epoch) {
  const Permutation order(n, seed, epoch);
  Indices result;
  for (std::int64_t i = 0; i < n; ++i) result.push_back(order(i));
  return result;
}

Indices counting(std::int64_t n) {
  Indices result(static_cast<std::size_t>(n));
  std::iota(result.begin(), result.end(), 0);
  return result;
}

TEST(Permutation, IsABijectionForEverySize) {
  Indices sizes = counting(70);
  for (const std::int64_t n : {127, 128, 129, 1000, 4096, 10007}) sizes.push_back(n);
  for (const std::int64_t n : sizes) {
    for (const std::uint64_t seed : {std::uint64_t{0}, std::uint64_t{42}, ~std::uint64_t{0}}) {
      Indices seen = all_of(n, seed, 3);
      std::sort(seen.begin(), seen.end());
      ASSERT_EQ(seen, counting(n)) << "n " << n << " seed " << seed;
    }
  }
}

// From an implementation in another language written from the paper; python/tests/test_data.py
// holds it.
TEST(Permutation, ValuesAreFrozen) {
  EXPECT_THAT(all_of(10, 0, 0), ElementsAre(8, 9, 2, 7, 0, 6, 4, 3, 5, 1));
  EXPECT_THAT(all_of(10, 42, 0), ElementsAre(8, 3, 1, 5, 7, 4, 9, 0, 2, 6));
  EXPECT_THAT(all_of(10, 42, 1), ElementsAre(7, 9, 4, 5, 1, 0, 8, 3, 2, 6));
  EXPECT_THAT(all_of(7, 123456789, 3), ElementsAre(5, 1, 6, 2, 4, 3, 0));
  const Permutation million(1000003, 42, 7);
  EXPECT_EQ(million(0), 539441);
  EXPECT_EQ(million(1000002), 619395);
}

TEST(Permutation, ReachesTheLargestSizes) {
  const std::int64_t most = std::int64_t{1} << 62;
  const Permutation power(most, 42, 0);
  EXPECT_EQ(power(0), 688426637336758230);
  EXPECT_EQ(power(most - 1), 645480330638310069);
  const Permutation odd(most - 57, ~std::uint64_t{0}, 9);
  EXPECT_EQ(odd(1), 3231130961246134515);
  EXPECT_EQ(odd(most - 58), 3322109562414318437);
  EXPECT_THAT(message_of([&] { Permutation(most + 1, 0, 0); }), HasSubstr("[data]"));
  EXPECT_THAT(message_of([&] { Permutation(-1, 0, 0); }), HasSubstr("-1"));
  EXPECT_THAT(message_of([&] { power(most); }), HasSubstr("position"));
  EXPECT_THAT(message_of([&] { Permutation(0, 0, 0)(0); }), HasSubstr("[data]"));
}

// Chi-square over all 24 orders of 4 elements: 23 degrees of freedom, 49.7 is the 0.1 % point.
TEST(Permutation, EveryOrderOfFourIsEquallyLikely) {
  std::map<Indices, int> seen;
  constexpr int kDraws = 12000;
  for (int draw = 0; draw < kDraws; ++draw) ++seen[all_of(4, draw / 100, draw % 100)];
  EXPECT_EQ(seen.size(), 24u);
  double chi_square = 0;
  for (const auto& [order, count] : seen) {
    chi_square += (count - kDraws / 24.0) * (count - kDraws / 24.0) / (kDraws / 24.0);
  }
  EXPECT_LT(chi_square, 49.7);
}

// Where element i goes is uniform over 16 bins (15 degrees of freedom, 0.1 % point 37.7), and
// neighbours do not stay together.
TEST(Permutation, PositionsAreUniformAndNeighboursPart) {
  constexpr std::int64_t kSize = 1000;
  for (const std::int64_t position : {0, 1, 499, 999}) {
    std::vector<int> bins(16);
    for (int epoch = 0; epoch < 4000; ++epoch)
      ++bins[Permutation(kSize, 1, epoch)(position) * 16 / kSize];
    double chi_square = 0;
    for (const int count : bins) chi_square += (count - 250.0) * (count - 250.0) / 250.0;
    EXPECT_LT(chi_square, 37.7) << "position " << position;
  }
  int together = 0;
  for (std::uint64_t epoch = 0; epoch < 100; ++epoch) {
    const Indices order = all_of(kSize, 7, epoch);
    for (std::size_t i = 1; i < order.size(); ++i) together += order[i] == order[i - 1] + 1;
  }
  EXPECT_NEAR(together, 100, 50);  // one per order expected, standard deviation 10
}

SamplerOptions with(std::int64_t ranks, std::int64_t rank, Tail tail = Tail::short_window) {
  return {.seed = 5, .order = Order::shuffled, .tail = tail, .ranks = ranks, .rank = rank};
}

TEST(Sampler, EveryEpochHoldsEverySampleOnceAndEndsInAShortWindow) {
  for (const std::int64_t n : {1, 2, 5, 17, 64}) {
    const Sampler sampler(n, with(1, 0));
    std::set<Indices> orders;
    std::int64_t cursor = 0;
    for (int epoch = 0; epoch < 3; ++epoch) {
      Indices seen;
      while (cursor < (epoch + 1) * n) {
        const Indices window = sampler.indices(cursor, 6);
        EXPECT_EQ(window.size(), std::min<std::size_t>(6, n - seen.size()));
        seen.insert(seen.end(), window.begin(), window.end());
        cursor = sampler.advance(cursor, 6);
      }
      EXPECT_EQ(cursor, (epoch + 1) * n);
      orders.insert(seen);
      std::sort(seen.begin(), seen.end());
      EXPECT_EQ(seen, counting(n));
    }
    if (n >= 17) {
      EXPECT_EQ(orders.size(), 3u) << "epochs must differ in order";
    }
  }
}

TEST(Sampler, RanksTakeContiguousBlocksOfTheSameWindow) {
  const Sampler whole(23, with(1, 0));
  for (const std::int64_t ranks : {1, 2, 3, 8}) {
    for (std::int64_t cursor = 0; cursor < 46; cursor = whole.advance(cursor, 8)) {
      Indices joined;
      for (std::int64_t rank = 0; rank < ranks; ++rank) {
        const Sampler mine(23, with(ranks, rank));
        const Indices block = mine.indices(cursor, 8);
        if (8 % ranks == 0 && cursor % 23 + 8 <= 23) {
          EXPECT_EQ(block.size(), 8u / ranks);
        }
        joined.insert(joined.end(), block.begin(), block.end());
        EXPECT_EQ(mine.advance(cursor, 8), whole.advance(cursor, 8));
      }
      EXPECT_EQ(joined, whole.indices(cursor, 8)) << ranks << " ranks at " << cursor;
    }
  }
}

TEST(Sampler, RunsOnIntoTheNextEpochWhereAsked) {
  const Sampler sampler(5, with(1, 0, Tail::next_epoch));
  Indices expected = all_of(5, 5, 0);
  for (const std::uint64_t epoch : {1, 2}) {
    for (const std::int64_t i : all_of(5, 5, epoch)) expected.push_back(i);
  }
  EXPECT_EQ(sampler.indices(0, 15), expected);
  EXPECT_EQ(sampler.indices(3, 4), Indices(expected.begin() + 3, expected.begin() + 7));
  EXPECT_EQ(sampler.advance(3, 4), 7);
}

TEST(Sampler, ResumesAnywhereFromTheCursorAlone) {
  const Sampler unbroken(1000, with(1, 0));
  std::int64_t cursor = 0;
  for (int update = 0; update < 100; ++update) {
    const Sampler resumed(1000, with(1, 0));
    EXPECT_EQ(resumed.indices(cursor, 96), unbroken.indices(cursor, 96));
    cursor = unbroken.advance(cursor, 96);
  }
  // Far into a run over data that could never be walked: an answer at once.
  const Sampler huge(std::int64_t{1} << 55, with(1, 0));
  EXPECT_EQ(huge.indices((std::int64_t{1} << 60) + 12345, 512).size(), 512u);
}

TEST(Sampler, SequentialKeepsTheOrderAndSeedsDiffer) {
  EXPECT_THAT(Sampler(4, {.order = Order::sequential, .tail = Tail::next_epoch}).indices(2, 4),
              ElementsAre(2, 3, 0, 1));
  EXPECT_NE(Sampler(50, {.seed = 1}).indices(0, 50), Sampler(50, {.seed = 2}).indices(0, 50));
}

TEST(Sampler, BadInputIsNamed) {
  EXPECT_THAT(message_of([] { Sampler(0); }), HasSubstr("no samples: size is 0"));
  EXPECT_THAT(message_of([] { Sampler(5, with(2, 2)); }), HasSubstr("rank 2 of 2"));
  const Sampler sampler(5);
  EXPECT_THAT(message_of([&] { sampler.indices(-1, 2); }), HasSubstr("cursor is -1"));
  EXPECT_THAT(message_of([&] { sampler.indices(0, 0); }), HasSubstr("0 samples"));
  EXPECT_THAT(message_of([&] { sampler.advance(INT64_MAX - 1, 2); }), HasSubstr("2^63"));
}

}  // namespace
}  // namespace poise::data

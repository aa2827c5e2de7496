// Groups without peers.
#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "comm/rank_values.h"
#include "poise/comm.h"
#include "poise/error.h"

namespace poise::comm {
namespace {

TEST(OneRank, IsOverWhenTheCallReturns) {
  const auto group = one_rank();
  EXPECT_EQ(group->rank(), 0);
  EXPECT_EQ(group->size(), 1);
  EXPECT_EQ(group->backend(), "one rank");
  const auto whole = flat_of(values_of(0, 9), at::kBFloat16);
  auto sum = at::full({9}, 99, at::kFloat);
  EXPECT_TRUE(group->reduce_scatter(sum, whole, "x").done());
  EXPECT_TRUE(same_bits(sum, whole.to(at::kFloat)));
  auto copy = at::full({9}, 99, at::kBFloat16);
  EXPECT_TRUE(group->all_gather(copy, whole, "x").done());
  EXPECT_TRUE(same_bits(copy, whole));
  EXPECT_EQ(group->all_gather_text("alone", "x"), std::vector<std::string>{"alone"});
  EXPECT_NO_THROW(group->barrier("x"));
}

TEST(OneRank, FailsOnceAborted) {
  const auto group = one_rank();
  group->abort("enough");
  EXPECT_THROW(group->barrier("x"), Error);
}

TEST(Fake, CopiesItsOwnPieceAndCounts) {
  const int size = 1024, rank = 1023;
  const auto group = fake(rank, size);
  EXPECT_EQ(group->size(), size);
  EXPECT_EQ(group->backend(), "fake");
  auto whole = at::full({size * 3}, 0, at::kFloat);
  group->all_gather(whole, at::full({3}, 7, at::kFloat), "x").wait();
  EXPECT_TRUE(same_bits(whole, at::full({size * 3}, 7, at::kFloat)));
  auto mine = at::full({3}, 0, at::kFloat);
  group->reduce_scatter(mine, at::arange(size * 3, at::kFloat), "x").wait();
  EXPECT_TRUE(same_bits(mine, at::arange(rank * 3, size * 3, at::kFloat)));
  EXPECT_EQ(group->traffic().bytes[static_cast<std::size_t>(Kind::all_gather)], (size - 1) * 12);
}

TEST(Fake, RefusesARankOutsideTheGroup) {
  EXPECT_THROW(fake(4, 4), Error);
  EXPECT_THROW(fake(-1, 4), Error);
  EXPECT_THROW(fake(0, 0), Error);
}

template <class Use>
std::string error_of(Use use) {
  try {
    use();
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

TEST(Checks, NameWhatTheyGot) {
  using ::testing::HasSubstr;
  const auto group = fake(1, 4);
  const auto floats = [](std::int64_t numel) { return at::full({numel}, 0, at::kFloat); };
  const auto halves = at::full({8}, 0, at::kHalf);
  const auto whole = floats(8);
  EXPECT_THAT(error_of([&] { group->all_gather(whole, floats(3), "blocks.0"); }),
              HasSubstr("all_gather of 'blocks.0': the whole has 8 elements, a piece 3, the group "
                        "4 ranks"));
  EXPECT_THAT(error_of([&] { group->all_gather(whole, halves.narrow(0, 0, 2), "x"); }),
              HasSubstr("the whole is Float, the piece Half"));
  EXPECT_THAT(error_of([&] { group->all_gather(whole, whole.narrow(0, 4, 2), "x"); }),
              HasSubstr("is not piece 1 of it"));
  EXPECT_THAT(error_of([&] { group->all_gather(whole, whole.narrow(0, 1, 2), "x"); }),
              HasSubstr("is not piece 1 of it"));
  EXPECT_THAT(error_of([&] {
                group->all_gather(whole.view({2, 4}), floats(2), "x");
              }),
              HasSubstr("1-D, got sizes [2, 4]"));
  EXPECT_THAT(error_of([&] { group->reduce_scatter(halves.narrow(0, 0, 2), halves, "x"); }),
              HasSubstr("the sum is float32, got Half"));
  EXPECT_THAT(error_of([&] { group->reduce_scatter(floats(2), whole.to(at::kDouble), "x"); }),
              HasSubstr("cannot sum Double"));
  EXPECT_THAT(error_of([&] { group->all_reduce(halves, "x"); }), HasSubstr("cannot sum Half"));
  EXPECT_THAT(error_of([&] { group->all_to_all(floats(8), floats(4), "x"); }),
              HasSubstr("receives 8 of Float, sends 4 of Float"));
  EXPECT_THAT(error_of([&] { group->all_to_all(floats(6), floats(6), "x"); }),
              HasSubstr("6 elements are not 4 equal pieces"));
  EXPECT_THAT(error_of([&] { group->all_to_all(whole, whole, "x"); }),
              HasSubstr("into the memory it sends"));
  EXPECT_THAT(error_of([&] { group->broadcast(whole, 4, "x"); }), HasSubstr("from rank 4"));
  EXPECT_THAT(error_of([&] { group->all_reduce(at::Tensor(), "x"); }), HasSubstr("no tensor"));
}

}  // namespace
}  // namespace poise::comm

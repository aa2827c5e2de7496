// Every collective among threads against a plain loop of the test, for 1 to 4 ranks, odd sizes, and
// tensors that share memory.
#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>
#include <gtest/gtest.h>

#include <cmath>

#include "comm/chain.h"
#include "comm/rank_values.h"
#include "poise/comm.h"
#include "poise/error.h"
#include "poise/stream.h"
#include "support/ranks.h"

namespace poise::comm {
namespace {

using testing::on_ranks;

constexpr std::int64_t kSizes[] = {0, 1, 7, 4096, 8195};

class Collectives : public ::testing::TestWithParam<int> {
 protected:
  const int size = GetParam();

  at::Tensor gathered(std::int64_t numel, at::ScalarType type, unsigned salt = 0) const {
    std::vector<at::Tensor> pieces;
    for (int rank = 0; rank < size; ++rank) {
      pieces.push_back(flat_of(values_of(rank, numel, salt), type));
    }
    return at::cat(pieces);
  }
};

INSTANTIATE_TEST_SUITE_P(Ranks, Collectives, ::testing::Values(1, 2, 3, 4));

TEST_P(Collectives, AllGatherOfAnyDtype) {
  for (const auto type :
       {at::kFloat, at::kBFloat16, at::kHalf, at::kDouble, at::kLong, at::kInt, at::kByte}) {
    for (const std::int64_t numel : kSizes) {
      const auto want = gathered(numel, type);
      on_ranks(size, [&](Group& group) {
        auto whole = at::full({size * numel}, 99, type);
        group.all_gather(whole, flat_of(values_of(group.rank(), numel), type), "x").wait();
        EXPECT_TRUE(same_bits(whole, want)) << type << ' ' << numel;
      });
    }
  }
}

TEST_P(Collectives, AllGatherOfAPieceInPlace) {
  const std::int64_t numel = 37;
  on_ranks(size, [&](Group& group) {
    auto whole = at::full({size * numel}, 99, at::kFloat);
    auto mine = whole.narrow(0, group.rank() * numel, numel);
    mine.copy_(flat_of(values_of(group.rank(), numel)));
    const auto version = whole._version();
    group.all_gather(whole, mine, "x").wait();
    EXPECT_TRUE(same_bits(whole, gathered(numel, at::kFloat)));
    EXPECT_EQ(whole._version(), version);  // what poise writes is no edit
  });
}

TEST_P(Collectives, ReduceScatterSumsInRankOrder) {
  for (const auto type : {at::kFloat, at::kBFloat16, at::kHalf}) {
    for (const std::int64_t numel : kSizes) {
      const auto want = sum_in_order(size, size * numel, type);
      on_ranks(size, [&](Group& group) {
        const auto whole = flat_of(values_of(group.rank(), size * numel), type);
        auto mine = at::full({numel}, 99, at::kFloat);
        group.reduce_scatter(mine, whole, "x").wait();
        EXPECT_TRUE(same_bits(mine, want.narrow(0, group.rank() * numel, numel))) << type;
      });
    }
  }
}

TEST_P(Collectives, ReduceScatterIntoItsOwnPiece) {
  const std::int64_t numel = 8195;
  const auto want = sum_in_order(size, size * numel, at::kFloat);
  on_ranks(size, [&](Group& group) {
    const auto whole = flat_of(values_of(group.rank(), size * numel));
    const auto mine = whole.narrow(0, group.rank() * numel, numel);
    group.reduce_scatter(mine, whole, "x").wait();
    EXPECT_TRUE(same_bits(mine, want.narrow(0, group.rank() * numel, numel)));
  });
}

TEST(Reference, OrderShowsInItsBits) {
  // Else the tests above could not tell one order from another.
  const std::int64_t numel = 1000;
  auto backwards = at::empty({numel}, at::kFloat);
  auto* out = backwards.mutable_data_ptr<float>();
  for (int rank = 2; rank >= 0; --rank) {
    const auto values = values_of(rank, numel);
    for (std::int64_t i = 0; i < numel; ++i) {
      const float value = values[static_cast<std::size_t>(i)];
      out[i] = rank == 2 ? value : out[i] + value;
    }
  }
  EXPECT_FALSE(same_bits(backwards, sum_in_order(3, numel, at::kFloat)));
}

TEST_P(Collectives, AllReduceOfFloats) {
  for (const std::int64_t numel : kSizes) {
    const auto want = sum_in_order(size, numel, at::kFloat);
    on_ranks(size, [&](Group& group) {
      const auto values = flat_of(values_of(group.rank(), numel));
      group.all_reduce(values, "x").wait();
      EXPECT_TRUE(same_bits(values, want)) << numel;
    });
  }
}

TEST_P(Collectives, AllReduceOfDoubles) {
  const std::int64_t numel = 13;
  std::vector<double> sum(numel, 0);
  for (int rank = 0; rank < size; ++rank) {
    const auto values = values_of(rank, numel);
    for (std::size_t i = 0; i < sum.size(); ++i) {
      const double value = std::exp(double{values[i]} / 4096);
      sum[i] = rank == 0 ? value : sum[i] + value;
    }
  }
  on_ranks(size, [&](Group& group) {
    auto values = at::empty({numel}, at::kDouble);
    const auto own = values_of(group.rank(), numel);
    for (std::size_t i = 0; i < own.size(); ++i) {
      values.mutable_data_ptr<double>()[i] = std::exp(double{own[i]} / 4096);
    }
    group.all_reduce(values, "x").wait();
    for (std::size_t i = 0; i < sum.size(); ++i) {
      EXPECT_EQ(values.const_data_ptr<double>()[i], sum[i]);
    }
  });
}

TEST_P(Collectives, AllToAllTransposesPieces) {
  const std::int64_t numel = 5;
  on_ranks(size, [&](Group& group) {
    const auto sent = flat_of(values_of(group.rank(), size * numel), at::kHalf);
    auto received = at::full({size * numel}, 99, at::kHalf);
    group.all_to_all(received, sent, "x").wait();
    for (int rank = 0; rank < size; ++rank) {
      const auto theirs = flat_of(values_of(rank, size * numel), at::kHalf);
      EXPECT_TRUE(same_bits(received.narrow(0, rank * numel, numel),
                            theirs.narrow(0, group.rank() * numel, numel)));
    }
  });
}

TEST_P(Collectives, BroadcastFromEveryRoot) {
  for (int root = 0; root < size; ++root) {
    on_ranks(size, [&](Group& group) {
      const auto values = flat_of(values_of(group.rank(), 17), at::kBFloat16);
      group.broadcast(values, root, "x").wait();
      EXPECT_TRUE(same_bits(values, flat_of(values_of(root, 17), at::kBFloat16)));
    });
  }
}

TEST_P(Collectives, TextsOfEveryRank) {
  on_ranks(size, [&](Group& group) {
    // Of different lengths, one of them empty, with bytes that end C strings.
    const auto text_of = [](int rank) {
      return std::string(static_cast<std::size_t>(3 * rank), 'a') +
             (rank == 1 ? std::string("\0b", 2) : "");
    };
    std::vector<std::string> want;
    for (int rank = 0; rank < size; ++rank) want.push_back(text_of(rank));
    EXPECT_EQ(group.all_gather_text(text_of(group.rank()), "names"), want);
  });
}

TEST_P(Collectives, RandomDelaysChangeNoBit) {
  const std::int64_t numel = 11;
  std::vector<at::Tensor> plain(static_cast<std::size_t>(size));
  on_ranks(size, [&](Group& group) {
    plain[static_cast<std::size_t>(group.rank())] = chain(group, numel);
  });
  for (const std::uint64_t seed : {1u, 2u, 3u}) {
    Stream::set_test_delay(seed, 300);
    on_ranks(size, [&](Group& group) {
      const auto& want = plain[static_cast<std::size_t>(group.rank())];
      EXPECT_TRUE(same_bits(chain(group, numel), want)) << "seed " << seed;
    });
    Stream::set_test_delay(0, 0);
  }
}

TEST_P(Collectives, TrafficIsThatOfTheFormulas) {
  on_ranks(size, [&](Group& group) {
    const std::int64_t n = 6, whole_bytes = size * n * 2;
    auto whole = at::full({size * n}, 1, at::kBFloat16);
    auto other = at::full({size * n}, 1, at::kBFloat16);
    auto sum = at::full({n}, 0, at::kFloat);
    group.all_gather(whole, whole.narrow(0, group.rank() * n, n), "x").wait();
    group.all_gather(whole, whole.narrow(0, group.rank() * n, n), "x").wait();
    group.reduce_scatter(sum, whole, "x").wait();
    group.all_reduce(sum, "x").wait();
    group.all_to_all(other, whole, "x").wait();
    group.broadcast(sum, 0, "x").wait();
    group.barrier("x");
    const Traffic traffic = group.traffic();
    const auto calls = [&](Kind kind) { return traffic.calls[static_cast<std::size_t>(kind)]; };
    const auto bytes = [&](Kind kind) { return traffic.bytes[static_cast<std::size_t>(kind)]; };
    EXPECT_EQ(calls(Kind::all_gather), 2);
    EXPECT_EQ(bytes(Kind::all_gather), 2 * whole_bytes * (size - 1) / size);
    EXPECT_EQ(calls(Kind::reduce_scatter), 1);
    EXPECT_EQ(bytes(Kind::reduce_scatter), whole_bytes * (size - 1) / size);
    EXPECT_EQ(bytes(Kind::all_reduce), 2 * n * 4 * (size - 1) / size);
    EXPECT_EQ(bytes(Kind::all_to_all), whole_bytes * (size - 1) / size);
    EXPECT_EQ(bytes(Kind::broadcast), size > 1 && group.rank() == 0 ? n * 4 : 0);
    EXPECT_EQ(calls(Kind::barrier), 1);
    group.reset_traffic();
    EXPECT_EQ(group.traffic().calls, Traffic{}.calls);
    EXPECT_EQ(group.traffic().bytes, Traffic{}.bytes);
  });
}

TEST_P(Collectives, NotesAreSeenByAllRanks) {
  on_ranks(size, [&](Group& group) {
    EXPECT_EQ(group.note("nobody's"), std::nullopt);
    group.leave_note(join("from ", group.rank()), join("text of ", group.rank()));
    group.barrier("all have left one");
    for (int rank = 0; rank < size; ++rank) {
      EXPECT_EQ(group.note(join("from ", rank)), join("text of ", rank));
    }
    group.barrier("all have read");
    group.leave_note("shared", "the same");
    EXPECT_EQ(group.note("shared"), "the same");
  });
}

}  // namespace
}  // namespace poise::comm

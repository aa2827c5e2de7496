// What goes wrong between ranks: it is named, everybody hears of it, and nobody waits for ever.
#include <ATen/ops/full.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <cmath>
#include <cstdio>
#include <future>

#include "comm/rank_values.h"
#include "poise/comm.h"
#include "poise/error.h"
#include "poise/memory.h"
#include "support/ranks.h"

namespace poise::comm {
namespace {

using namespace std::chrono_literals;
using ::testing::AllOf;
using testing::errors_on_ranks;
using ::testing::HasSubstr;
using testing::on_ranks;

at::Tensor floats(std::int64_t numel) { return at::full({numel}, 1, at::kFloat); }

class Seconds {
 public:
  double passed() const {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
  }

 private:
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

TEST(Failure, AnotherOrderIsNamedOnAllRanks) {
  const auto errors = errors_on_ranks(3, [](Group& group) {
    group.barrier("start");
    if (group.rank() == 2) {
      group.reduce_scatter(floats(4), floats(12), "blocks.1").wait();
    } else {
      group.all_gather(floats(12), floats(4), "blocks.0").wait();
    }
  });
  for (const auto& error : errors) {
    EXPECT_THAT(error, AllOf(HasSubstr("rank 0 is in collective 1, all_gather of 'blocks.0' (48 "
                                       "bytes of Float)"),
                             HasSubstr("rank 2 is in collective 1, reduce_scatter of 'blocks.1'")));
  }
}

TEST(Failure, AnotherSizeDtypeOrRootIsNamed) {
  const auto sizes = errors_on_ranks(
      2, [](Group& group) { group.all_reduce(floats(3 + group.rank()), "norm").wait(); });
  EXPECT_THAT(sizes[1], AllOf(HasSubstr("(12 bytes of Float)"), HasSubstr("(16 bytes of Float)")));
  const auto types = errors_on_ranks(2, [](Group& group) {
    const auto type = group.rank() == 0 ? at::kHalf : at::kBFloat16;
    group.broadcast(at::full({2}, 1, type), 0, "flat").wait();
  });
  EXPECT_THAT(types[0], AllOf(HasSubstr("of Half"), HasSubstr("of BFloat16")));
  const auto roots = errors_on_ranks(
      2, [](Group& group) { group.broadcast(floats(2), group.rank(), "flat").wait(); });
  EXPECT_THAT(roots[0], AllOf(HasSubstr("from rank 0"), HasSubstr("from rank 1")));
}

TEST(Failure, ACollectiveThatAllHaveMadeIsOverWhateverComesAfterwards) {
  for (int i = 0; i < 300; ++i) {
    const auto errors = errors_on_ranks(3, [](Group& group) {
      group.all_gather(floats(12), floats(4), "last").wait();
      group.abort("no more");
    });
    for (const auto& error : errors) ASSERT_EQ(error, "") << i;
  }
}

TEST(Failure, AnExceptionOnOneRankReachesTheOthersAtOnce) {
  const Seconds seconds;
  const auto errors = errors_on_ranks(4, [](Group& group) {
    for (int i = 0; i < 10; ++i) {
      if (i == 5 && group.rank() == 1) throw std::runtime_error("no such token: 777");
      group.all_reduce(floats(100), "norm").wait();
    }
  });
  for (const int rank : {0, 2, 3}) {
    EXPECT_THAT(errors[static_cast<std::size_t>(rank)],
                HasSubstr("rank 1 ended the group: no such token: 777"));
  }
  EXPECT_LT(seconds.passed(), 5);
}

TEST(Failure, OfTheGroupEndsAllThatComesLater) {
  auto groups = threads(2);
  groups[1]->abort("first");
  groups[0]->abort("second");
  const Seconds seconds;
  for (auto& group : groups) {
    for (int i = 0; i < 3; ++i) {
      try {
        group->all_reduce(floats(2), "x").wait();
        ADD_FAILURE() << "did not throw";
      } catch (const Error& error) {
        EXPECT_THAT(error.what(), HasSubstr("rank 1 ended the group: first"));
      }
    }
    EXPECT_THROW(group->barrier("x"), Error);
    EXPECT_THROW(group->all_gather_text("x", "x"), Error);
  }
  EXPECT_LT(seconds.passed(), 5);
}

TEST(Failure, AnAbortEndsWhatIsInFlight) {
  auto groups = threads(2);
  const Event pending = groups[0]->all_reduce(floats(2), "x");
  EXPECT_FALSE(pending.wait_for(20ms));
  groups[0]->abort("interrupted");
  EXPECT_TRUE(pending.done());
  EXPECT_THROW(pending.wait(), Error);
}

TEST(Failure, ATimeoutNamesWhoIsMissing) {
  std::promise<void> over;
  const auto errors = errors_on_ranks(
      3,
      [&](Group& group) {
        group.barrier("start");
        if (group.rank() == 1) {
          over.get_future().wait();  // slow, not gone
          return;
        }
        try {
          group.all_reduce(floats(2), "norm").wait();
        } catch (...) {
          if (group.rank() == 0) over.set_value();
          throw;
        }
      },
      Options{.timeout = 200ms});
  for (const int rank : {0, 2}) {
    EXPECT_THAT(errors[static_cast<std::size_t>(rank)],
                AllOf(HasSubstr("waited 0.2 s in collective 1, all_reduce of 'norm'"),
                      HasSubstr("for rank 1 (last in collective 0, barrier of 'start')")));
  }
}

// The ranks of a part of a world are called by their numbers there.
TEST(Failure, OfAPartNamesRanksOfTheWorld) {
  const Options part{.timeout = 200ms, .names = {6, 9}};
  const auto differ = errors_on_ranks(
      2, [](Group& group) { group.broadcast(floats(2 + group.rank()), 1, "flat").wait(); }, part);
  EXPECT_THAT(differ[0], AllOf(HasSubstr("rank 6 is in collective 0, broadcast of 'flat' from rank "
                                         "9 (8 bytes"),
                               HasSubstr("rank 9 is in collective 0")));
  const auto ended = errors_on_ranks(
      2,
      [](Group& group) {
        if (group.rank() == 1) throw std::runtime_error("no such token: 777");
        group.barrier("end");
      },
      part);
  EXPECT_THAT(ended[0], HasSubstr("rank 9 ended the group: no such token"));
  const auto late = errors_on_ranks(
      2,
      [](Group& group) {
        if (group.rank() == 0) group.barrier("end");
        std::this_thread::sleep_for(1s);
      },
      part);
  EXPECT_THAT(late[0], AllOf(HasSubstr("rank 6 waited 0.2 s"), HasSubstr("for rank 9 (has")));
  const auto left = errors_on_ranks(
      2,
      [](Group& group) {
        if (group.rank() == 0) group.barrier("end");
      },
      Options{.names = {6, 9}});
  EXPECT_THAT(left[0], HasSubstr("rank 9 left the group while rank 6 was in"));
  EXPECT_THROW(threads(3, part), Error) << "two names for three ranks";
}

TEST(Failure, ARankThatLeftIsNamedLongBeforeTheTimeout) {
  const Seconds seconds;
  const auto errors = errors_on_ranks(2, [](Group& group) {
    group.barrier("start");
    if (group.rank() == 0) group.all_reduce(floats(2), "norm").wait();
  });
  EXPECT_THAT(errors[0], HasSubstr("rank 1 left the group while rank 0 was in collective 1"));
  EXPECT_LT(seconds.passed(), 5);
}

TEST(Failure, AHandleDroppedInFlightEndsTheGroup) {
  auto groups = threads(2);
  const Event pending = groups[0]->all_reduce(floats(2), "norm");
  groups[0].reset();  // waits a few seconds for its peer, then gives up
  try {
    pending.wait();
    ADD_FAILURE() << "did not throw";
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("dropped during collective 0, all_reduce of 'norm'"));
  }
  EXPECT_THROW(groups[1]->barrier("x"), Error);
}

int threads_of_process() {
  int count = 0;
  FILE* tasks = popen(join("ls /proc/", getpid(), "/task | wc -l").c_str(), "r");
  if (std::fscanf(tasks, "%d", &count) != 1) count = -1;
  pclose(tasks);
  return count;
}

TEST(Threads, LeaveNoThreadBehind) {
  on_ranks(2, [](Group& group) { group.barrier("warm"); });
  const int before = threads_of_process();
  on_ranks(4, [](Group& group) { group.all_reduce(floats(5), "x").wait(); });
  errors_on_ranks(4, [](Group& group) {
    if (group.rank() == 3) throw std::runtime_error("ends it");
    group.all_reduce(floats(5), "x").wait();
  });
  EXPECT_EQ(threads_of_process(), before);
}

TEST(Threads, AllocateNoTensorMemory) {
  memory::Ledger ledger;
  ledger.make_default();  // streams of the groups run without a scope of their own
  const std::int64_t numel = 100000;
  on_ranks(2, [&](Group& group) {
    auto whole = floats(2 * numel);
    auto mine = floats(numel);
    auto other = floats(2 * numel);
    group.reserve(static_cast<std::int64_t>(whole.nbytes()));
    group.barrier("made");
    if (group.rank() == 0) ledger.reset_peak();
    group.barrier("reset");
    const std::int64_t before = ledger.snapshot().current_bytes;
    for (int i = 0; i < 3; ++i) {
      group.all_gather(whole, mine, "x").wait();
      group.reduce_scatter(mine, whole, "x").wait();
      group.all_to_all(other, whole, "x").wait();
      group.all_reduce(mine, "x").wait();
      group.broadcast(mine, 1, "x").wait();
    }
    EXPECT_GT(before, 0);
    EXPECT_EQ(ledger.snapshot().peak_bytes, before);
    group.barrier("compared");
  });
}

}  // namespace
}  // namespace poise::comm

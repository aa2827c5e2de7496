// The log that ranks follow each other by.
#include "zero/following.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <chrono>
#include <thread>

#include "poise/error.h"
#include "support/ranks.h"

namespace poise::zero {
namespace {

using namespace std::chrono_literals;
using ::testing::HasSubstr;
using Looks = Following::Looks;
using Operation = Following::Operation;

std::vector<std::pair<int, int>> followed(Following& following) {
  std::vector<std::pair<int, int>> steps;
  while (const auto step = following.next()) {
    steps.emplace_back(static_cast<int>(step->operation), static_cast<int>(step->index));
    if (step->operation == Operation::end_window) break;
  }
  return steps;
}

std::pair<int, int> of(Operation operation, int index = 0) {
  return {static_cast<int>(operation), index};
}

// Where the host does not wait in poise's waits but in the user's code, as on a GPU.
TEST(Following, IsServedByAThreadWhileNobodyWaits) {
  testing::on_ranks(2, [](comm::Group& group) {
    Following following(group, "run", 30s, Looks::by_thread);
    for (int window = 0; window < 3; ++window) {
      following.begin_window();
      following.take(Operation::gather, window);
      if (group.rank() == 1) {
        following.lose("no room");
        EXPECT_THAT(followed(following),
                    ::testing::ElementsAre(of(Operation::join, 7), of(Operation::gather, 8),
                                           of(Operation::end_window)));
      } else {
        following.take(Operation::join, 7);
        following.take(Operation::gather, 8);
        std::this_thread::sleep_for(200ms);
        following.take(Operation::end_window);
      }
      group.barrier("end of the window");
      EXPECT_EQ(following.loss_of(1), "no room");
      EXPECT_EQ(following.loss_of(0), "");
      group.barrier("read");
      following.end_window();
      EXPECT_EQ(following.loss_of(1), "") << "of the window before";
      group.barrier("looked");  // before rank 1 runs out in the next one
    }
  });
}

TEST(Following, EndsWhereTheLongestLogEndsIfNobodyRuns) {
  testing::on_ranks(3, [](comm::Group& group) {
    Following following(group, "run", 30s, Looks::in_waits);
    following.begin_window();
    const int ran = std::array{0, 6, 3}[static_cast<std::size_t>(group.rank())];
    for (int step = 0; step < ran; ++step) following.take(Operation::join, step);
    if (group.rank() == 1) {
      following.follow();  // out of data
    } else {
      following.lose("no room");
    }
    const auto steps = followed(following);
    ASSERT_EQ(steps.size(), static_cast<std::size_t>(6 - ran));
    for (std::size_t i = 0; i < steps.size(); ++i) {
      EXPECT_EQ(steps[i], of(Operation::join, ran + static_cast<int>(i)));
    }
    group.barrier("end");
  });
}

TEST(Following, DoesNotWaitForEver) {
  testing::on_ranks(2, [](comm::Group& group) {
    Following following(group, "run", 100ms, Looks::in_waits);
    following.begin_window();
    if (group.rank() == 1) {
      following.lose("no room");
      try {
        following.next();
        ADD_FAILURE() << "no error";
      } catch (const Error& error) {
        EXPECT_THAT(error.what(), HasSubstr("rank 1 follows the others in step 0 of a window and "
                                            "heard of none for 0.1 s"));
      }
    }
    group.barrier("end");
  });
}

}  // namespace
}  // namespace poise::zero

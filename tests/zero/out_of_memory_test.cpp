// Memory that runs out on some ranks in the middle of a window: all drop the window, and run it
// again in halves; the training is that of a run that knew it before.
#include <ATen/ops/ones.h>
#include <c10/util/Exception.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "zero/mesh.h"
#include "zero/training.h"

namespace poise {
namespace {

using test::GridModel;
using ::testing::HasSubstr;

using Batches = std::vector<at::Tensor>;
constexpr std::int64_t kBallast =
    1 << 20;  // bytes of a micro-batch that are free once it is given up

Batches halves(const Batches& batches) {
  Batches pieces;
  for (const auto& batch : batches) {
    const auto rows = batch.size(0);
    pieces.push_back(batch.narrow(0, 0, rows / 2));
    pieces.push_back(batch.narrow(0, rows / 2, rows - rows / 2));
  }
  return pieces;
}

// What a rank finds in a micro-batch: so many bytes beyond those of its ballast; none: all it
// wants.
using Room = std::function<std::optional<std::int64_t>(int update, int rank, int micro_batch)>;

struct Trial {
  Config config;
  int ranks = 2;
  int updates = 8;
  std::vector<int> counts;  // micro-batches of each rank in an update
  Room room = [](int, int, int) { return std::nullopt; };
  bool in_blocks = false;    // two shard groups of two
  bool three_calls = false;  // forward, backward, step; equal counts
  // Updates whose window is run in halves at once; the others are only where memory runs out.
  std::function<bool(int)> halved = [](int) { return false; };
};

struct Ended {
  std::vector<test::Values> parameters;  // by rank
  std::vector<std::vector<double>> losses;
  std::vector<std::vector<bool>> failed;  // by rank, by update
  std::vector<std::string> messages;      // of each rank's last failure
};

// This rank's micro-batches of an update.
Batches window_of(const Trial& run, int update, int rank) {
  Batches mine;
  int number = 0;
  for (int r = 0; r < run.ranks; ++r) {
    for (int i = 0; i < run.counts[static_cast<std::size_t>(r)]; ++i, ++number) {
      const auto seed = static_cast<std::uint64_t>(1000 * update + number);
      if (r == rank) mine.push_back(test::make_tokens(4 + 2 * (number % 2), seed));
    }
  }
  return mine;
}

Loss loss_of(const GridModel& model, const at::Tensor& batch) {
  const auto ballast = at::ones({kBallast / 4});  // kept for backward
  const auto none = (model.unused.sum() * ballast).sum() * 0.0;
  return Loss::sum(model.loss_sum(batch) + none, test::counted(batch));
}

using LossOf = std::function<Loss(const at::Tensor&)>;

// The window in the form that the trial wants.
StepResult run_window(const Trial& run, Engine& engine, const Batches& window, const LossOf& loss) {
  if (!run.three_calls) return engine.step(window, loss);
  engine.set_accumulation(static_cast<std::int64_t>(window.size()));
  for (const auto& batch : window) {
    Loss value;
    {
      const auto scope = engine.forward_scope();
      try {
        value = loss(batch);
      } catch (const c10::OutOfMemoryError& error) {
        engine.lose_window(error.what_without_backtrace());
        throw;
      }
    }
    engine.backward(value);
  }
  return engine.step();
}

Ended train(const Trial& run) {
  Ended ended;
  const auto ranks = static_cast<std::size_t>(run.ranks);
  ended.parameters.resize(ranks);
  ended.losses.resize(ranks);
  ended.failed.resize(ranks);
  ended.messages.resize(ranks);
  test::Mesh mesh;
  testing::on_ranks(
      run.ranks,
      [&](std::shared_ptr<comm::Group> group) {
        at::set_num_threads(1);
        const auto rank = static_cast<std::size_t>(group->rank());
        GridModel model;
        const comm::Ranks world{group, {}, {}};
        Engine engine(model.view(), run.config, run.in_blocks ? mesh.of(group) : world);
        model.bind(engine);
        std::optional<std::int64_t> held;
        std::int64_t lost = 0;
        for (int update = 0; update < run.updates; ++update) {
          auto window = window_of(run, update, group->rank());
          if (run.halved(update)) window = halves(window);
          // Nothing is left of the window before, whatever became of it.
          const auto now = engine.ledger().snapshot().current_bytes;
          EXPECT_EQ(now, held.value_or(now)) << "before update " << update << " of rank " << rank;
          held = now;
          int micro_batch = 0;
          const auto full = [&](const at::Tensor& batch) {
            const auto room = run.room(update, group->rank(), micro_batch++);
            auto& ledger = const_cast<memory::Ledger&>(engine.ledger());
            if (room) ledger.set_budget(ledger.snapshot().current_bytes + kBallast + *room);
            return loss_of(model, batch);
          };
          StepResult result;
          bool failed = false;
          try {
            result = run_window(run, engine, window, full);
          } catch (const c10::OutOfMemoryError& error) {
            ended.messages[rank] = error.what_without_backtrace();
            failed = true;
          }
          const_cast<memory::Ledger&>(engine.ledger()).set_budget(0);
          if (failed) {
            EXPECT_EQ(engine.lost_windows(), ++lost);
            result = run_window(run, engine, halves(window),
                                [&](const at::Tensor& b) { return loss_of(model, b); });
          }
          EXPECT_EQ(result.status, Status::applied);
          EXPECT_EQ(result.updates, update + 1);
          ended.failed[rank].push_back(failed);
          ended.losses[rank].push_back(result.loss);
        }
        ended.parameters[rank] = test::values_of(engine, model);
      },
      {.timeout = std::chrono::seconds(30)});
  return ended;
}

Config config_of(int stage, config::Reduce reduce = config::Reduce::automatic) {
  Config config;
  config.optimizer = test::adamw();
  config.zero.stage = stage;
  config.zero.reduce = reduce;
  return config;
}

// Both runs, and how many windows had to be run again.
int expect_same_as_unbroken(Trial run) {
  const auto ended = train(run);
  for (std::size_t rank = 1; rank < ended.failed.size(); ++rank) {
    EXPECT_EQ(ended.failed[rank], ended.failed[0]) << "all ranks drop a window, or none";
  }
  auto unbroken = run;
  unbroken.room = [](int, int, int) { return std::nullopt; };
  const auto failed = ended.failed[0];
  unbroken.halved = [failed](int update) { return failed[static_cast<std::size_t>(update)]; };
  const auto expected = train(unbroken);
  for (std::size_t rank = 0; rank < ended.failed.size(); ++rank) {
    EXPECT_EQ(test::first_difference(ended.parameters[rank], expected.parameters[rank]), "");
    EXPECT_EQ(ended.losses[rank], expected.losses[rank]);
  }
  return static_cast<int>(std::count(failed.begin(), failed.end(), true));
}

struct Case {
  std::string name;
  int stage;
  config::Reduce reduce = config::Reduce::automatic;
};
class OutOfMemory : public ::testing::TestWithParam<Case> {
 protected:
  Config config() const { return config_of(GetParam().stage, GetParam().reduce); }
};
INSTANTIATE_TEST_SUITE_P(Stages, OutOfMemory,
                         ::testing::Values(Case{"stage0", 0}, Case{"stage1", 1}, Case{"stage2", 2},
                                           Case{"stage3", 3},
                                           Case{"stage3_last", 3, config::Reduce::last}),
                         [](const auto& info) { return info.param.name; });

// At every point of the micro-batch, from its first allocation to beyond its last.
TEST_P(OutOfMemory, OfOneRankAtAnyPoint) {
  Trial run{.config = config(), .ranks = 2, .updates = 18, .counts = {3, 3}};
  run.room = [](int update, int rank, int micro_batch) -> std::optional<std::int64_t> {
    if (rank != update % 2 || micro_batch != update % 3) return std::nullopt;
    return 700 * update;
  };
  const int failed = expect_same_as_unbroken(run);
  EXPECT_GE(failed, 12);
}

TEST_P(OutOfMemory, OfAllRanksAtDifferentPoints) {
  Trial run{.config = config(), .ranks = 3, .updates = 8, .counts = {2, 2, 2}};
  run.room = [](int update, int rank, int micro_batch) -> std::optional<std::int64_t> {
    if (micro_batch != (update / 2 + rank / 2) % 2) return std::nullopt;
    return 800 * ((3 * update + 5 * rank) % 8);
  };
  EXPECT_GE(expect_same_as_unbroken(run), 6);
}

// Ranks with less data follow already; the one that runs last runs out.
TEST_P(OutOfMemory, WithUnevenWindows) {
  Trial run{.config = config(), .ranks = 3, .updates = 9, .counts = {1, 3, 0}};
  run.room = [](int update, int rank, int micro_batch) -> std::optional<std::int64_t> {
    if (rank != (update % 3 == 0 ? 0 : 1) || micro_batch != (rank == 0 ? 0 : update % 3)) {
      return std::nullopt;
    }
    return 400 * update;
  };
  EXPECT_GE(expect_same_as_unbroken(run), 6);
}

TEST_P(OutOfMemory, SaysOnEveryRankWhichOneItWas) {
  Trial run{.config = config(), .ranks = 2, .updates = 1, .counts = {1, 1}};
  run.room = [](int, int rank, int) -> std::optional<std::int64_t> {
    return rank == 1 ? std::optional<std::int64_t>(0) : std::nullopt;
  };
  const auto ended = train(run);
  EXPECT_THAT(ended.messages[1], HasSubstr("[memory] CPU out of memory"));
  EXPECT_THAT(ended.messages[0], HasSubstr("rank 1 ran out of memory"));
  EXPECT_THAT(ended.messages[0], HasSubstr("[memory] CPU out of memory"));
}

// The weights' power of two is that of the micro-batch that was trained on, not of the one that
// failed.
TEST_P(OutOfMemory, InTheFirstWindowOfFp16) {
  for (const int failing : {0, 1}) {
    Trial run{.config = config(), .ranks = 2, .updates = 3, .counts = {2, 2}};
    run.config.precision.dtype = config::DType::fp16;
    run.config.precision.initial_loss_scale = 1024;
    run.room = [failing](int update, int rank, int) -> std::optional<std::int64_t> {
      if (update > 0 || rank != failing) return std::nullopt;
      return 0;
    };
    EXPECT_EQ(expect_same_as_unbroken(run), 1);
  }
}

// Of one rank, or of all of a shard group: the other group goes on without it.
TEST_P(OutOfMemory, InShardGroups) {
  Trial run{
      .config = config(), .ranks = 4, .updates = 6, .counts = {2, 2, 1, 2}, .in_blocks = true};
  run.room = [](int update, int rank, int micro_batch) -> std::optional<std::int64_t> {
    const bool fails = update < 4 ? rank == update : rank / 2 == update % 2;
    if (!fails || micro_batch != 0) return std::nullopt;
    return 600 * update;
  };
  EXPECT_GE(expect_same_as_unbroken(run), 4);
}

// In the three-call form the rank that runs out ends there, the others in their step.
TEST_P(OutOfMemory, InTheThreeCallForm) {
  Trial run{.config = config(), .ranks = 2, .updates = 18, .counts = {3, 3}, .three_calls = true};
  run.room = [](int update, int rank, int micro_batch) -> std::optional<std::int64_t> {
    if (rank != update % 2 || micro_batch != update % 3) return std::nullopt;
    return 700 * update;
  };
  EXPECT_GE(expect_same_as_unbroken(run), 12);
  run.room = [](int update, int rank, int micro_batch) -> std::optional<std::int64_t> {
    if (micro_batch != (update / 2 + rank) % 2) return std::nullopt;  // all ranks
    return 800 * ((3 * update + 5 * rank) % 8);
  };
  run.updates = 8;
  EXPECT_GE(expect_same_as_unbroken(run), 6);
}

// Where an update runs out of memory on one rank, all end with its message.
TEST(OutOfMemoryInTheUpdate, EndsAllRanksWithTheReason) {
  const auto begin = std::chrono::steady_clock::now();
  const auto errors =
      testing::errors_on_ranks(2,
                               [](std::shared_ptr<comm::Group> group) {
                                 at::set_num_threads(1);
                                 auto config = config_of(1);
                                 config.optimizer.type = "lamb";  // makes sums of its own
                                 GridModel model;
                                 Engine engine(model.view(), config, group);
                                 for (int update = 0; update < 3; ++update) {
                                   engine.backward(loss_of(model, test::make_tokens(2, 7)));
                                   engine.begin_update();
                                   auto& ledger = const_cast<memory::Ledger&>(engine.ledger());
                                   const bool full = update == 1 && group->rank() == 1;
                                   if (full) ledger.set_budget(ledger.snapshot().current_bytes + 8);
                                   try {
                                     engine.step();
                                   } catch (const c10::OutOfMemoryError&) {
                                     EXPECT_TRUE(full);
                                     throw;
                                   }
                                 }
                               },
                               {.timeout = std::chrono::seconds(30)});
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(15));
  for (const auto& error : errors) {
    EXPECT_THAT(error, HasSubstr("rank 1 ran out of memory in the optimizer's part of update 2"));
    EXPECT_THAT(error, HasSubstr("CPU out of memory"));
    EXPECT_THAT(error, HasSubstr("set offload.optimizer or a higher zero.stage"));
  }
}

// Kept for the window, sent in bf16, without overlap: other sequences of collectives.
TEST(OutOfMemorySettings, ChangeNothing) {
  for (const int variant : {0, 1, 2}) {
    auto config = config_of(3);
    if (variant == 0) config.zero.keep_gathered = config::KeepGathered::window;
    if (variant == 1) config.zero.gradient_dtype = config::DType::bf16;
    if (variant == 2) config.zero.overlap = false;
    Trial run{.config = config, .ranks = 2, .updates = 8, .counts = {2, 2}};
    run.room = [](int update, int rank, int micro_batch) -> std::optional<std::int64_t> {
      if (rank != 1 || micro_batch != update % 2) return std::nullopt;
      return 1200 * update;
    };
    EXPECT_GE(expect_same_as_unbroken(run), 4);
  }
}

}  // namespace
}  // namespace poise

// A loss that drops the window on some ranks, at different micro-batches: all ranks drop it,
// nothing has changed, and the training goes on as if the window had been run once.
#include <gtest/gtest.h>

#include "poise/interrupt.h"
#include "poise/window_dropped.h"
#include "support/temp_folder.h"
#include "zero/training.h"

namespace poise {
namespace {

// engine.step(window, loss) by the calls of a loop of one's own.
StepResult run_by_calls(Engine& engine, const test::GridModel& model,
                        const std::vector<at::Tensor>& window, std::optional<int> drops) {
  int micro_batch = 0;
  for (const auto& batch : window) {
    if (drops == micro_batch++) engine.drop_window();
    const auto scope = engine.forward_scope();
    engine.backward(Loss::sum(model.loss_sum(batch), test::counted(batch)));
  }
  return engine.step();
}

struct Ended {
  std::vector<test::Values> parameters;  // by rank
  std::vector<int> dropped;
};

// Which micro-batch of an update's first try a rank drops the window before; none: it does not.
using When = std::function<std::optional<int>(int update, int rank)>;

Ended train(const Config& config, int ranks, const When& when, bool by_calls = false) {
  constexpr int kUpdates = 6, kMicroBatches = 4;
  Ended ended;
  ended.parameters.resize(static_cast<std::size_t>(ranks));
  ended.dropped.resize(static_cast<std::size_t>(ranks));
  testing::on_ranks(
      ranks,
      [&](std::shared_ptr<comm::Group> group) {
        at::set_num_threads(1);
        const auto rank = static_cast<std::size_t>(group->rank());
        test::GridModel model;
        Engine engine(model.view(), config, group);
        model.bind(engine);
        for (int update = 0; update < kUpdates; ++update) {
          std::vector<at::Tensor> window;
          for (int i = 0; i < kMicroBatches; ++i) {
            const auto number = kMicroBatches * (ranks * update + group->rank()) + i;
            window.push_back(test::make_tokens(3, static_cast<std::uint64_t>(number)));
          }
          const auto run = [&](std::optional<int> drops) {
            if (by_calls) return run_by_calls(engine, model, window, drops);
            int micro_batch = 0;
            return engine.step(window, [&](const at::Tensor& batch) {
              if (drops == micro_batch++) throw WindowDropped();
              return Loss::sum(model.loss_sum(batch), test::counted(batch));
            });
          };
          try {
            run(when(update, group->rank()));
          } catch (const WindowDropped&) {
            ++ended.dropped[rank];
            EXPECT_EQ(engine.micro_batches(), 0);
            run(std::nullopt);
          }
          EXPECT_EQ(engine.updates(), update + 1);
        }
        ended.parameters[rank] = test::values_of(engine, model);
      },
      {.timeout = std::chrono::seconds(30)});
  return ended;
}

class DroppedWindow : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Stages, DroppedWindow, ::testing::Values(0, 1, 2, 3));

TEST_P(DroppedWindow, IsDroppedOnAllRanks) {
  Config config;
  config.optimizer = test::adamw();
  config.zero.stage = GetParam();
  config.batch.accumulation = 4;
  const auto whole = train(config, 3, [](int, int) { return std::nullopt; });
  EXPECT_EQ(whole.dropped, (std::vector<int>{0, 0, 0}));
  const When cases[] = {
      // One rank, before each of its micro-batches.
      [](int update, int rank) -> std::optional<int> {
        if (update < 4 && rank == update % 3) return update;
        return std::nullopt;
      },
      // All of them, at different ones.
      [](int update, int rank) -> std::optional<int> {
        if (update >= 4) return std::nullopt;
        return (update + 2 * rank) % 4;
      },
  };
  for (const auto& when : cases) {
    for (const bool by_calls : {false, true}) {
      const auto ended = train(config, 3, when, by_calls);
      EXPECT_EQ(ended.dropped, (std::vector<int>{4, 4, 4}));
      for (std::size_t rank = 0; rank < 3; ++rank) {
        EXPECT_EQ(test::first_difference(ended.parameters[rank], whole.parameters[rank]), "");
      }
    }
  }
}

// Interrupts the thread that chose a value once that has changed.
thread_local const float* watched = nullptr;
thread_local float before_update = 0;

// Ctrl-C while this rank has made its part of the update and waits for that of the others: its
// state is partly of the next update, under the number of this one.
TEST(InterruptedUpdate, IsNotSaved) {
  const testing::TempFolder folder;
  Config config;
  config.optimizer = test::adamw();
  config.zero.stage = 1;
  auto* const old = set_interrupt_check([] {
    if (watched != nullptr && *watched != before_update) throw Interrupted{2};
  });
  testing::errors_on_ranks(
      2,
      [&](std::shared_ptr<comm::Group> group) {
        at::set_num_threads(1);
        test::GridModel model;
        Engine engine(model.view(), config, group);
        model.bind(engine);
        const auto step = [&] {
          const auto batch = test::make_tokens(3, static_cast<std::uint64_t>(group->rank()));
          engine.step(std::vector{batch}, [&](const at::Tensor& b) {
            return Loss::sum(model.loss_sum(b), test::counted(b));
          });
        };
        step();
        if (group->rank() == 1) return step();
        watched = model.slots().front().second->const_data_ptr<float>();
        before_update = *watched;
        Stream::set_test_delay(3, 600'000);
        EXPECT_THROW(step(), Interrupted);
        Stream::set_test_delay(0, 0);
        watched = nullptr;
        const auto message = testing::message_of([&] { engine.save(folder.path()); });
        EXPECT_NE(message.find("update 2 ended in its middle"), std::string::npos) << message;
      },
      {.timeout = std::chrono::seconds(30)});
  set_interrupt_check(old);
}

TEST(DroppedWindowOfOneRank, KeepsItsType) {
  test::GridModel model;
  Config config;
  config.optimizer = test::adamw();
  Engine engine(model.view(), config);
  model.bind(engine);
  EXPECT_THROW(engine.step(2, [](std::size_t) -> Loss { throw WindowDropped(); }), WindowDropped);
  EXPECT_EQ(engine.micro_batches(), 0);
  EXPECT_THROW(engine.drop_window(), WindowDropped);
}

}  // namespace
}  // namespace poise

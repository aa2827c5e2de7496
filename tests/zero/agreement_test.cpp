// Ranks that do not agree, and ranks that fail: everybody ends with a message.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "support/temp_folder.h"
#include "zero/training.h"

namespace poise {
namespace {

using test::GridModel;
using ::testing::HasSubstr;

TEST(Agreement, DifferentModelsAreNamed) {
  const auto errors = testing::errors_on_ranks(2, [](std::shared_ptr<comm::Group> group) {
    GridModel model;
    if (group->rank() == 1) model.unused = at::zeros({5}).requires_grad_();
    Engine engine(model.view(), Config{}, group);
  });
  for (const auto& error : errors) {
    EXPECT_THAT(error, HasSubstr("'unused' of shape [3]"));
    EXPECT_THAT(error, HasSubstr("'unused' of shape [5]"));
  }
}

TEST(Agreement, DifferentSettingsAreNamed) {
  const auto errors = testing::errors_on_ranks(2, [](std::shared_ptr<comm::Group> group) {
    GridModel model;
    Config config;
    if (group->rank() == 1) config.optimizer.lr = 0.125;
    Engine engine(model.view(), config, group);
  });
  for (const auto& error : errors) EXPECT_THAT(error, HasSubstr("\"lr\": 0.125"));
}

// Each machine has its disk where it has it.
TEST(Agreement, FoldersOfFilesMayDiffer) {
  const testing::TempFolder folders[2];
  testing::on_ranks(2, [&](std::shared_ptr<comm::Group> group) {
    GridModel model;
    Config config;
    config.zero.stage = 1;
    config.offload.optimizer = config::Offload::file;
    config.offload.directory = folders[group->rank()].path();
    Engine engine(model.view(), config, group);
    const auto result = engine.step(test::equal_windows(1)(0), [&](const at::Tensor& b) {
      return Loss::sum(model.loss_sum(b), test::counted(b));
    });
    EXPECT_EQ(result.status, Status::applied);
    EXPECT_GT(result.file_bytes, 0);
  });
}

TEST(Agreement, RanksStartFromTheValuesAndBuffersOfRankZero) {
  testing::on_ranks(3, [](std::shared_ptr<comm::Group> group) {
    GridModel model;
    const auto expected = test::values_of(model);
    auto view = model.view();
    auto buffer = at::full({4}, 1.0 + group->rank());
    view.buffers.push_back({"running_mean", buffer});
    {
      at::NoGradGuard no_grad;
      for (auto& [name, tensor] : model.slots()) tensor->add_(group->rank());
    }
    Engine engine(view, Config{}, group);
    auto got = test::values_of(model);
    EXPECT_LE(test::rms_difference(got, expected), 1e-9);
    EXPECT_TRUE(at::equal(buffer, at::full({4}, 1.0)));
  });
}

TEST(Agreement, AnExceptionOnOneRankEndsAll) {
  for (const int stage : {0, 1, 2, 3}) {
    const auto errors = testing::errors_on_ranks(3, [&](std::shared_ptr<comm::Group> group) {
      GridModel model;
      Config config;
      config.zero.stage = stage;
      Engine engine(model.view(), config, group);
      model.bind(engine);
      const std::vector<at::Tensor> window{test::make_tokens(2, 1), test::make_tokens(2, 2)};
      int calls = 0;
      const auto step = [&] {
        engine.step(window, [&](const at::Tensor& b) {
          if (group->rank() == 1 && ++calls == 2) throw std::runtime_error("the data ran dry");
          return Loss::sum(model.loss_sum(b), test::counted(b));
        });
      };
      // Caught here: the engine alone must tell the others.
      if (group->rank() == 1) {
        EXPECT_THROW(step(), std::runtime_error);
      } else {
        step();
      }
    });
    EXPECT_EQ(errors[1], "");
    EXPECT_THAT(errors[0], HasSubstr("rank 1 ended the group: the data ran dry"));
    EXPECT_THAT(errors[2], HasSubstr("rank 1 ended the group: the data ran dry"));
  }
}

TEST(Agreement, AFailureWhileBuildingEndsAll) {
  const auto errors = testing::errors_on_ranks(2, [](std::shared_ptr<comm::Group> group) {
    GridModel model;
    const auto build = [&] {
      Engine engine(model.view(), Config{}, group, [](const std::string&) {
        throw std::runtime_error("the weights are not there");  // rank 0 makes them
      });
    };
    if (group->rank() == 0) {
      EXPECT_THROW(build(), std::runtime_error);
    } else {
      build();
    }
  });
  EXPECT_THAT(errors[1], HasSubstr("rank 0 ended the group: the weights are not there"));
}

TEST(Agreement, AWindowInsideGatheredIsRefused) {
  testing::on_ranks(2, [](std::shared_ptr<comm::Group> group) {
    GridModel model;
    Config config;
    config.zero.stage = 3;
    Engine engine(model.view(), config, group);
    model.bind(engine);
    const auto whole = engine.gathered();
    try {
      engine.step(1, [&](std::size_t) { return Loss(model.loss_sum(test::make_tokens(2, 1))); });
      ADD_FAILURE() << "an update that no whole parameter would show";
    } catch (const Error& error) {
      EXPECT_THAT(error.what(), HasSubstr("inside gathered()"));
    }
  });
}

TEST(Agreement, UnequalBackwardCallsAreNamed) {
  const auto errors = testing::errors_on_ranks(
      2,
      [&](std::shared_ptr<comm::Group> group) {
        GridModel model;
        Config config;
        config.zero.stage = 2;
        config.batch.accumulation = 2;
        Engine engine(model.view(), config, group);
        for (int i = 0; i < 2 - group->rank(); ++i) {
          engine.backward(Loss::sum(model.loss_sum(test::make_tokens(2, 1)), 10.0));
        }
        engine.step(Last::yes);
      },
      {.timeout = std::chrono::seconds(5)});
  for (const auto& error : errors) EXPECT_THAT(error, HasSubstr("micro-batch 2"));
}

TEST(Agreement, AGroupOfAnotherDeviceIsRefused) {
  const auto elsewhere = at::empty({4}, at::TensorOptions().device(at::kMeta)).requires_grad_();
  try {
    Engine engine(ModelView{{{"weight", elsewhere}}, {}, {}}, Config{}, comm::fake(0, 2));
    FAIL() << "a model on another device took a CPU group";
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("the model is on meta"));
  }
}

// A world of 1,024 that is not there: shapes, bytes and calls of a real step.
TEST(Agreement, AStepRunsInAFakeWorldOf1024) {
  for (const int stage : {0, 1, 2, 3}) {
    const auto group = comm::fake(1023, 1024);
    GridModel model;
    Config config;
    config.zero.stage = stage;
    Engine engine(model.view(), config, group);
    model.bind(engine);
    group->reset_traffic();
    engine.step(test::equal_windows(2)(0), [&](const at::Tensor& b) {
      return Loss::sum(model.loss_sum(b), test::counted(b));
    });
    // By formula: each of the flats that train, padded to 256 elements a rank, travels whole.
    constexpr std::int64_t kRanks = 1024;
    std::int64_t flats = 0, all_flats = 0;
    for (const auto& flat : engine.table().flats()) {
      flats += flat.trainable ? 1 : 0;
      all_flats += 1;
    }
    const std::int64_t micro_batches = stage >= 2 ? 2 : 1;
    const auto flat_bytes = std::int64_t{4} * 256 * (kRanks - 1);
    const auto of = [&](comm::Kind kind) { return static_cast<std::size_t>(kind); };
    const auto traffic = group->traffic();
    EXPECT_EQ(traffic.calls[of(comm::Kind::reduce_scatter)], flats * micro_batches);
    EXPECT_EQ(traffic.bytes[of(comm::Kind::reduce_scatter)], flats * micro_batches * flat_bytes);
    if (stage == 1 || stage == 2) {
      EXPECT_GE(traffic.bytes[of(comm::Kind::all_gather)], flats * flat_bytes);
      EXPECT_LT(traffic.bytes[of(comm::Kind::all_gather)], all_flats * flat_bytes);
    }
    // One rank's shard of a model this small is 256 elements of each flat.
    const auto books = engine.ledger().snapshot();
    if (stage >= 1) {
      EXPECT_LE(books.current[static_cast<std::size_t>(memory::Account::optimizer)],
                flats * 256 * 12);
    }
  }
}

}  // namespace
}  // namespace poise

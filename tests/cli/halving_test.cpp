// A window that runs out of memory on one or several ranks, run again in smaller micro-batches: the
// training is the one that had them from the start.
#include "cli/halving.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/ones.h>
#include <ATen/Parallel.h>
#include <c10/util/Exception.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>

#include "cli/byte_gpt.h"
#include "poise/out_of_memory.h"
#include "support/ranks.h"

namespace poise::cli {
namespace {

using ::testing::HasSubstr;

constexpr std::int64_t kRows = 6, kTime = 12, kBallast = 1 << 20;

Config config_of(int stage) {
  Config config;
  config.model.layers = 2;
  config.model.width = 16;
  config.model.heads = 2;
  config.model.sequence_length = kTime;
  config.zero.stage = stage;
  config.optimizer.lr = 1e-2;
  return config;
}

// Two micro-batches of a rank.
std::vector<data::Batch> window_of(int update, int rank) {
  std::vector<data::Batch> window;
  for (int i = 0; i < 2; ++i) {
    const auto bytes = (at::arange(kRows * (kTime + 1)) * 37 + 100 * update + 31 * rank + 7 * i)
                           .remainder(256)
                           .view({kRows, kTime + 1});
    window.push_back({bytes.narrow(1, 0, kTime), bytes.narrow(1, 1, kTime)});
  }
  return window;
}

struct Ended {
  std::vector<at::Tensor> parameters;
  std::vector<double> losses;
  std::vector<std::string> notes;
  std::vector<std::int64_t> rows;  // of every forward
  std::int64_t parts = 0;
};

// `largest`: rows that fit on a rank; 0: all. By rank, after three updates.
std::vector<Ended> train(int ranks, int stage, const std::vector<std::int64_t>& largest) {
  std::vector<Ended> ended(static_cast<std::size_t>(ranks));
  testing::on_ranks(
      ranks,
      [&](std::shared_ptr<comm::Group> group) {
        at::set_num_threads(1);
        const auto rank = static_cast<std::size_t>(group->rank());
        auto& mine = ended[rank];
        const auto config = config_of(stage);
        ByteGpt model(config.model, 3);
        Engine engine(view(model), config, group);
        model.bind(engine);
        Halving halving(engine, [&](const std::string& line) { mine.notes.push_back(line); });
        for (int update = 0; update < 3; ++update) {
          const auto loss = [&](const data::Batch& batch) {
            const auto rows = batch.inputs.size(0);
            mine.rows.push_back(rows);
            auto& ledger = const_cast<memory::Ledger&>(engine.ledger());
            const bool full = largest[rank] > 0 && rows > largest[rank];
            // Enough for a part of the forward; what it gives up is enough to follow the others.
            const auto held = ledger.snapshot().current_bytes;
            ledger.set_budget(full ? held + kBallast + 4096 : 0);
            const auto ballast = at::ones({kBallast / 4});
            return model.loss(batch);
          };
          mine.losses.push_back(halving.step(window_of(update, group->rank()), loss).loss);
        }
        mine.parts = halving.parts();
        const auto whole = engine.gathered();
        for (const auto& parameter : model.parameters()) {
          mine.parameters.push_back(parameter.detach().clone());
        }
      },
      {.timeout = std::chrono::seconds(30)});
  return ended;
}

class Halves : public ::testing::TestWithParam<std::tuple<int, int>> {};  // ranks, stage
INSTANTIATE_TEST_SUITE_P(Ranks, Halves,
                         ::testing::Values(std::tuple(1, 0), std::tuple(2, 0), std::tuple(2, 2),
                                           std::tuple(2, 3)));

TEST_P(Halves, TrainOnEverySampleOnce) {
  const auto [ranks, stage] = GetParam();
  const auto roomy = train(ranks, stage, std::vector<std::int64_t>(ranks, 0));
  EXPECT_EQ(roomy[0].parts, 1);
  // On the last rank alone no more than two rows fit: six, three, two.
  std::vector<std::int64_t> largest(static_cast<std::size_t>(ranks), 0);
  largest.back() = 2;
  const auto tight = train(ranks, stage, largest);
  for (const auto& of_rank : tight) {
    EXPECT_EQ(of_rank.parts, 4);
    ASSERT_EQ(of_rank.notes.size(), 2u);
    EXPECT_THAT(of_rank.notes[0], HasSubstr("out of memory with micro-batches of 6 samples"));
    EXPECT_THAT(of_rank.notes[1], HasSubstr("of 3 samples"));
    // Two rows each from the window on that ran out, and all of the later ones.
    const std::vector<std::int64_t> last(of_rank.rows.end() - 18, of_rank.rows.end());
    EXPECT_EQ(last, std::vector<std::int64_t>(18, 2));
    ASSERT_EQ(of_rank.losses.size(), 3u);
    for (std::size_t i = 0; i < 3; ++i) {
      EXPECT_NEAR(of_rank.losses[i], roomy[0].losses[i], 1e-5 * roomy[0].losses[i]);
    }
    for (std::size_t i = 0; i < of_rank.parameters.size(); ++i) {
      EXPECT_TRUE(at::equal(of_rank.parameters[i], tight[0].parameters[i]));
      EXPECT_LT((of_rank.parameters[i] - roomy[0].parameters[i]).abs().max().item<float>(), 2e-3);
    }
  }
}

TEST(HalvesOfSingleSamples, AreNoneSoThatTheErrorStands) {
  std::array<bool, 2> stands{};
  const auto errors = testing::errors_on_ranks(2, [&](std::shared_ptr<comm::Group> group) {
    at::set_num_threads(1);
    const auto config = config_of(2);
    ByteGpt model(config.model, 3);
    Engine engine(view(model), config, group);
    Halving halving(engine, [](const std::string&) {});
    try {
      halving.step(window_of(0, group->rank()), [&](const data::Batch& batch) -> Loss {
        if (group->rank() == 1) throw_out_of_memory("never enough");
        return model.loss(batch);
      });
    } catch (const c10::OutOfMemoryError& error) {
      EXPECT_EQ(halving.parts(), 8);
      EXPECT_THAT(error.what_without_backtrace(), HasSubstr("never enough"));
      stands[static_cast<std::size_t>(group->rank())] = true;
    }
  });
  for (const auto& error : errors) EXPECT_EQ(error, "");
  EXPECT_TRUE(stands[0] && stands[1]);
}

}  // namespace
}  // namespace poise::cli

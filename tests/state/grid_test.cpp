// Saved on W ranks at stage s, loaded on W' ranks at s': every element the same, and the same
// further updates wherever the order of sums is the same.
#include <gtest/gtest.h>

#include "state/training.h"

namespace poise {
namespace {

using test::Part;
using testing::TempFolder;

struct Way {
  int ranks;
  int stage;
  config::Reduce reduce = config::Reduce::automatic;
  std::int64_t small_below = 0;
  bool low = false;  // bf16 parameters with masters
  config::Offload states = config::Offload::none;
  config::Offload values = config::Offload::none;
};

std::string text_of(const Way& w) {
  const auto place = [](config::Offload where, const char* what) {
    if (where == config::Offload::none) return std::string();
    return join(what, where == config::Offload::file ? "file" : "host");
  };
  return join("w", w.ranks, "s", w.stage, w.reduce == config::Reduce::last ? "last" : "",
              w.small_below > 0 ? "small" : "", w.low ? "bf16" : "", place(w.states, "states"),
              place(w.values, "values"));
}

Config config_of(const Way& way) {
  auto config = test::adamw_config(way.stage);
  config.zero.reduce = way.reduce;
  config.zero.persistence_threshold = way.small_below;
  config.offload.optimizer = way.states;
  config.offload.parameters = way.values;
  if (way.states == config::Offload::file || way.values == config::Offload::file)
    config.offload.directory = ::testing::TempDir();
  if (way.low) config.precision.dtype = config.precision.parameters = config::DType::bf16;
  return config;
}

// One order of sums: the same ranks, gradients joined at the same points, the same precision, the
// same borders between shards (small parameters kept apart move them, and the norm is a sum over
// shards).
bool same_bits(const Way& a, const Way& b) {
  const auto every = [](const Way& w) {
    return w.ranks > 1 && config::reduces_every_micro_batch(config_of(w).zero);
  };
  return a.ranks == b.ranks && every(a) == every(b) && a.low == b.low &&
         (a.small_below > 0) == (b.small_below > 0);
}

const std::vector<Way> kWays{
    {1, 0},
    {2, 0},
    {2, 1},
    {2, 2},
    {2, 3},
    {3, 1},
    {3, 3, config::Reduce::last},
    {4, 0},
    {4, 2},
    {4, 3, config::Reduce::automatic, 10},
    {2, 3, config::Reduce::automatic, 0, true},
    {3, 2, config::Reduce::automatic, 0, true},
    {1, 0, config::Reduce::automatic, 0, true, config::Offload::host},
    {2, 3, config::Reduce::automatic, 0, true, config::Offload::file},
    {2, 1, config::Reduce::automatic, 0, false, config::Offload::file},
    {2, 3, config::Reduce::automatic, 0, true, config::Offload::host, config::Offload::file}};
constexpr int kSaved = 3, kEnd = 13;

// The updates after a load are those of the run that was never stopped.
void expect_further(const Way& from, const Way& to, const std::vector<test::Held>& rest,
                    const std::vector<test::Held>& unbroken) {
  for (const auto& rank : rest) {
    EXPECT_EQ(test::first_difference(rank.masters, rest[0].masters), "");
  }
  const auto& want = unbroken[0].results;
  ASSERT_EQ(rest[0].results.size(), static_cast<std::size_t>(kEnd - kSaved));
  if (same_bits(from, to)) {
    EXPECT_EQ(test::first_difference(rest[0].results, {want.begin() + kSaved, want.end()}), "");
    EXPECT_EQ(test::first_difference(rest[0].parameters, unbroken[0].parameters), "");
    EXPECT_EQ(test::first_difference(rest[0].masters, unbroken[0].masters), "");
  } else {  // to rounding: of bf16 forwards, or of another order of sums alone
    const double tolerance = from.low || to.low ? 2e-2 : 1e-6;
    for (std::size_t i = 0; i < rest[0].results.size(); ++i) {
      const double loss = want[i + kSaved].loss;
      EXPECT_NEAR(rest[0].results[i].loss, loss, tolerance * loss);
      EXPECT_EQ(rest[0].results[i].lr, want[i + kSaved].lr);
    }
  }
}

class Grid : public ::testing::TestWithParam<std::size_t> {};

TEST_P(Grid, LoadsAnywhere) {
  const auto& from = kWays[GetParam()];
  const TempFolder folder;
  const auto save = folder / "first";
  test::run({.ranks = from.ranks, .config = config_of(from), .save = save, .end = kSaved});
  const state::Saved saved(state::find(save));
  saved.verify();
  const auto unbroken = test::run({.ranks = from.ranks, .config = config_of(from), .end = kEnd});

  for (const auto& to : kWays) {
    SCOPED_TRACE(text_of(from) + " to " + text_of(to));
    const auto again = folder / text_of(to);
    test::run({.ranks = to.ranks,
               .config = config_of(to),
               .load = save,
               .save = again,
               .begin = kSaved,
               .end = kSaved});
    EXPECT_EQ(test::first_difference(saved, state::Saved(state::find(again)),
                                     to.low ? at::kBFloat16 : at::kFloat),
              "");

    const auto rest = test::run(
        {.ranks = to.ranks, .config = config_of(to), .load = save, .begin = kSaved, .end = kEnd});
    expect_further(from, to, rest, unbroken);
  }
}

INSTANTIATE_TEST_SUITE_P(Ways, Grid, ::testing::Range(std::size_t{0}, kWays.size()),
                         [](const auto& info) { return text_of(kWays[info.param]); });

// Every stage and number of ranks to every other one: the further updates.
class Stages : public ::testing::TestWithParam<std::tuple<int, int>> {};

TEST_P(Stages, GoOnAtEveryOther) {
  const Way from{std::get<0>(GetParam()), std::get<1>(GetParam())};
  const TempFolder folder;
  const auto save = folder / "first";
  test::run({.ranks = from.ranks, .config = config_of(from), .save = save, .end = kSaved});
  const auto unbroken = test::run({.ranks = from.ranks, .config = config_of(from), .end = kEnd});
  int equal = 0;
  for (const int ranks : {1, 2, 3, 4}) {
    for (const int stage : {0, 1, 2, 3}) {
      const Way to{ranks, stage};
      SCOPED_TRACE(text_of(from) + " to " + text_of(to));
      const auto rest = test::run(
          {.ranks = ranks, .config = config_of(to), .load = save, .begin = kSaved, .end = kEnd});
      equal += same_bits(from, to) ? 1 : 0;
      expect_further(from, to, rest, unbroken);
    }
  }
  EXPECT_EQ(equal, from.ranks == 1 ? 4 : 2);
}

INSTANTIATE_TEST_SUITE_P(Ranks, Stages,
                         ::testing::Combine(::testing::Values(1, 2, 3, 4),
                                            ::testing::Values(0, 1, 2, 3)),
                         [](const auto& info) {
                           return join("w", std::get<0>(info.param), "s", std::get<1>(info.param));
                         });

class Optimizers : public ::testing::TestWithParam<std::string> {};

// Whatever an optimizer keeps: elements, blocks, whole parameters.
TEST_P(Optimizers, LoadAnywhere) {
  const auto config_of_way = [&](const Way& way) {
    auto config = config_of(way);
    test::set_type(config.optimizer, GetParam());
    if (config.optimizer.type == "lars") config.optimizer.trust_coefficient = 0.5;
    return config;
  };
  const TempFolder folder;
  const Way from{3, 1};
  const auto save = folder / "first";
  test::run({.ranks = 3, .config = config_of_way(from), .save = save, .end = kSaved});
  const state::Saved saved(state::find(save));
  saved.verify();
  EXPECT_TRUE(state::differences(saved.path(), saved.path()).empty());
  const auto unbroken = test::run({.ranks = 3, .config = config_of_way(from), .end = kEnd});
  for (const Way& to : {Way{3, 0}, Way{3, 3, config::Reduce::last}, Way{2, 2}, Way{1, 0}}) {
    SCOPED_TRACE(text_of(to));
    const auto again = folder / text_of(to);
    test::run({.ranks = to.ranks,
               .config = config_of_way(to),
               .load = save,
               .save = again,
               .begin = kSaved,
               .end = kSaved});
    EXPECT_EQ(test::first_difference(saved, state::Saved(state::find(again))), "");
    if (!same_bits(from, to)) continue;
    const auto rest = test::run(
        {.ranks = 3, .config = config_of_way(to), .load = save, .begin = kSaved, .end = kEnd});
    EXPECT_EQ(test::first_difference(rest[0].masters, unbroken[0].masters), "");
  }
  // Another form of the moments is another optimizer.
  const auto message = testing::message_of([&] {
    test::run({.ranks = 1, .config = config_of(Way{1, 0}), .load = save, .begin = kSaved});
  });
  EXPECT_NE(message.find("was saved with the optimizer " + GetParam()), std::string::npos)
      << message;
}

INSTANTIATE_TEST_SUITE_P(Kinds, Optimizers,
                         ::testing::Values("adafactor", "lion", "lamb", "lars", "adamw_bf16",
                                           "adamw_8bit"),
                         [](const auto& info) { return info.param; });

// Blocks are runs of memory.
TEST(Layouts, MustBeThatOfTheSaveForMomentsInBlocks) {
  const TempFolder folder;
  auto config = test::adamw_config();
  config.optimizer.moments = "8bit";
  const auto weight = test::normal({4, 6}, 1);
  auto by_rows = weight.clone().requires_grad_();
  Engine first({{{"w", by_rows}}, {}, {}}, config);
  first.save(folder.path());
  auto by_columns = at::empty({6, 4}, at::kFloat).t().zero_().requires_grad_();
  Engine second({{{"w", by_columns}}, {}, {}}, config);
  const auto message = testing::message_of([&] { second.load(folder.path()); });
  EXPECT_NE(message.find("lies in memory in another order"), std::string::npos) << message;
  second.load(folder.path(), {.weights_only = true});
  EXPECT_TRUE(at::equal(by_columns, weight));
  Engine third({{{"w", by_rows}}, {}, {}}, config);
  third.load(folder.path());
}

// A second engine over the same ranks takes no notes of the first one's saves for its own.
TEST(Engines, MayFollowEachOtherOnOneGroup) {
  const TempFolder folder;
  testing::on_ranks(2,
                    [&](std::shared_ptr<comm::Group> group) {
                      for (int i = 0; i < 3; ++i) {
                        test::GridModel model;
                        Engine engine(model.view(), test::adamw_config(2), group);
                        engine.save(folder / std::to_string(i));
                      }
                    },
                    {.timeout = std::chrono::seconds(60)});
  for (int i = 0; i < 3; ++i) state::verify(state::find(folder / std::to_string(i)));
}

// All ranks are told the same, and nothing was touched: a run may look for a save, and begin anew.
TEST(Engines, GoOnTogetherAfterALoadThatWasRefused) {
  const TempFolder folder;
  const auto part = test::Part{2, test::adamw_config(2), "", "", 0, 2};
  const auto unbroken = test::run(part);
  std::vector<std::vector<StepResult>> results(2);
  testing::on_ranks(2,
                    [&](std::shared_ptr<comm::Group> group) {
                      at::set_num_threads(1);
                      test::GridModel model;
                      Engine engine(model.view(), part.config, group);
                      model.bind(engine);
                      const int rank = group->rank();
                      for (int update = 0; update < part.end; ++update) {
                        EXPECT_THROW(engine.load(folder.path()), Error);
                        results[static_cast<std::size_t>(rank)].push_back(
                            engine.step(test::window_of(part, update, rank), [&](const auto& b) {
                              return Loss::sum(model.loss_sum(b), test::counted(b));
                            }));
                      }
                    },
                    {.timeout = std::chrono::seconds(60)});
  EXPECT_EQ(test::first_difference(results[0], unbroken[0].results), "");
}

// Saved with a parameter stored the other way round in memory, and under its tied name.
TEST(Layouts, MayDiffer) {
  const TempFolder folder;
  const auto config = test::adamw_config();
  const auto weight = test::normal({4, 6}, 1);
  const auto step = [](Engine& engine, const at::Tensor& w) {
    engine.step(1, [&](std::size_t) { return Loss::sum((w * w * w).sum(), 1); });
  };
  auto by_rows = weight.clone().requires_grad_();
  Engine first({{{"w", by_rows}, {"tied", by_rows}}, {}, {}}, config);
  step(first, by_rows);
  first.save(folder.path());
  step(first, by_rows);

  auto by_columns = at::empty({6, 4}, at::kFloat).t().zero_().requires_grad_();
  ASSERT_FALSE(by_columns.is_contiguous());
  Engine second({{{"tied", by_columns}}, {}, {}}, config);
  second.load(folder.path());
  step(second, by_columns);
  EXPECT_TRUE(at::equal(by_rows, by_columns));  // moments too have found their places
}

}  // namespace
}  // namespace poise

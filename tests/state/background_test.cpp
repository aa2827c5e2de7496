// Saves that are written while the training goes on: what is in them, when they end, what they may
// hold, and where their failures come out.
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <csignal>

#include "state/files.h"
#include "state/training.h"

namespace poise {
namespace {

using testing::message_of;
using testing::TempFolder;

Config behind(int stage = 0) {
  auto config = test::adamw_config(stage);
  config.state.asynchronous = true;
  return config;
}

// While it lives files cannot grow beyond `bytes`: writing more fails, as on a full disk.
class FullDisk {
 public:
  explicit FullDisk(rlim_t bytes) {
    old_handler_ = std::signal(SIGXFSZ, SIG_IGN);
    ::getrlimit(RLIMIT_FSIZE, &old_);
    const rlimit limit{bytes, old_.rlim_max};
    ::setrlimit(RLIMIT_FSIZE, &limit);
  }
  ~FullDisk() {
    ::setrlimit(RLIMIT_FSIZE, &old_);
    std::signal(SIGXFSZ, old_handler_);
  }

 private:
  rlimit old_{};
  void (*old_handler_)(int);
};

struct Trained {
  test::GridModel model;
  Engine engine;
  explicit Trained(const Config& config, std::shared_ptr<comm::Group> group = {})
      : engine(model.view(), config, std::move(group)) {
    model.bind(engine);
  }
  StepResult step(int update) {
    return engine.step(
        std::vector{test::make_tokens(3, static_cast<std::uint64_t>(update))},
        [&](const at::Tensor& b) { return Loss::sum(model.loss_sum(b), test::counted(b)); });
  }
};

// With operations of the background at random times.
TEST(Background, SavesWhatWasThereWhenItBegan) {
  const TempFolder folder;
  Stream::set_test_delay(5, 2000);
  Trained waits(test::adamw_config()), goes_on(behind());
  for (int update = 0; update < 6; ++update) {
    const auto name = std::to_string(update);
    waits.engine.save(folder / "waits", {.name = name});
    goes_on.engine.save(folder / "behind", {.name = name});
    const auto a = waits.step(update), b = goes_on.step(update);  // the save is in flight
    EXPECT_EQ(a.loss, b.loss);
  }
  goes_on.engine.finish_save();
  Stream::set_test_delay(0, 0);
  for (int update = 0; update < 6; ++update) {
    const auto name = "/" + std::to_string(update);
    EXPECT_EQ(state::differences(folder / "waits" + name, folder / "behind" + name),
              std::vector<std::string>{});
  }
}

TEST(Background, IsFinishedByTheDestructor) {
  const TempFolder folder;
  Stream::set_test_delay(6, 20000);
  std::string path;
  {
    Trained run(behind());
    path = run.engine.save(folder.path());
  }
  Stream::set_test_delay(0, 0);
  EXPECT_EQ(state::find(folder.path()), path);
  state::verify(path);
}

TEST(Background, AFailureComesOutAtTheNextStepOnce) {
  const TempFolder folder;
  Trained run(behind());
  const auto first = run.engine.save(folder.path());
  run.engine.finish_save();
  run.step(0);
  {
    const FullDisk full(1000);
    run.engine.save(folder.path());
    const auto message = message_of([&] {
      for (int i = 0; i < 1000; ++i) run.step(i);
    });
    EXPECT_NE(message.find("[state] cannot write "), std::string::npos) << message;
  }
  EXPECT_EQ(state::list(folder.path()), std::vector<std::string>{first});
  run.step(1);
  run.engine.save(folder.path());
  run.engine.finish_save();
  EXPECT_EQ(state::list(folder.path()).size(), 2u);
}

TEST(Background, AFailureComesOutAtTheNextSave) {
  const TempFolder folder;
  Trained run(behind());
  {
    const FullDisk full(1000);
    run.engine.save(folder.path());
    EXPECT_NE(message_of([&] { run.engine.save(folder.path()); }).find("cannot write"),
              std::string::npos);
  }
  EXPECT_EQ(state::list(folder.path()), std::vector<std::string>{});
  run.engine.save(folder.path());
  run.engine.finish_save();
  EXPECT_EQ(state::list(folder.path()).size(), 1u);
}

// More than its staging memory holds: it waits for the disk, and holds no more.
TEST(Background, HoldsNoMoreThanItMay) {
  const TempFolder folder;
  auto config = behind();
  config.state.staging_bytes = 12 << 20;
  const auto weight = test::normal({1 << 20, 6}, 1).requires_grad_();  // 24 MiB, 72 with moments
  Engine engine({{{"w", weight}}, {}, {}}, config);
  engine.save(folder.path());
  engine.finish_save();
  const state::Saved saved(state::find(folder.path()));
  saved.verify();
  auto values = at::zeros({weight.numel()}, at::kFloat);
  saved.read(state::kMaster, *saved.parameter("w"), 0, {0, 1}, values);
  EXPECT_TRUE(at::equal(values, weight.detach().flatten()));  // from several tiles
  const auto held = engine.step(1, [&](std::size_t) { return Loss::sum(weight.sum(), 1); });
  EXPECT_GT(held.host_bytes, 8 << 20);
  EXPECT_LE(held.host_bytes, (12 << 20) + 65536);
}

// Where one of two ranks fails neither has a save, and both are told why.
TEST(Background, AFailureOfOneRankIsToldToAll) {
  for (const bool asynchronous : {false, true}) {
    const TempFolder folder;
    auto config = asynchronous ? behind(2) : test::adamw_config(2);
    std::vector<std::string> messages(2);
    testing::on_ranks(2,
                      [&](std::shared_ptr<comm::Group> group) {
                        const auto rank = group->rank();
                        Trained run(config, group);
                        run.engine.save(folder.path(), {.name = "first"});
                        run.engine.finish_save();
                        messages[static_cast<std::size_t>(rank)] = message_of([&] {
                          state::SaveOptions options{.name = "second"};
                          if (rank == 0) {
                            options.extra = [&](const std::string&) {
                              throw std::runtime_error("no card");
                            };
                          }
                          run.engine.save(folder.path(), options);
                          run.engine.finish_save();
                        });
                      },
                      {.timeout = std::chrono::seconds(60)});
    EXPECT_EQ(messages[0], "no card");
    EXPECT_NE(messages[1].find("no card"), std::string::npos) << messages[1];
    EXPECT_EQ(state::list(folder.path()), std::vector<std::string>{folder / "first"});
    EXPECT_EQ(state::names_in(folder.path()).size(), 3u);
  }
}

}  // namespace
}  // namespace poise

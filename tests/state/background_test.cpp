// Saves that are written while the training goes on: what is in them, when they end, what they may
// hold, and where their failures come out.
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <csignal>
#include <future>

#include "state/files.h"
#include "state/safetensors.h"
#include "state/staging.h"
#include "state/training.h"
#include "support/interrupts.h"

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

// With operations of the background at random times: updates, edits of parameters and of moments
// come while the save still reads.
void expect_what_was_there(Config config) {
  const TempFolder folder;
  Stream::set_test_delay(5, 2000);
  Trained waits(config);
  config.state.asynchronous = true;
  Trained goes_on(config);
  const auto change = [](Trained& run, int update) {
    const auto [name, parameter] = run.model.slots().front();
    if (update % 3 == 1) {
      const at::NoGradGuard no_grad;
      parameter->mul_(1.5);
      const auto whole = run.engine.gathered();  // takes edits over, as updates do
    }
    if (update % 3 == 2) {
      auto moments = run.engine.moments(name);
      for (auto& moment : moments) moment = moment * 0.5;
      run.engine.set_moments(name, moments);
    }
  };
  for (int update = 0; update < 9; ++update) {
    const auto name = std::to_string(update);
    waits.engine.save(folder / "waits", {.name = name});
    goes_on.engine.save(folder / "behind", {.name = name});
    change(waits, update);
    change(goes_on, update);
    const auto a = waits.step(update), b = goes_on.step(update);  // the save is in flight
    EXPECT_EQ(a.loss, b.loss);
  }
  goes_on.engine.finish_save();
  Stream::set_test_delay(0, 0);
  for (int update = 0; update < 9; ++update) {
    const auto name = "/" + std::to_string(update);
    EXPECT_EQ(state::differences(folder / "waits" + name, folder / "behind" + name),
              std::vector<std::string>{});
  }
}

TEST(Background, SavesWhatWasThereWhenItBegan) { expect_what_was_there(test::adamw_config()); }

TEST(Background, SavesMastersThatWereThereWhenItBegan) {
  auto config = test::adamw_config();
  config.precision.dtype = config.precision.parameters = config::DType::bf16;
  expect_what_was_there(config);
}

TEST(Background, SavesStatesInAFileThatWereThereWhenItBegan) {
  auto config = test::adamw_config();
  config.precision.dtype = config.precision.parameters = config::DType::bf16;
  config.offload.optimizer = config::Offload::file;
  config.offload.directory = ::testing::TempDir();
  expect_what_was_there(config);
}

// What is read later lies behind narrower types in the file, at a multiple of its own size.
TEST(Background, LiesAlignedInItsFile) {
  const TempFolder folder;
  const auto weight = test::normal({7}, 1).requires_grad_();
  const auto odd = at::ones({3}, at::kByte);
  Engine engine({{{"w", weight}}, {{"odd", odd}}, {}}, behind());
  engine.step(1, [&](std::size_t) { return Loss::sum(weight.square().sum(), 1); });
  const auto save = engine.save(folder.path());
  engine.finish_save();
  const state::InputFile file(save + "/rank-00000.safetensors");
  const auto header = state::read_header(file);
  int floats = 0;
  for (const auto& tensor : header.tensors) {
    if (tensor.type != at::kFloat) continue;
    ++floats;
    EXPECT_EQ((header.data_begin + tensor.begin) % sizeof(float), 0u) << tensor.name;
  }
  EXPECT_EQ(floats, 3);
  const auto before = engine.moments("w")[1].clone();
  engine.step(1, [&](std::size_t) { return Loss::sum(weight.sum(), 1); });
  engine.load(save);
  EXPECT_TRUE(at::equal(engine.moments("w")[1], before));
}

// It goes on training after a save that failed, on every rank.
TEST(Background, AFailedSaveEndsNoGroup) {
  const TempFolder folder;
  state::make_folder(folder / "update-00000001");
  folder.write("update-00000001/thesis.txt", "years of work");
  testing::on_ranks(2,
                    [&](std::shared_ptr<comm::Group> group) {
                      Trained run(test::adamw_config(2), group);
                      run.step(0);
                      const auto message = message_of([&] { run.engine.save(folder.path()); });
                      EXPECT_NE(message.find("is no save"), std::string::npos) << message;
                      run.step(1);
                      run.engine.save(folder.path());
                    },
                    {.timeout = std::chrono::seconds(60)});
  EXPECT_EQ(state::list(folder.path()), std::vector<std::string>{folder / "update-00000002"});
}

// Ctrl-C in a rank that waits for rank 0 to begin: rank 0 does not wait for it then.
TEST(Background, ARankThatIsInterruptedBeforeItBeginsTakesNoPart) {
  const TempFolder folder;
  std::promise<void> pressed;
  testing::on_ranks(
      2,
      [&](std::shared_ptr<comm::Group> group) {
        Trained run(test::adamw_config(2), group);
        run.step(0);
        if (group->rank() == 1) {
          {
            const testing::Interrupts interrupts;
            EXPECT_THROW(run.engine.save(folder.path()), Interrupted);
          }
          pressed.set_value();
        } else {
          pressed.get_future().wait();
          const auto message = message_of([&] { run.engine.save(folder.path()); });
          EXPECT_NE(message.find("rank 1 takes no part in the save"), std::string::npos) << message;
        }
        run.step(1);
        run.engine.save(folder.path());
      },
      {.timeout = std::chrono::seconds(10)});
  EXPECT_EQ(state::list(folder.path()), std::vector<std::string>{folder / "update-00000002"});
}

TEST(Background, ARefusedSaveLeavesTheOpenWindow) {
  const TempFolder folder;
  auto config = test::adamw_config();
  config.batch.accumulation = 2;
  Trained run(config), undisturbed(config);
  const auto half = [](Trained& one, int batch) {
    const auto tokens = test::make_tokens(3, static_cast<std::uint64_t>(batch));
    auto scope = std::make_optional(one.engine.forward_scope());
    const auto loss = Loss::sum(one.model.loss_sum(tokens), test::counted(tokens));
    scope.reset();
    one.engine.backward(loss);
  };
  for (auto* one : {&run, &undisturbed}) half(*one, 1);
  EXPECT_NE(message_of([&] { run.engine.save(folder.path()); }).find("open window"),
            std::string::npos);
  for (auto* one : {&run, &undisturbed}) half(*one, 2);
  EXPECT_EQ(run.engine.step(Last::yes).loss, undisturbed.engine.step(Last::yes).loss);
}

TEST(Rehearsal, SaysWhatASaveTakesAndLeavesNothing) {
  const TempFolder folder;
  testing::on_ranks(
      2,
      [&](std::shared_ptr<comm::Group> group) {
        Trained run(test::adamw_config(1), group);
        const auto rehearsal = run.engine.rehearse_save(folder / "saves");
        EXPECT_EQ(state::list(folder / "saves"), std::vector<std::string>{});
        EXPECT_GT(rehearsal.free_bytes, rehearsal.bytes);
        group->barrier("rehearsed");
        const auto save = run.engine.save(folder / "saves");
        group->barrier("saved");
        std::int64_t bytes = 0;
        for (const auto* name : {"/rank-00000.safetensors", "/rank-00001.safetensors"})
          bytes += static_cast<std::int64_t>(state::InputFile(save + name).size());
        EXPECT_EQ(rehearsal.bytes, bytes);
      },
      {.timeout = std::chrono::seconds(60)});
}

TEST(Rehearsal, FailsWhereASaveWould) {
  const TempFolder folder;
  Trained run(test::adamw_config());
  {
    const FullDisk full(1000);
    EXPECT_NE(message_of([&] { run.engine.rehearse_save(folder.path()); }).find("cannot write"),
              std::string::npos);
  }
  EXPECT_EQ(state::names_in(folder.path()).size(), 1u);  // the lock
  run.step(0);
  run.engine.save(folder.path());
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

// Of a save of two ranks that holds 72 MiB each takes its half, a tile at a time where types
// differ.
TEST(Loading, HoldsATileBesideItsShard) {
  const TempFolder folder;
  const auto weight = test::normal({1 << 20, 6}, 1);
  const auto config_of = [](bool low) {
    auto config = test::adamw_config(3);
    if (low) config.precision.dtype = config.precision.parameters = config::DType::bf16;
    return config;
  };
  const auto on_two = [&](bool low, const std::function<void(Engine&)>& use) {
    testing::on_ranks(2,
                      [&](std::shared_ptr<comm::Group> group) {
                        auto mine = weight.clone().requires_grad_();
                        Engine engine({{{"w", mine}}, {}, {}}, config_of(low), group);
                        use(engine);
                      },
                      {.timeout = std::chrono::seconds(60)});
  };
  on_two(false, [&](Engine& engine) { engine.save(folder.path()); });
  for (const bool low : {false, true}) {
    on_two(low, [&](Engine& engine) {
      engine.group().barrier("built");
      engine.restart_peak();
      const auto held = engine.ledger().snapshot().current_bytes;
      engine.load(folder.path());
      const auto peak = engine.ledger().snapshot().peak_bytes;
      EXPECT_LE(peak - held, std::int64_t{state::kTile} + 65536) << low;
      const auto master = engine.master("w");
      EXPECT_TRUE(at::equal(master, weight));
    });
  }
}

// Masters and moments in a file, 144 MiB: they pass through memory tile by tile, both ways.
TEST(Background, StatesInAFilePassTileByTile) {
  const TempFolder folder;
  auto config = test::adamw_config();
  config.precision.dtype = config.precision.parameters = config::DType::bf16;
  config.offload.optimizer = config::Offload::file;
  config.offload.directory = ::testing::TempDir();
  config.offload.staging_bytes = 4 << 20;
  config.offload.block_bytes = 64 << 10;
  const auto weight = test::normal({1 << 20, 12}, 1).to(at::kBFloat16).requires_grad_();
  Engine engine({{{"w", weight}}, {}, {}}, config);
  const auto loss = [&](std::size_t) { return Loss::sum(weight.sum(), 1); };
  const auto before = engine.step(1, loss);
  engine.save(folder.path());
  const auto master = engine.master("w").clone();
  const auto value = weight.detach().clone();
  const auto saved = engine.step(1, loss);
  EXPECT_LE(saved.host_bytes - before.host_bytes, 8 * ((4 << 20) + 8192));
  engine.load(folder.path());
  EXPECT_TRUE(at::equal(engine.master("w"), master));
  EXPECT_TRUE(at::equal(weight.detach(), value));
  EXPECT_EQ(engine.step(1, loss).host_bytes, saved.host_bytes);
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

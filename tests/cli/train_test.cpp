// `poise train` from file to metrics: a run, its end by budget, by Ctrl-C, by bad settings.
#include <gmock/gmock.h>
#include <signal.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <thread>

#include "command.h"

namespace poise::cli {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using Json = nlohmann::json;

class Train : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ = std::filesystem::path(::testing::TempDir()) /
              ("poise_train_" +
               std::string(::testing::UnitTest::GetInstance()->current_test_info()->name()));
    remove_folder();
    std::filesystem::create_directories(folder_);
    std::ofstream corpus(folder_ / "text.txt");
    for (int i = 0; i < 400; ++i) corpus << "the cat sat on the mat, " << i % 7 << " times.\n";
    const Json config = {
        {"batch", {{"micro_batch_size", 2}, {"global_batch_size", 8}}},
        {"optimizer", {{"lr", 3e-3}}},
        {"schedule", {{"type", "cosine"}, {"warmup_updates", 2}}},
        {"model", {{"layers", 2}, {"width", 16}, {"heads", 2}, {"sequence_length", 16}}},
        {"data", {{"train", {(folder_ / "text.txt").string()}}}},
        {"train",
         {{"output_dir", (folder_ / "out").string()}, {"max_updates", 12}, {"log_every", 4}}},
    };
    std::ofstream(folder_ / "run.json") << config.dump();
  }
  void TearDown() override { remove_folder(); }

  // torch's libraries export a std::filesystem of their own, whose remove_all() crashes.
  void remove_folder() { ASSERT_EQ(std::system(("rm -rf '" + folder_.string() + "'").c_str()), 0); }

  Outcome train(const std::vector<std::string>& settings, bool json = false) {
    std::vector<std::string> arguments = {"train", (folder_ / "run.json").string()};
    for (const auto& setting : settings) {
      arguments.push_back("--set");
      arguments.push_back(setting);
    }
    if (json) arguments.push_back("--json");
    return command(arguments);
  }

  std::vector<Json> metrics() {
    std::vector<Json> lines;
    std::ifstream file(folder_ / "out" / "metrics.jsonl");
    for (std::string line; std::getline(file, line);) lines.push_back(Json::parse(line));
    return lines;
  }

  std::filesystem::path folder_;
};

TEST_F(Train, RunsAndReports) {
  const auto outcome = train({"train.sample_bytes=10", "train.validate_every=8"});
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_THAT(
      outcome.out,
      AllOf(HasSubstr("micro-batch 2 x accumulation 4 x ranks 1 = global batch 8, 128 tokens"),
            HasSubstr("parameters are trained"), HasSubstr("update 12/12"),
            HasSubstr("validation after update 8"), HasSubstr("it goes on")));
  const auto lines = metrics();
  std::vector<int> steps;
  for (const auto& line : lines) {
    if (line.contains("loss")) steps.push_back(line["step"]);
  }
  EXPECT_THAT(steps, ::testing::ElementsAre(1, 4, 8, 12));
  const auto& summary = lines.back();
  EXPECT_EQ(summary["summary"], true);
  EXPECT_EQ(summary["losses"].size(), 12u);
  EXPECT_LT(summary["losses"][11], summary["losses"][0]);
  EXPECT_EQ(summary["accumulation"], 4);
  EXPECT_TRUE(summary["error"].is_null());
  EXPECT_GT(summary["val_loss"], 1.0);
  EXPECT_GT(summary["peak_bytes"], 0);
  std::int64_t sum = 0;
  for (const auto& [name, bytes] : summary["accounts"].items()) sum += bytes.get<std::int64_t>();
  EXPECT_EQ(sum, summary["peak_bytes"]);
}

// The same numbers whatever the split, the recomputation, the loss head.
TEST_F(Train, TheSplitDoesNotChangeTheTraining) {
  const auto losses = [&](const std::vector<std::string>& settings) {
    const auto outcome = train(settings);
    EXPECT_EQ(outcome.code, 0) << outcome.err;
    return metrics().back()["losses"].get<std::vector<double>>();
  };
  const auto whole = losses({"batch.micro_batch_size=8"});
  const auto split = losses({});
  EXPECT_EQ(losses({}), split);  // run to run: the same bits
  EXPECT_EQ(losses({"checkpointing.policy=every_n"}), split);
  EXPECT_EQ(losses({"checkpointing.policy=every_n", "checkpointing.n=2"}), split);
  EXPECT_EQ(losses({"checkpointing.policy=sqrt"}), split);
  EXPECT_EQ(losses({"checkpointing.policy=first_m", "checkpointing.n=1"}), split);
  EXPECT_EQ(losses({"checkpointing.policy=list", "checkpointing.units=[\"blocks.1\"]"}), split);
  EXPECT_EQ(losses({"checkpointing.policy=selective"}), split);
  EXPECT_EQ(losses({"data.prefetch=0"}), split);
  const auto chunked = losses({"model.loss_chunk_tokens=7"});
  ASSERT_EQ(whole.size(), 12u);
  ASSERT_EQ(split.size(), 12u);
  ASSERT_EQ(chunked.size(), 12u);
  for (std::size_t i = 0; i < whole.size(); ++i) {
    EXPECT_NEAR(split[i], whole[i], 1e-5 * whole[i]) << i;
    EXPECT_NEAR(chunked[i], whole[i], 1e-5 * whole[i]) << i;
  }
}

TEST_F(Train, AModelOfOneBlock) {
  std::vector<std::vector<double>> losses;
  for (const char* policy : {"none", "every_n"}) {
    const auto outcome = train({"model.layers=1", std::string("checkpointing.policy=") + policy});
    ASSERT_EQ(outcome.code, 0) << outcome.err;
    losses.push_back(metrics().back()["losses"].get<std::vector<double>>());
    EXPECT_LT(losses.back().back(), losses.back().front());
  }
  EXPECT_EQ(losses[0], losses[1]);
}

// Budget and global batch are all that is given; what was predicted stands beside what was
// measured.
TEST_F(Train, TheBalanceIsFoundWithinTheBudget) {
  const std::vector<std::string> open = {"batch.micro_batch_size=0"};
  const auto run = [&](std::vector<std::string> settings) {
    settings.insert(settings.begin(), open.begin(), open.end());
    const auto outcome = train(settings);
    EXPECT_EQ(outcome.code, 0) << outcome.err;
    return outcome.out;
  };
  ASSERT_EQ(train({"batch.micro_batch_size=8"}).code, 0);
  const auto whole = metrics().back()["losses"].get<std::vector<double>>();

  const auto peak = metrics().back()["peak_bytes"].get<std::int64_t>();

  std::int64_t last_micro_batch = 8;
  for (const auto budget : {peak, peak * 3 / 4, peak / 2}) {
    const auto text = run({"memory.budget_bytes=" + std::to_string(budget)});
    EXPECT_THAT(text, AllOf(HasSubstr("  plan: "), HasSubstr(" predicted, ")));
    const auto lines = metrics();
    const auto& compared = lines[1]["plan"];
    const auto all_of = [](const auto& accounts) {
      double sum = 0;
      for (const auto& [name, bytes] : accounts.items()) sum += bytes.template get<double>();
      return sum;
    };
    const auto predicted = all_of(compared["predicted"]);
    EXPECT_NEAR(all_of(compared["measured"]), predicted, 0.03 * predicted) << budget;
    EXPECT_GT(compared["predicted_seconds"].get<double>(), 0);
    EXPECT_GT(compared["measured_seconds"].get<double>(), 0);
    const auto& summary = lines.back();
    EXPECT_LE(summary["peak_bytes"], budget);
    EXPECT_LE(summary["micro_batch"], last_micro_batch) << budget;
    last_micro_batch = summary["micro_batch"].get<std::int64_t>();
    EXPECT_EQ(last_micro_batch * summary["accumulation"].get<std::int64_t>(), 8);
    const auto losses = summary["losses"].get<std::vector<double>>();
    for (std::size_t i = 0; i < whole.size(); ++i) {
      EXPECT_NEAR(losses[i], whole[i], 1e-5 * whole[i]) << budget << ' ' << i;
    }
    if (budget == peak) {
      EXPECT_EQ(last_micro_batch, 8);
    }
  }
  EXPECT_LT(last_micro_batch, 8);
}

TEST_F(Train, ABudgetBelowTheFloorIsRefusedWithTheFloor) {
  const auto outcome = train({"batch.micro_batch_size=0", "memory.budget_bytes=100KiB"});
  EXPECT_EQ(outcome.code, 1);
  EXPECT_THAT(outcome.err,
              AllOf(HasSubstr("[plan] no balance fits memory.budget_bytes 100.00 KiB"),
                    HasSubstr("KiB, most of it "), HasSubstr(" are missing"),
                    HasSubstr("no lever alone is enough; the one that needs least: ")));
  const std::string before = "the nearest budget that works is ";
  const auto named = outcome.err.substr(outcome.err.find(before) + before.size());
  const auto nearest = named.substr(0, named.find(';'));
  EXPECT_EQ(
      train({"batch.micro_batch_size=0", "train.max_updates=2", "memory.budget_bytes=" + nearest})
          .code,
      0)
      << nearest;
  EXPECT_THAT(train({"batch.micro_batch_size=0", "memory.budget_bytes=180KiB"}).err,
              HasSubstr("the same training would fit: "));
  const auto warned =
      train({"batch.micro_batch_size=0", "memory.budget_bytes=100KiB", "memory.on_misfit=warn"});
  EXPECT_EQ(warned.code, 1);  // it begins, and runs out
  EXPECT_THAT(warned.out, HasSubstr(before));
  EXPECT_THAT(warned.err, HasSubstr("The budget is 100.00 KiB"));
}

TEST_F(Train, JsonGoesToStandardOutput) {
  const auto outcome = train({"train.max_updates=2", "train.sample_bytes=30"}, /*json=*/true);
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  std::istringstream lines(outcome.out);
  Json last;
  for (std::string line; std::getline(lines, line);) last = Json::parse(line);
  EXPECT_EQ(last["summary"], true);
}

TEST_F(Train, OutOfMemoryEndsWithTheMessage) {
  const auto outcome =
      train({"memory.budget_bytes=600KiB", "batch.micro_batch_size=8", "model.sequence_length=64"});
  EXPECT_EQ(outcome.code, 1);
  EXPECT_THAT(outcome.err,
              AllOf(HasSubstr("poise: error: "), HasSubstr("The budget is 600.00 KiB")));
  EXPECT_THAT(outcome.err, ::testing::Not(HasSubstr("frame #")));
  const auto summary = metrics().back();
  EXPECT_THAT(outcome.err, HasSubstr(summary["error"].get<std::string>()));
}

TEST_F(Train, BadRunsAreErrors) {
  const std::pair<const char*, const char*> cases[] = {
      {"model.builtin=llama", "model.builtin is \"llama\"; known: byte_gpt"},
      {"data.train=[]", "data.train is empty"},
      {"data.train=[\"/no/such/file\"]", "/no/such/file"},
      {"model.sequence_length=100000", "100000"},
      {"train.output_dir=/dev/null/out", "/dev/null/out"},
      {"checkpointing.policy=lots", "checkpointing.policy"},
  };
  for (const auto& [setting, message] : cases) {
    const auto outcome = train({setting});
    EXPECT_EQ(outcome.code, 1) << setting;
    EXPECT_THAT(outcome.err, AllOf(HasSubstr("poise: error: ["), HasSubstr(message)));
  }
}

TEST_F(Train, CtrlCEndsARunCleanly) {
  std::atomic<bool> over = false;
  std::thread finger([&] {
    // Pressed once the run has written its first line, so that its handler is in place.
    while (!over && metrics().empty()) std::this_thread::sleep_for(std::chrono::milliseconds(5));
    if (!over) kill(getpid(), SIGINT);
  });
  const auto outcome = train({"train.max_updates=100000"});
  over = true;
  finger.join();
  EXPECT_EQ(outcome.code, 130);
  const auto summary = metrics().back();
  EXPECT_EQ(summary["error"], "ended by signal 2");
  EXPECT_LT(summary["updates"], 100000);
}

// Every stop of two updates of four micro-batches, as often as it is passed.
TEST_F(Train, ProfilesUpdates) {
  const auto outcome = train({"train.profile_updates=[2,3]"});
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  std::ifstream file(folder_ / "out" / "trace.json");
  const auto trace = Json::parse(file);
  std::map<std::string, int> ranges;
  bool operators = false;
  for (const auto& event : trace["traceEvents"]) {
    const auto name = event.value("name", "");
    if (name.starts_with("poise::")) ++ranges[name];
    operators = operators || name.starts_with("aten::");
  }
  EXPECT_TRUE(operators);
  const std::map<std::string, int> want = {
      {"poise::data", 2},       {"poise::open_window", 2}, {"poise::forward", 8},
      {"poise::weigh_loss", 8}, {"poise::backward", 8},    {"poise::sum_up", 2},
      {"poise::factor", 2},     {"poise::optimizer", 2},   {"poise::loss_scale", 2},
      {"poise::result", 2},     {"poise::update", 2}};
  EXPECT_EQ(ranges, want);
}

}  // namespace
}  // namespace poise::cli

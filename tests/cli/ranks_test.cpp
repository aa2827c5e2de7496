// `poise train` as two processes over gloo, started as torchrun starts them: the curve of one rank
// at every stage, and the end of both when one is killed.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "support/free_port.h"

namespace poise::cli {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;
using Json = nlohmann::json;
using Clock = std::chrono::steady_clock;

constexpr int kLong = 150;  // micro-batches of a window that takes seconds

class Ranks : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = ::testing::TempDir() + "/poise_ranks_XXXXXX";
    ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
    folder_ = pattern;
    std::ofstream corpus(folder_ + "/text.txt");
    for (int i = 0; i < 400; ++i) corpus << "the cat sat on the mat, " << i % 7 << " times.\n";
    const Json config = {
        {"batch", {{"micro_batch_size", 2}, {"global_batch_size", 8}}},
        {"optimizer", {{"lr", 3e-3}}},
        {"model", {{"layers", 2}, {"width", 16}, {"heads", 2}, {"sequence_length", 16}}},
        {"data", {{"train", {folder_ + "/text.txt"}}}},
        {"train", {{"max_updates", 6}, {"log_every", 2}, {"validation_batches", 2}}},
    };
    std::ofstream(folder_ + "/run.json") << config.dump();
  }
  // torch's libraries export a std::filesystem of their own, whose remove_all() crashes.
  void TearDown() override { std::system(("rm -rf '" + folder_ + "'").c_str()); }

  // One process for each rank of the world; rank 0's output goes to folder/name.
  std::vector<pid_t> start(int ranks, const std::string& name,
                           const std::vector<std::string>& settings) {
    const auto port = std::to_string(testing::free_port());
    std::vector<pid_t> processes;
    for (int rank = 0; rank < ranks; ++rank) {
      const auto text = std::to_string(rank);
      std::vector<std::string> words{"env", "OMP_NUM_THREADS=1"};
      if (ranks > 1) {
        for (const auto& word :
             {"RANK=" + text, "LOCAL_RANK=" + text, "WORLD_SIZE=" + std::to_string(ranks),
              std::string("MASTER_ADDR=127.0.0.1"), "MASTER_PORT=" + port}) {
          words.push_back(word);
        }
      }
      for (const auto& word :
           {std::string(POISE_PROGRAM), std::string("train"), folder_ + "/run.json",
            std::string("--set"), "train.output_dir=" + folder_ + "/" + name}) {
        words.push_back(word);
      }
      for (const auto& setting : settings) {
        words.push_back("--set");
        words.push_back(setting);
      }
      std::vector<char*> arguments;
      for (auto& word : words) arguments.push_back(word.data());
      arguments.push_back(nullptr);
      posix_spawn_file_actions_t actions;
      posix_spawn_file_actions_init(&actions);
      const auto log = folder_ + "/" + name + "." + text + ".log";
      for (const int descriptor : {1, 2}) {
        posix_spawn_file_actions_addopen(&actions, descriptor, log.c_str(),
                                         O_WRONLY | O_CREAT | O_APPEND, 0644);
      }
      pid_t process = 0;
      EXPECT_EQ(::posix_spawnp(&process, "env", &actions, nullptr, arguments.data(), environ), 0);
      posix_spawn_file_actions_destroy(&actions);
      processes.push_back(process);
    }
    return processes;
  }

  static int wait_for(pid_t process) {
    int status = 0;
    ::waitpid(process, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  }

  std::string log_of(const std::string& name, int rank) const {
    std::stringstream text;
    text << std::ifstream(folder_ + "/" + name + "." + std::to_string(rank) + ".log").rdbuf();
    return text.str();
  }

  Json summary(const std::string& name) const {
    std::ifstream file(folder_ + "/" + name + "/metrics.jsonl");
    Json last;
    for (std::string line; std::getline(file, line);) last = Json::parse(line);
    return last;
  }

  std::string folder_;
};

TEST_F(Ranks, EveryStageGivesTheCurveOfOneRank) {
  EXPECT_EQ(wait_for(start(1, "one", {}).front()), 0);
  const auto alone = summary("one");
  std::vector<Json> by_stage;
  for (int stage = 0; stage <= 3; ++stage) {
    const auto name = "stage" + std::to_string(stage);
    for (const auto process : start(2, name, {"zero.stage=" + std::to_string(stage)})) {
      EXPECT_EQ(wait_for(process), 0) << log_of(name, 0) << log_of(name, 1);
    }
    by_stage.push_back(summary(name));
    const auto& got = by_stage.back();
    EXPECT_EQ(got["ranks"], 2);
    EXPECT_EQ(got["stage"], stage);
    ASSERT_EQ(got["losses"].size(), alone["losses"].size());
    for (std::size_t i = 0; i < got["losses"].size(); ++i) {
      const double loss = alone["losses"][i];
      EXPECT_NEAR(got["losses"][i].get<double>(), loss, 1e-5 * loss) << stage;
    }
  }
  EXPECT_EQ(by_stage[0]["losses"], by_stage[1]["losses"]);  // to the bit
  EXPECT_EQ(by_stage[2]["losses"], by_stage[3]["losses"]);
  EXPECT_LT(by_stage[1]["peak_bytes"], by_stage[0]["peak_bytes"]);
}

// Four ranks that shard in pairs, which are replicas of each other.
TEST_F(Ranks, ShardGroupsGiveTheCurveOfOneRank) {
  EXPECT_EQ(wait_for(start(1, "one", {"zero.stage=3", "zero.shard_group_size=2"}).front()), 0)
      << log_of("one", 0);
  const auto alone = summary("one");
  const std::vector<std::string> settings{"zero.stage=3", "batch.micro_batch_size=1",
                                          "zero.shard_group_size=2"};
  for (const auto process : start(4, "pairs", settings)) {
    EXPECT_EQ(wait_for(process), 0) << log_of("pairs", 0) << log_of("pairs", 1);
  }
  EXPECT_THAT(log_of("pairs", 0), HasSubstr("parameters are sharded in groups of 2"));
  const auto got = summary("pairs");
  ASSERT_EQ(got["losses"].size(), alone["losses"].size());
  for (std::size_t i = 0; i < got["losses"].size(); ++i) {
    const double loss = alone["losses"][i];
    EXPECT_NEAR(got["losses"][i].get<double>(), loss, 1e-5 * loss);
  }
  for (const auto process : start(2, "odd", {"zero.stage=3", "zero.shard_group_size=3"})) {
    EXPECT_EQ(wait_for(process), 1);
  }
  EXPECT_THAT(log_of("odd", 0), HasSubstr("shard groups of 3 ranks do not divide the 2 ranks"));
}

// Saved by two processes at stage 3, resumed by two at stage 3 and 2 and by one.
TEST_F(Ranks, ResumeOnAnyNumberOfRanks) {
  const auto run = [&](int ranks, const std::string& name, std::vector<std::string> settings) {
    settings.push_back("schedule.total_updates=6");
    for (const auto process : start(ranks, name, settings)) {
      EXPECT_EQ(wait_for(process), 0) << log_of(name, 0) << log_of(name, 1);
    }
    return summary(name)["losses"];
  };
  const auto whole = run(2, "whole", {"zero.stage=3"});
  run(2, "saved", {"zero.stage=3", "train.max_updates=3", "state.save_every=2"});
  const auto resume = "state.resume=" + folder_ + "/saved/state";
  EXPECT_EQ(run(2, "three", {"zero.stage=3", resume}), whole);
  EXPECT_EQ(run(2, "two", {"zero.stage=2", resume}), whole);
  const auto alone = run(1, "alone", {resume});
  ASSERT_EQ(alone.size(), 6u);
  for (std::size_t i = 0; i < 6; ++i) {
    const double loss = whole[i];
    EXPECT_NEAR(alone[i].get<double>(), loss, 1e-5 * loss);
  }
}

// A signal that reaches one of two ranks: both save and end.
TEST_F(Ranks, ASignalToOneSavesOnBoth) {
  const std::vector<std::string> settings{"zero.stage=2", "train.max_updates=100000",
                                          "state.save_every=90000"};
  const auto processes = start(2, "asked", settings);
  for (int i = 0; i < 300 && log_of("asked", 0).find("update 2/") == std::string::npos; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
  }
  ::kill(processes[1], SIGUSR1);
  EXPECT_EQ(wait_for(processes[1]), 128 + SIGUSR1) << log_of("asked", 1);
  EXPECT_EQ(wait_for(processes[0]), 128 + SIGTERM) << log_of("asked", 0);
  EXPECT_THAT(log_of("asked", 0), HasSubstr("saved after update "));
  const auto updates = summary("asked")["updates"].get<int>();
  const auto more = "train.max_updates=" + std::to_string(updates + 2);
  for (const auto process : start(2, "asked", {"zero.stage=2", more, "state.resume=auto"})) {
    EXPECT_EQ(wait_for(process), 0) << log_of("asked", 0);
  }
  EXPECT_EQ(summary("asked")["losses"].size(), static_cast<std::size_t>(updates + 2));
}

// In the middle of a window that would take much longer: both drop it, and its samples and random
// numbers come again.
TEST_F(Ranks, ASignalInAWindowGivesItBackOnBoth) {
  for (const int stage : {0, 3}) {
    SCOPED_TRACE(stage);
    const auto name = "given_back" + std::to_string(stage);
    std::vector<std::string> settings{"zero.stage=" + std::to_string(stage),
                                      "batch.global_batch_size=" + std::to_string(4 * kLong),
                                      "model.dropout=0.2",
                                      "train.max_updates=3",
                                      "state.save_every=1000",
                                      "schedule.total_updates=3",
                                      "state.rehearse=false"};
    for (const auto process : start(2, name + "whole", settings)) EXPECT_EQ(wait_for(process), 0);
    const auto whole = summary(name + "whole")["losses"];

    settings.push_back("state.resume=auto");
    const auto processes = start(2, name, settings);
    for (int i = 0; i < 3000 && log_of(name, 0).find("update 1/") == std::string::npos; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    const auto begin = Clock::now();
    ::kill(processes[1], SIGTERM);
    EXPECT_EQ(wait_for(processes[0]), 128 + SIGTERM) << log_of(name, 0);
    EXPECT_EQ(wait_for(processes[1]), 128 + SIGTERM) << log_of(name, 1);
    const std::chrono::duration<double> took = Clock::now() - begin;
    EXPECT_THAT(log_of(name, 0), HasSubstr("saved after update 1 in ")) << took.count();
    ASSERT_EQ(summary(name)["updates"], 1);

    for (const auto process : start(2, name, settings)) {
      EXPECT_EQ(wait_for(process), 0) << log_of(name, 0) << log_of(name, 1);
    }
    EXPECT_EQ(summary(name)["losses"], whole);
  }
}

// In the middle of a validation that would take seconds: both leave it after the same batch, and
// the resumed run makes it.
TEST_F(Ranks, ASignalInAValidationEndsItOnBoth) {
  std::ofstream corpus(folder_ + "/long.txt");
  for (int i = 0; i < 4000; ++i) corpus << "the cat sat on the mat, " << i % 7 << " times.\n";
  corpus.close();
  const std::vector<std::string> settings{"zero.stage=3",
                                          "train.max_updates=2",
                                          "train.log_every=1",
                                          "train.validate_every=1",
                                          "train.validation_batches=100000",
                                          "data.validation=[\"" + folder_ + "/long.txt\"]",
                                          "state.save_every=1000",
                                          "state.resume=auto",
                                          "state.rehearse=false"};
  for (const auto process : start(2, "judged", settings)) EXPECT_EQ(wait_for(process), 0);
  const auto whole = summary("judged");
  EXPECT_THAT(log_of("judged", 0), HasSubstr("validation after update 1:"));

  const auto processes = start(2, "left", settings);
  for (int i = 0; i < 3000 && log_of("left", 0).find("update 1/") == std::string::npos; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  ::kill(processes[1], SIGTERM);
  EXPECT_EQ(wait_for(processes[0]), 128 + SIGTERM) << log_of("left", 0);
  EXPECT_EQ(wait_for(processes[1]), 128 + SIGTERM) << log_of("left", 1);
  EXPECT_THAT(log_of("left", 0), HasSubstr("saved after update 1 in "));
  EXPECT_THAT(log_of("left", 0), Not(HasSubstr("validation after update")));
  ASSERT_EQ(summary("left")["updates"], 1);

  for (const auto process : start(2, "left", settings)) EXPECT_EQ(wait_for(process), 0);
  EXPECT_EQ(summary("left")["losses"], whole["losses"]);
  EXPECT_EQ(summary("left")["val_loss"], whole["val_loss"]);
  EXPECT_THAT(log_of("left", 0), HasSubstr("validation after update 1:"));
}

TEST_F(Ranks, AKilledRankEndsTheOther) {
  const auto processes = start(2, "killed", {"train.max_updates=1000000", "zero.stage=2"});
  for (int i = 0; i < 300 && log_of("killed", 0).find("update 2/") == std::string::npos; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
  }
  ASSERT_THAT(log_of("killed", 0), HasSubstr("update 2/"));
  ::kill(processes[1], SIGKILL);
  const auto begin = Clock::now();
  EXPECT_EQ(wait_for(processes[1]), 128 + SIGKILL);
  EXPECT_EQ(wait_for(processes[0]), 1);
  EXPECT_LT(Clock::now() - begin, std::chrono::seconds(15));
  EXPECT_THAT(log_of("killed", 0), HasSubstr("rank 1"));
}

TEST_F(Ranks, CtrlCOnOneEndsAll) {
  const auto processes = start(2, "ended", {"train.max_updates=1000000"});
  for (int i = 0; i < 300 && log_of("ended", 0).find("update 2/") == std::string::npos; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
  }
  ::kill(processes[0], SIGINT);
  const auto begin = Clock::now();
  EXPECT_EQ(wait_for(processes[0]), 128 + SIGINT);
  EXPECT_NE(wait_for(processes[1]), 0);
  EXPECT_LT(Clock::now() - begin, std::chrono::seconds(15));
  EXPECT_THAT(log_of("ended", 1), HasSubstr("signal 2"));
}

}  // namespace
}  // namespace poise::cli

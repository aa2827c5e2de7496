// `poise train` that saves and is resumed: the lines of the run that was never stopped, to the bit.
#include <ATen/Parallel.h>
#include <gmock/gmock.h>
#include <signal.h>
#include <sys/stat.h>

#include <atomic>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <thread>

#include "command.h"
#include "poise/error.h"
#include "poise/state.h"
#include "poise/stream.h"
#include "state/files.h"
#include "support/temp_folder.h"

namespace poise::cli {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using Json = nlohmann::ordered_json;

class Resumed : public ::testing::Test {
 protected:
  void TearDown() override { at::set_num_threads(threads_); }
  void SetUp() override {
    at::set_num_threads(1);  // the model is tiny: several wait for each other
    std::string text;
    for (int i = 0; i < 37; ++i) text += "the cat sat on the mat, " + std::to_string(i % 7) + "\n";
    const Json config = {
        {"batch", {{"micro_batch_size", 2}, {"accumulation", 3}}},
        {"optimizer", {{"lr", 3e-3}}},
        {"schedule", {{"type", "cosine"}, {"warmup_updates", 2}}},
        // 48 samples: an update of 6 ends in the middle of an epoch but at every eighth.
        {"model",
         {{"layers", 2}, {"width", 16}, {"heads", 2}, {"sequence_length", 16}, {"dropout", 0.2}}},
        {"data",
         {{"train", Json::array({folder_.write("text.txt", text)})}, {"validation_fraction", 0.2}}},
        {"train", {{"max_updates", 13}, {"log_every", 4}, {"validate_every", 5}}},
    };
    folder_.write("run.json", config.dump());
  }

  Outcome train(const std::string& out, const std::vector<std::string>& settings) {
    std::vector<std::string> arguments{"train", folder_ / "run.json", "--set",
                                       "train.output_dir=" + folder_ / out};
    for (const auto& setting : settings) {
      arguments.push_back("--set");
      arguments.push_back(setting);
    }
    return command(arguments);
  }

  // Without what a clock measures.
  std::vector<Json> lines(const std::string& out) {
    std::vector<Json> all;
    std::ifstream file(folder_ / out + "/metrics.jsonl");
    for (std::string line; std::getline(file, line);) {
      all.push_back(Json::parse(line));
      for (const auto* key :
           {"tokens_per_second", "tokens_per_s", "peak_bytes", "accounts", "host_bytes"}) {
        all.back().erase(key);
      }
    }
    return all;
  }

  std::string operator/(const std::string& name) const { return folder_ / name; }
  const int threads_ = at::get_num_threads();
  testing::TempFolder folder_;
};

TEST_F(Resumed, GoesOnInTheMiddleOfARamp) {
  const std::vector<std::string> ramp{"batch.ramp_from=1", "batch.ramp_updates=8",
                                      "optimizer.lr_scaling=sqrt", "optimizer.lr_batch_size=6"};
  ASSERT_EQ(train("whole", ramp).err, "");
  const auto want = lines("whole");
  for (const int stop : {3, 7}) {
    auto settings = ramp;
    settings.insert(settings.end(),
                    {"state.save_every=1", "state.resume=auto", "schedule.total_updates=13"});
    auto first = settings;
    first.push_back("train.max_updates=" + std::to_string(stop));
    const auto out = "ramp" + std::to_string(stop);
    ASSERT_EQ(train(out, first).code, 0);
    ASSERT_EQ(train(out, settings).code, 0);
    const auto got = lines(out);
    EXPECT_EQ(got.back()["losses"], want.back()["losses"]);
    EXPECT_EQ(got.back()["validation_loss"], want.back()["validation_loss"]);
  }
  ASSERT_EQ(train("flat", {}).err, "");
  EXPECT_NE(lines("flat").back()["losses"], want.back()["losses"]);
}

TEST_F(Resumed, GoesOnAsIfItHadNeverStopped) {
  ASSERT_EQ(train("whole", {}).err, "");
  const auto want = lines("whole");
  ASSERT_EQ(want.back()["losses"].size(), 13u);
  for (const int stop : {3, 6, 11}) {
    SCOPED_TRACE(stop);
    const auto out = "part" + std::to_string(stop);
    const std::vector<std::string> settings{"state.save_every=3", "state.resume=auto",
                                            "schedule.total_updates=13"};
    auto first = settings;
    first.push_back("train.max_updates=" + std::to_string(stop));
    const auto begun = train(out, first);
    ASSERT_EQ(begun.code, 0) << begun.err;
    EXPECT_THAT(begun.out, HasSubstr("no save in "));
    const auto resumed = train(out, settings);
    ASSERT_EQ(resumed.code, 0) << resumed.err;
    EXPECT_THAT(resumed.out, HasSubstr("resumed from "));
    const auto got = lines(out);
    EXPECT_EQ(got.back()["losses"], want.back()["losses"]);
    EXPECT_EQ(got.back()["val_loss"], want.back()["val_loss"]);
  }
}

// What a save in the middle of the run is resumed from, lines and all.
TEST_F(Resumed, FromASaveInTheMiddle) {
  ASSERT_EQ(train("whole", {}).err, "");
  ASSERT_EQ(train("part", {"state.save_every=3"}).code, 0);
  const auto saves = state::list(*this / "part/state");
  ASSERT_EQ(saves.size(), 5u);  // 3, 6, 9, 12 and the end
  EXPECT_EQ(lines("part"), lines("whole"));
  for (const auto& save : saves) {
    const auto resumed = train("part", {"state.resume=" + save});
    ASSERT_EQ(resumed.code, 0) << resumed.err;
    EXPECT_EQ(lines("part"), lines("whole")) << save;
  }
}

TEST_F(Resumed, KeepsTheNewestSaves) {
  ASSERT_EQ(train("out", {"state.save_every=2", "state.save_total_limit=2"}).code, 0);
  const auto saves = state::list(*this / "out/state");
  ASSERT_EQ(saves.size(), 2u);
  EXPECT_THAT(saves[0], HasSubstr("update-00000012"));
  EXPECT_THAT(saves[1], HasSubstr("update-00000013"));
}

// The one after the validation with the lowest loss stays, also where the run was resumed in
// between.
TEST_F(Resumed, KeepsTheBestSave) {
  const std::vector<std::string> settings{"state.save_every=4", "state.save_total_limit=1",
                                          "state.keep_best=true", "train.validate_every=1"};
  const auto best_of = [&](const std::string& out) {
    double lowest = std::numeric_limits<double>::infinity();
    int update = 0;
    for (const auto& line : lines(out)) {
      if (!line.contains("eval_loss") || line["eval_loss"].get<double>() >= lowest) continue;
      lowest = line["eval_loss"];
      update = line["step"];
    }
    return "update-000000" + std::string(update < 10 ? "0" : "") + std::to_string(update);
  };
  bool was_overtaken = false;  // by a worse last one, somewhere
  for (const auto* rate : {"3e-3", "0.5", "5"}) {
    SCOPED_TRACE(rate);
    auto with_rate = settings;
    with_rate.push_back("optimizer.lr=" + std::string(rate));
    const auto out = "best" + std::string(rate);
    ASSERT_EQ(train(out, with_rate).code, 0);
    const auto best = best_of(out);
    EXPECT_EQ(state::link_target(*this / out + "/state/best"), best);
    was_overtaken = was_overtaken || best != "update-00000013";
    std::vector<std::string> kept{*this / out + "/state/update-00000013"};
    if (best != "update-00000013") kept.insert(kept.begin(), *this / out + "/state/" + best);
    EXPECT_EQ(state::list(*this / out + "/state"), kept);
    state::verify(*this / out + "/state/best");

    auto resumed = with_rate, begun = with_rate;
    for (auto* both : {&resumed, &begun}) {
      both->insert(both->end(), {"state.resume=auto", "schedule.total_updates=13"});
    }
    begun.push_back("train.max_updates=7");
    ASSERT_EQ(train(out + "again", begun).code, 0);
    ASSERT_EQ(train(out + "again", resumed).code, 0);
    EXPECT_EQ(state::link_target(*this / out + "again/state/best"), best);
  }
  EXPECT_TRUE(was_overtaken);
}

// The open window is given back: its samples come again, its random numbers too.
TEST_F(Resumed, AfterASignalToo) {
  ASSERT_EQ(train("whole", {"train.max_updates=40"}).code, 0);
  const auto want = lines("whole").back()["losses"];
  for (const int signal : {SIGTERM, SIGUSR1}) {
    SCOPED_TRACE(signal);
    const auto out = "signal" + std::to_string(signal);
    std::atomic<bool> over = false;
    std::thread sender([&] {  // once the handlers are in place, which the first line shows
      while (!over && lines(out).empty()) std::this_thread::yield();
      if (!over) kill(getpid(), signal);
    });
    const std::vector<std::string> settings{"train.max_updates=40", "state.save_every=1000",
                                            "state.resume=auto"};
    const auto stopped = train(out, settings);
    over = true;
    sender.join();
    ASSERT_EQ(stopped.code, 128 + signal) << stopped.err;
    EXPECT_THAT(stopped.out, HasSubstr("saved after update "));
    const auto updates = lines(out).back()["updates"].get<int>();
    EXPECT_LT(updates, 40);
    const auto resumed = train(out, settings);
    ASSERT_EQ(resumed.code, 0) << resumed.err;
    EXPECT_EQ(lines(out).back()["losses"], want) << "after " << updates;
  }
}

// Wherever the signal comes, in the middle of an update or of a save, too.
TEST_F(Resumed, AfterASignalInAnUpdateOrASave) {
  const std::vector<std::string> away{"offload.optimizer=file",
                                      "offload.directory=" + folder_.path(),
                                      "offload.block_bytes=4096", "offload.staging_bytes=65536"};
  const auto with = [&](std::vector<std::string> settings) {
    settings.insert(settings.end(), away.begin(), away.end());
    return settings;
  };
  ASSERT_EQ(train("whole", with({})).code, 0);
  const auto want = lines("whole").back()["losses"];
  for (const bool asynchronous : {false, true}) {
    for (const int milliseconds : {0, asynchronous ? 700 : 400}) {
      SCOPED_TRACE(join(asynchronous ? "asynchronous " : "", milliseconds));
      const auto out = join("signal", asynchronous, milliseconds);
      const auto settings = with({"state.save_every=1", "state.resume=auto", "state.rehearse=false",
                                  join("state.asynchronous=", asynchronous ? "true" : "false")});
      std::atomic<bool> over = false;
      std::thread sender([&] {
        while (!over && lines(out).empty()) std::this_thread::yield();
        std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds));
        if (!over) kill(getpid(), SIGTERM);
      });
      Stream::set_test_delay(static_cast<std::uint64_t>(milliseconds), 60'000);
      const auto stopped = train(out, settings);
      Stream::set_test_delay(0, 0);
      over = true;
      sender.join();
      ASSERT_EQ(stopped.code, 128 + SIGTERM) << stopped.err;
      EXPECT_THAT(stopped.out, HasSubstr("saved after update "));
      const auto updates = lines(out).back()["updates"].get<int>();
      const auto saved = state::list(*this / out + "/state");
      ASSERT_FALSE(saved.empty());
      EXPECT_THAT(saved.back(),
                  ::testing::EndsWith(join("update-000000", updates < 10 ? "0" : "", updates)));
      const auto resumed = train(out, settings);
      ASSERT_EQ(resumed.code, 0) << resumed.err;
      EXPECT_EQ(lines(out).back()["losses"], want) << "after " << updates;
    }
  }
}

// One that comes by two ways, as from Slurm and from torchrun that Slurm has told, too.
TEST_F(Resumed, AfterASignalThatComesTwice) {
  const auto before = signal(SIGTERM, SIG_IGN);  // one that comes when the run is over
  std::atomic<bool> over = false;
  std::thread sender([&] {
    while (!over && lines("out").empty()) std::this_thread::yield();
    for (int i = 0; i < 5 && !over; ++i) {
      kill(getpid(), SIGTERM);
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
  });
  Stream::set_test_delay(1, 60'000);  // the save takes a while
  const auto stopped = train("out", {"state.save_every=1000", "state.rehearse=false"});
  Stream::set_test_delay(0, 0);
  over = true;
  sender.join();
  signal(SIGTERM, before);
  EXPECT_EQ(stopped.code, 128 + SIGTERM) << stopped.err;
  EXPECT_EQ(state::list(*this / "out/state").size(), 1u);
}

// A run that goes on from somewhere else has made no save itself.
TEST_F(Resumed, AfterASignalBeforeTheFirstUpdate) {
  ASSERT_EQ(train("first", {"state.save_every=4", "train.max_updates=4"}).code, 0);
  const std::vector<std::string> settings{"state.save_every=100",
                                          "state.resume=" + *this / "first/state"};
  std::atomic<bool> over = false;
  std::thread sender([&] {
    while (!over && !state::is_there(*this / "other/metrics.jsonl")) std::this_thread::yield();
    if (!over) kill(getpid(), SIGTERM);
  });
  Stream::set_test_delay(1, 100'000);  // resuming and rehearsing take a while
  const auto stopped = train("other", settings);
  Stream::set_test_delay(0, 0);
  over = true;
  sender.join();
  ASSERT_EQ(stopped.code, 128 + SIGTERM) << stopped.err;
  EXPECT_THAT(stopped.out, HasSubstr("saved after update 4 in "));
  EXPECT_EQ(state::list(*this / "other/state").size(), 1u);
}

// A validation that a signal has ended is made by the run that goes on.
TEST_F(Resumed, AfterASignalInAValidation) {
  std::string text;
  for (int i = 0; i < 6000; ++i) text += "the cat sat on the mat, " + std::to_string(i % 7) + "\n";
  const std::vector<std::string> settings{
      "train.max_updates=3",
      "train.log_every=1",
      "train.validate_every=1",
      "train.validation_batches=100000",
      "data.validation=[\"" + folder_.write("long.txt", text) + "\"]",
      "state.save_every=1000",
      "state.resume=auto"};
  ASSERT_EQ(train("whole", settings).code, 0);
  std::atomic<bool> over = false;
  std::thread sender([&] {
    while (!over && lines("out").empty()) std::this_thread::yield();
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    if (!over) kill(getpid(), SIGTERM);
  });
  const auto stopped = train("out", settings);
  over = true;
  sender.join();
  ASSERT_EQ(stopped.code, 128 + SIGTERM) << stopped.err;
  EXPECT_THAT(stopped.out, HasSubstr("saved after update 1 "));
  EXPECT_THAT(stopped.out, Not(HasSubstr("validation after update 1")));
  const auto resumed = train("out", settings);
  ASSERT_EQ(resumed.code, 0) << resumed.err;
  EXPECT_EQ(lines("out"), lines("whole"));
}

TEST_F(Resumed, RefusesWhatDoesNotFit) {
  ASSERT_EQ(train("out", {"state.save_every=100", "train.max_updates=2"}).code, 0);
  const std::pair<std::vector<std::string>, const char*> cases[] = {
      {{"state.resume=/no/such/save"}, "no whole save in /no/such/save"},
      {{"state.resume=auto", "engine.seed=7"}, "was made with other data"},
      {{"state.resume=auto", "data.shuffle=false"}, "was made with other data"},
      {{"state.resume=auto", "model.width=32"}, "has shape"},
      {{"state.resume=auto", "model.layers=3"}, "it has no parameter 'blocks.2."},
      {{"state.resume=auto", "optimizer.type=sgd"}, "was saved with the optimizer adamw"},
      {{"state.save_total_limit=2"}, "is only for state.save_every above 0"},
      {{"state.keep_best=true"}, "is only for state.save_every above 0"},
  };
  for (const auto& [settings, says] : cases) {
    const auto outcome = train("out", settings);
    EXPECT_EQ(outcome.code, 1) << says;
    EXPECT_THAT(outcome.err, HasSubstr(says));
  }
}

TEST_F(Resumed, InspectShowsComparesAndExports) {
  ASSERT_EQ(train("out", {"state.save_every=2", "train.max_updates=4"}).code, 0);
  const auto state = *this / "out/state";
  const auto shown = command({"inspect", state});
  EXPECT_EQ(shown.code, 0);
  EXPECT_THAT(shown.out, AllOf(HasSubstr("after 2 updates"), HasSubstr("after 4 updates"),
                               HasSubstr("adamw, 2 moments"), HasSubstr("whole: every byte"),
                               HasSubstr("latest: " + state + "/update-00000004")));
  const auto same = command({"inspect", state + "/update-00000002", state + "/update-00000002"});
  EXPECT_EQ(same.code, 0) << same.err;
  EXPECT_THAT(same.out, HasSubstr("hold the same state"));
  const auto differ = command({"inspect", state + "/update-00000002", state});
  EXPECT_EQ(differ.code, 1);
  EXPECT_THAT(differ.out, AllOf(HasSubstr("updates: 2 and 4"), HasSubstr("master of "),
                                HasSubstr("moment.1 of ")));
  const auto exported = command({"inspect", state, "--export", *this / "model.safetensors"});
  EXPECT_EQ(exported.code, 0) << exported.err;
  EXPECT_THAT(testing::bytes_of(*this / "model.safetensors"),
              AllOf(HasSubstr("\"format\":\"pt\""), HasSubstr("blocks.1.")));

  const auto pipe = *this / "pipe";  // or /dev/stdout
  ASSERT_EQ(mkfifo(pipe.c_str(), 0600), 0);
  EXPECT_THAT(command({"inspect", state, "--export", pipe}).err,
              HasSubstr("pipe is there and is no file"));
  struct stat found {};
  EXPECT_TRUE(stat(pipe.c_str(), &found) == 0 && S_ISFIFO(found.st_mode));

  const auto shard = state + "/update-00000002/rank-00000.safetensors";
  auto bytes = testing::bytes_of(shard);
  bytes[bytes.size() / 2] ^= 4;
  std::ofstream(shard, std::ios::binary) << bytes;
  const auto damaged = command({"inspect", state});
  EXPECT_EQ(damaged.code, 1);
  EXPECT_THAT(damaged.out, AllOf(HasSubstr("DAMAGED: "), HasSubstr("whole: every byte")));
  EXPECT_THAT(command({"inspect", *this / "nothing"}).err, HasSubstr("no whole save in"));
}

}  // namespace
}  // namespace poise::cli

// The commands, their arguments and exit codes.
#include <gmock/gmock.h>

#include <fstream>

#include "command.h"
#include "poise/config.h"

namespace poise::cli {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;

TEST(Run, VersionNamesTorch) {
  const auto outcome = command({"--version"});
  EXPECT_EQ(outcome.code, 0);
  EXPECT_THAT(outcome.out, ::testing::MatchesRegex("poise [0-9.]+ \\(torch [0-9.]+\\)\n"));
}

TEST(Run, WrongArgumentsGiveTwo) {
  for (const std::vector<std::string>& arguments : {std::vector<std::string>{},
                                                    {"fly"},
                                                    {"train"},
                                                    {"config"},
                                                    {"train", "a", "b"},
                                                    {"train", "a", "--sett", "b"},
                                                    {"config", "--reference", "--print", "a"},
                                                    {"train", "a", "--set"},
                                                    {"plan"},
                                                    {"plan", "a", "--model", "gpt2"},
                                                    {"plan", "--model", "gpt2", "--seq", "0"}}) {
    const auto outcome = command(arguments);
    EXPECT_EQ(outcome.code, 2) << ::testing::PrintToString(arguments);
    EXPECT_FALSE(outcome.err.empty());
    EXPECT_EQ(outcome.out, "");
  }
}

// Flags are few: what is new here is new for all who use it.
TEST(Run, FlagsAreFrozen) {
  const auto help = command({"train", "--help"});
  EXPECT_EQ(help.code, 0);
  EXPECT_THAT(help.out, AllOf(HasSubstr("--set"), HasSubstr("--json"), HasSubstr("run.json")));
  EXPECT_THAT(command({"config", "--help"}).out,
              AllOf(HasSubstr("--reference"), HasSubstr("--print")));
  EXPECT_THAT(command({"--help"}).out, AllOf(HasSubstr("train"), HasSubstr("plan"),
                                             HasSubstr("config"), HasSubstr("doctor")));
  EXPECT_THAT(command({"plan", "--help"}).out,
              AllOf(HasSubstr("--model"), HasSubstr("--gpus"), HasSubstr("--seq"),
                    HasSubstr("--global-batch"), HasSubstr("--micro-batch"), HasSubstr("--memory"),
                    HasSubstr("--precision"), HasSubstr("--json")));
}

TEST(Run, PlanAnswersNamesAndRefuses) {
  const std::vector<std::string> llama{"plan",   "--model",        "llama-3.2-1b",
                                       "--gpus", "8xA100-40GB",    "--seq",
                                       "2048",   "--global-batch", "64"};
  const auto with = [&](std::vector<std::string> more) {
    auto arguments = llama;
    arguments.insert(arguments.end(), more.begin(), more.end());
    return command(arguments);
  };
  EXPECT_EQ(with({}).code, 0);
  EXPECT_THAT(with({}).out, AllOf(HasSubstr("The fastest plan that fits"), HasSubstr("optimizer"),
                                  HasSubstr("<- chosen"), HasSubstr("micro_batch_size")));
  const auto small = with({"--memory", "1GiB"});
  EXPECT_EQ(small.code, 1);
  EXPECT_THAT(small.out,
              AllOf(HasSubstr("No plan fits into 1.00 GiB"), HasSubstr("with --memory")));
  const auto named = small.out.substr(small.out.find("with --memory ") + 14);
  EXPECT_EQ(with({"--memory", named.substr(0, named.find(' '))}).code, 0) << named;
  EXPECT_THAT(with({"--json"}).out, HasSubstr("\"fits\": true"));
  EXPECT_THAT(with({"--micro-batch", "3"}).err, HasSubstr("these do: 1, 2, 4, 8"));
  EXPECT_THAT(command({"plan", "--model", "lama", "--gpus", "1xL4-24GB", "--seq", "8",
                       "--global-batch", "1"})
                  .err,
              HasSubstr("llama-3-8b"));
  EXPECT_THAT(command({"plan", "--model", "gpt2"}).err, HasSubstr("also needs --gpus"));
}

TEST(Run, ConfigPrintsTheReferenceAndFiles) {
  EXPECT_EQ(command({"config", "--reference"}).out, config::reference());
  const std::string path = ::testing::TempDir() + "/poise_cli_run_test.json";
  std::ofstream(path) << R"({"train": {"max_updates": 7}})";
  const auto outcome = command({"config", "--print", path});
  EXPECT_EQ(outcome.code, 0);
  EXPECT_EQ(Config::from_json(outcome.out).train.max_updates, 7);
}

TEST(Run, ErrorsGoToStandardErrorWithOne) {
  const auto outcome = command({"train", "/no/such/run.json"});
  EXPECT_EQ(outcome.code, 1);
  EXPECT_THAT(outcome.err, AllOf(StartsWith("poise: error: [config] cannot read"),
                                 HasSubstr("/no/such/run.json")));
  EXPECT_EQ(outcome.out, "");
}

TEST(Run, DoctorSaysWhatIsHere) {
  const auto outcome = command({"doctor"});
  EXPECT_EQ(outcome.code, 0);
  EXPECT_THAT(outcome.out,
              AllOf(HasSubstr("torch 2."), HasSubstr("kernels"), HasSubstr("CUDA"),
                    HasSubstr("threads"), HasSubstr("GB/s"), HasSubstr(" in fp32, "),
                    HasSubstr("cuDNN"), HasSubstr("gloo"), HasSubstr("NCCL"), HasSubstr("io_uring"),
                    HasSubstr("stages 0 and 1 train to the same bits, 2 and 3 to the same")));
}

}  // namespace
}  // namespace poise::cli

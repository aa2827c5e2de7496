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
                                                    {"train", "a", "--set"}}) {
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
  EXPECT_THAT(command({"--help"}).out,
              AllOf(HasSubstr("train"), HasSubstr("config"), HasSubstr("doctor")));
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
  EXPECT_THAT(outcome.out, AllOf(HasSubstr("torch 2."), HasSubstr("kernels"), HasSubstr("CUDA"),
                                 HasSubstr("threads"), HasSubstr("GB/s"),
                                 HasSubstr("stages 0 and 1 give the same bits, 2 and 3 the same")));
}

}  // namespace
}  // namespace poise::cli

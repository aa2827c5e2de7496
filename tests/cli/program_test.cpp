// The program `poise` as a shell sees it: what goes to which stream, and its exit codes.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>

#include <cstdio>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>

#include "support/temp_folder.h"

namespace poise::cli {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

struct Ended {
  int code;  // -1: not by exit
  std::string out;
  std::string err;
};

Ended program(const std::string& arguments) {
  const std::string err_path = ::testing::TempDir() + "/poise_program_test.err";
  const std::string line =
      std::string("'") + POISE_PROGRAM + "' " + arguments + " 2>'" + err_path + "' </dev/null";
  FILE* pipe = ::popen(line.c_str(), "r");
  if (pipe == nullptr) return {-1, "", "popen failed"};
  Ended ended{};
  char buffer[4096];
  for (std::size_t n; (n = std::fread(buffer, 1, sizeof buffer, pipe)) > 0;) {
    ended.out.append(buffer, n);
  }
  const int status = ::pclose(pipe);
  ended.code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  std::stringstream err;
  err << std::ifstream(err_path).rdbuf();
  ended.err = err.str();
  std::remove(err_path.c_str());
  return ended;
}

TEST(Program, HelpNamesEveryCommandOnStandardOutput) {
  const auto help = program("--help");
  EXPECT_EQ(help.code, 0);
  EXPECT_EQ(help.err, "");
  EXPECT_THAT(help.out, AllOf(HasSubstr("poise"), HasSubstr("train"), HasSubstr("config"),
                              HasSubstr("doctor"), HasSubstr("--version")));
  for (const char* name : {"train", "config", "doctor"}) {
    const auto of_command = program(std::string(name) + " --help");
    EXPECT_EQ(of_command.code, 0) << name;
    EXPECT_EQ(of_command.err, "") << name;
    EXPECT_THAT(of_command.out, HasSubstr(name));
  }
}

TEST(Program, BadUsageIsTwoAndSaysWhatIsWrong) {
  const struct {
    const char* arguments;
    const char* complaint;
  } cases[] = {
      {"", "subcommand is required"},       {"fly", "fly"},
      {"train", "file is required"},        {"train run.json --fast", "--fast"},
      {"train run.json --set", "--set"},    {"train one.json two.json", "two.json"},
      {"config", "--reference or --print"}, {"config --reference --print run.json", "--print"},
      {"config --print", "--print"},        {"doctor now", "now"},
      {"--verbose doctor", "--verbose"},
  };
  for (const auto& one : cases) {
    const auto ended = program(one.arguments);
    EXPECT_EQ(ended.code, 2) << one.arguments;
    EXPECT_EQ(ended.out, "") << one.arguments;
    EXPECT_THAT(ended.err, HasSubstr(one.complaint)) << one.arguments;
  }
}

// The first file that is opened would get the number of a closed stream, and what is printed.
TEST(Program, ClosedStreamsDoNotEndUpInFiles) {
  const testing::TempFolder folder;
  std::string text;
  for (int i = 0; i < 40; ++i) text += "the cat sat on the mat.\n";
  const nlohmann::json config = {
      {"model", {{"layers", 1}, {"width", 8}, {"heads", 1}, {"sequence_length", 8}}},
      {"data", {{"train", {folder.write("text.txt", text)}}}},
      {"train", {{"max_updates", 2}, {"output_dir", folder / "out"}}}};
  const auto run = folder.write("run.json", config.dump());
  for (const char* closed : {" >&-", " >&- <&-", " >&- <&- 2>&-"}) {
    ASSERT_EQ(program("train " + run + closed).code, 0);
    std::istringstream lines(testing::bytes_of(folder / "out/metrics.jsonl"));
    int count = 0;
    for (std::string line; std::getline(lines, line); ++count) {
      EXPECT_TRUE(nlohmann::json::accept(line)) << closed << ": " << line;
    }
    EXPECT_GT(count, 2);
  }
}

// What was not written must not pass for written.
TEST(Program, AFullDiskUnderStandardOutputIsAFailure) {
  for (const char* arguments : {"config --reference", "--help", "--version",
                                "plan --model gpt2 --gpus 1xL4-24GB --seq 128 --global-batch 8"}) {
    const auto ended = program(std::string(arguments) + " >/dev/full");
    EXPECT_EQ(ended.code, 1) << arguments;
    EXPECT_THAT(ended.err, HasSubstr("cannot write to standard output")) << arguments;
  }
}

TEST(Program, AFailureIsOneAndOneLine) {
  const auto ended = program("train /no/such/run.json");
  EXPECT_EQ(ended.code, 1);
  EXPECT_EQ(ended.out, "");
  EXPECT_THAT(ended.err, StartsWith("poise: error: [config] cannot read"));
  EXPECT_THAT(ended.err, Not(HasSubstr("frame #")));
}

}  // namespace
}  // namespace poise::cli

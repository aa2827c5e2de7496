// JSON in, Config out: values, messages, printing.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <map>

#include "config/schema.h"
#include "poise/error.h"

namespace poise {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

std::string message_of(const std::string& text, const std::vector<std::string>& overrides = {}) {
  try {
    Config::from_json(text, overrides);
  } catch (const Error& error) {
    return error.what();
  }
  return "accepted";
}

// How many members an aggregate has: the longest brace list that initialises it.
struct Anything {
  template <class T>
  operator T() const;  // NOLINT
};
template <class T, class... Members>
constexpr std::size_t members() {
  if constexpr (requires { T{Members{}..., Anything{}}; }) {
    return members<T, Members..., Anything>();
  } else {
    return sizeof...(Members);
  }
}

TEST(Read, EmptyObjectGivesTheDefaults) {
  EXPECT_EQ(Config::from_json("{}").to_json(), Config{}.to_json());
}

TEST(Read, EveryFieldHasAKey) {
  std::map<std::string, std::size_t> rows;
  for (const auto& key : config::keys()) ++rows[key.path.substr(0, key.path.find('.'))];
  EXPECT_EQ(rows["batch"], members<config::BatchPolicy>());
  EXPECT_EQ(rows["precision"], members<config::PrecisionPolicy>());
  EXPECT_EQ(rows["optimizer"], members<config::OptimizerPolicy>());
  EXPECT_EQ(rows["schedule"], members<config::SchedulePolicy>());
  EXPECT_EQ(rows["checkpointing"], members<config::CheckpointingPolicy>());
  EXPECT_EQ(rows["memory"], members<config::MemoryPolicy>());
  EXPECT_EQ(rows["engine"], members<config::EnginePolicy>());
  EXPECT_EQ(rows["model"], members<config::ModelPolicy>());
  EXPECT_EQ(rows["data"], members<config::DataPolicy>());
  EXPECT_EQ(rows["train"], members<config::TrainPolicy>());
  EXPECT_EQ(config::group_keys().size(), members<config::ParamGroup>());
  EXPECT_EQ(config::sections().size(), members<Config>());
}

TEST(Read, TakesValuesOfEveryKind) {
  const auto config = Config::from_json(R"({
    // a comment
    "batch": {"micro_batch_size": 2, "global_batch_size": 8},
    "precision": {"dtype": "bf16", "fp32_accumulation": false},
    "optimizer": {"type": "sgd", "lr": 1, "momentum": 0.9, "nesterov": true,
                  "groups": [{"match": "*.bias", "lr_multiplier": 0.5, "weight_decay": 0}, {"match": "head.*"}]},
    "memory": {"budget_bytes": "1.5GiB"}, /* another */
    "engine": {"seed": 18446744073709551615, "on_nonfinite": "stop"},
    "data": {"train": ["a", "b"], "suffix": ".py"},
    "train": {"profile_updates": [3, 5]}
  })");
  EXPECT_EQ(config.batch.micro_batch_size, 2);
  EXPECT_EQ(config::accumulation(config.batch), 4);
  EXPECT_EQ(config.precision.dtype, config::DType::bf16);
  EXPECT_EQ(config.precision.parameters, config::DType::fp32);
  EXPECT_FALSE(config.precision.fp32_accumulation);
  EXPECT_EQ(config.optimizer.lr, 1.0);
  ASSERT_EQ(config.optimizer.groups.size(), 2u);
  EXPECT_EQ(config.optimizer.groups[0].match, "*.bias");
  EXPECT_EQ(config.optimizer.groups[0].lr_multiplier, 0.5);
  EXPECT_EQ(config.optimizer.groups[0].weight_decay, 0);
  EXPECT_EQ(config.optimizer.groups[1].weight_decay, -1);
  EXPECT_EQ(config.memory.budget_bytes, 1610612736);
  EXPECT_EQ(config.engine.seed, 18446744073709551615ull);
  EXPECT_EQ(config.engine.on_nonfinite, config::NonFinite::stop);
  EXPECT_THAT(config.data.train, ::testing::ElementsAre("a", "b"));
  EXPECT_THAT(config.train.profile_updates, ::testing::ElementsAre(3, 5));
  // Printed and read again it is the same.
  EXPECT_EQ(Config::from_json(config.to_json()).to_json(), config.to_json());
}

TEST(Read, UnknownKeysNameTheNearest) {
  EXPECT_THAT(
      message_of(R"({"optimizer": {"lrr": 1}})"),
      AllOf(HasSubstr("[config] unknown key optimizer.lrr"), HasSubstr("is optimizer.lr ")));
  EXPECT_THAT(message_of(R"({"batch": {"acumulation": 1}})"), HasSubstr("is batch.accumulation "));
  // Right name, wrong place.
  EXPECT_THAT(message_of(R"({"weight_decay": 0.1})"), HasSubstr("is optimizer.weight_decay "));
  EXPECT_THAT(message_of(R"({"train": {"sequence_length": 4}})"),
              HasSubstr("is model.sequence_length "));
  EXPECT_THAT(message_of(R"({"optimizer": {"groups": [{"match": "a", "weight_decy": 1}]}})"),
              HasSubstr("is optimizer.groups[0].weight_decay "));
  EXPECT_THAT(message_of(join("{\"", std::string(100000, 'x'), "\": 1}")),
              HasSubstr("unknown key"));
}

TEST(Read, AModelOfPythonNamesTheCommandThatTrainsIt) {
  const auto expected = AllOf(HasSubstr("model.import is \"nets:build\""),
                              HasSubstr("`poise train` of the Python package"));
  EXPECT_THAT(message_of(R"({"model": {"depth": 3, "import": "nets:build"}})"), expected);
  EXPECT_THAT(message_of("{}", {"model.import=nets:build"}), expected);
}

TEST(Read, RepeatedKeysAreErrors) {
  EXPECT_THAT(message_of(R"({"optimizer": {"lr": 1, "lr": 2}})"),
              HasSubstr("key \"lr\" comes twice"));
  EXPECT_THAT(message_of(R"({"train": {}, "data": {}, "train": {}})"),
              HasSubstr("key \"train\" comes twice"));
  EXPECT_EQ(message_of(R"({"optimizer": {"groups": [{"match": "a"}, {"match": "a"}]}})"),
            "accepted");
}

TEST(Read, WrongValuesNameKeyValueAndWhatIsAllowed) {
  const struct {
    const char* text;
    const char* key;
    const char* value;
    const char* allowed;
  } cases[] = {
      {R"({"batch": {"micro_batch_size": -1}})", "batch.micro_batch_size is", " -1;",
       "integer, >= 0"},
      {R"({"batch": {"micro_batch_size": 1.5}})", "batch.micro_batch_size is", " 1.5;", "integer"},
      {R"({"batch": {"micro_batch_size": "4"}})", "batch.micro_batch_size is", " \"4\";",
       "integer"},
      {R"({"batch": {"micro_batch_size": 9223372036854775808}})", "micro_batch_size",
       "9223372036854775808", ">= 0"},
      {R"({"batch": {"micro_batch_size": true}})", "batch.micro_batch_size is", " true;",
       "integer"},
      {R"({"optimizer": {"lr": -1e-3}})", "optimizer.lr is", " -0.001;", ">= 0"},
      {R"({"optimizer": {"lr": null}})", "optimizer.lr is", " null;", "number"},
      {R"({"optimizer": {"beta2": 1}})", "optimizer.beta2 is", " 1;", ">= 0.0, < 1.0"},
      {R"({"optimizer": {"eps": 0}})", "optimizer.eps is", " 0;", "> 0"},
      {R"({"optimizer": {"type": "adamW"}})", "optimizer.type is", "\"adamW\"",
       "adamw, adam, adafactor, lamb, lars, lion or sgd"},
      {R"({"optimizer": {"groups": {}}})", "optimizer.groups is", "{}", "list of groups"},
      {R"({"optimizer": {"groups": [{"match": "a", "lr_multiplier": "b"}]}})",
       "optimizer.groups[0].lr_multiplier is", "\"b\"", "number"},
      {R"({"optimizer": {"groups": [{"match": "a", "weight_decay": -2}]}})",
       "optimizer.groups[0].weight_decay is", "-2", "or -1.0 for that of the optimizer"},
      {R"({"precision": {"dtype": "float32"}})", "precision.dtype is", "\"float32\"",
       "fp32, bf16 or fp16"},
      {R"({"precision": {"autocast": 1}})", "precision.autocast is", " 1;", "true or false"},
      {R"({"engine": {"seed": -1}})", "engine.seed is", " -1;", ">= 0, < 2^64"},
      {R"({"memory": {"budget_bytes": "20 gigs"}})", "memory.budget_bytes is", "\"20 gigs\"",
       "\"20GiB\""},
      {R"({"memory": {"budget_bytes": -5}})", "memory.budget_bytes is", " -5;", ">= 0"},
      {R"({"data": {"train": "a"}})", "data.train is", " \"a\";", "list of strings"},
      {R"({"data": {"train": [""]}})", "data.train is", "[\"\"]", "list of strings"},
      {R"({"data": {"suffix": "a\u0000b"}})", "data.suffix is", "\\u0000", "string"},
      {R"({"train": {"profile_updates": [0, 1]}})", "train.profile_updates is", "[0,1]", ">= 1"},
      {R"({"train": 3})", "train is", " 3;", "an object"},
      {"[]", "the text is", "[]", "an object"},
  };
  for (const auto& c : cases) {
    EXPECT_THAT(message_of(c.text),
                AllOf(HasSubstr(c.key), HasSubstr(c.value), HasSubstr(c.allowed)))
        << c.text;
  }
}

TEST(Read, BadTextIsRefused) {
  for (const char* text : {"", "{", "nonsense", "{\"a\": }", "{\"optimizer\": {\"lr\": NaN}}",
                           "{} {}", "{\"optimizer\": {\"lr\": 1e999}}",
                           "{\"train\": {\"output_dir\": \"\xff\"}}", "\xef\xbb"}) {
    EXPECT_THAT(message_of(text), HasSubstr("not valid JSON")) << text;
  }
  EXPECT_THAT(message_of(std::string(1000000, '[')), HasSubstr("nested deeper"));
  EXPECT_THAT(message_of(join(std::string(2000000, ' '), "{}")), HasSubstr("2000002 bytes"));
}

TEST(Read, OverridesComeLast) {
  const auto config =
      Config::from_json(R"({"optimizer": {"lr": 1}})",
                        {"optimizer.lr=0.5", "train.output_dir=a=b", "data.train=[\"x\"]",
                         "memory.budget_bytes=2KiB", "optimizer.lr=0.25"});
  EXPECT_EQ(config.optimizer.lr, 0.25);
  EXPECT_EQ(config.train.output_dir, "a=b");
  EXPECT_EQ(config.memory.budget_bytes, 2048);
  EXPECT_THAT(message_of("{}", {"optimizer.rl=1"}), HasSubstr("is optimizer.lr "));
  EXPECT_THAT(message_of("{}", {"optimizer.lr"}), HasSubstr("has no '='"));
  EXPECT_THAT(message_of("{}", {"optimizer.lr="}), HasSubstr("optimizer.lr is \"\""));
  EXPECT_THAT(message_of("{}", {"optimizer={\"lr\":1}"}), HasSubstr("unknown key optimizer"));
}

// A message says where its key stands: in the file, in a setting beside it, or in both together.
TEST(Read, ErrorsSayWhereTheKeyStands) {
  const std::string path = ::testing::TempDir() + "/poise_config_place_test.json";
  std::ofstream(path) << R"({"batch": {"micro_batch_size": 4}, "model": {"heads": 3}})";
  const auto message = [&](const std::vector<std::string>& overrides) -> std::string {
    try {
      Config::from_json_file(path, overrides);
    } catch (const Error& error) {
      return error.what();
    }
    return "accepted";
  };
  EXPECT_THAT(message({"model.heads=4", "optimizer.rl=1"}),
              AllOf(HasSubstr("unknown key optimizer.rl"), HasSubstr("(in setting optimizer.rl=1)"),
                    Not(HasSubstr(path))));
  EXPECT_THAT(message({"optimizer.lr=fast"}),
              AllOf(HasSubstr("optimizer.lr is \"fast\""), Not(HasSubstr(path))));
  EXPECT_THAT(message({}), AllOf(HasSubstr("no multiple of model.heads 3"),
                                 HasSubstr("(in " + path + ")"), Not(HasSubstr("settings"))));
  EXPECT_THAT(message({"model.heads=5"}),
              AllOf(HasSubstr("no multiple of model.heads 5"),
                    HasSubstr("(in " + path + " with the settings given beside it)")));
  EXPECT_EQ(message({"model.heads=4"}), "accepted");
  EXPECT_THAT(message_of("{\"train\": {\"log_every\": 0}}"), Not(HasSubstr("(in ")));
  std::filesystem::remove(path);
}

// 2^63 nanoseconds are 292 years.
TEST(Read, ATimeoutFitsIntoAClock) {
  const auto with = [](const std::string& seconds) {
    return "{\"comm\": {\"timeout_seconds\": " + seconds + "}}";
  };
  EXPECT_EQ(Config::from_json(with("1e9")).comm.timeout_seconds, 1e9);
  for (const char* seconds : {"1e10", "1e300"}) {
    EXPECT_THAT(message_of(with(seconds)), HasSubstr("comm.timeout_seconds is 1"));
  }
}

// A path on the disk may be in an older encoding; a save keeps the settings as JSON.
TEST(Read, SettingsThatAreNoUtf8AreStillPrinted) {
  const auto config = Config::from_json("{}", {"train.output_dir=caf\xe9"});
  EXPECT_EQ(config.train.output_dir, "caf\xe9");
  EXPECT_THAT(config.to_json(), HasSubstr("\"output_dir\": \"caf\xef\xbf\xbd\""));
}

TEST(Read, FilesThatCannotBeReadAreNamed) {
  const auto read = [](const std::string& path) -> std::string {
    try {
      Config::from_json_file(path);
    } catch (const Error& error) {
      return error.what();
    }
    return "accepted";
  };
  const std::string folder = ::testing::TempDir();
  EXPECT_THAT(read(folder + "/no_such.json"),
              AllOf(HasSubstr("cannot read"), HasSubstr("no_such.json")));
  EXPECT_THAT(read(folder), HasSubstr("cannot read"));
  const std::string path = folder + "/poise_config_read_test.json";
  std::ofstream(path) << R"({"train": {"max_updates": 0}})";
  EXPECT_THAT(read(path), AllOf(HasSubstr("train.max_updates is 0"), HasSubstr(path)));
  std::ofstream(path) << R"({"train": {"max_updates": 7}})";
  EXPECT_EQ(Config::from_json_file(path, {"train.log_every=3"}).train.max_updates, 7);
  std::filesystem::remove(path);
}

}  // namespace
}  // namespace poise

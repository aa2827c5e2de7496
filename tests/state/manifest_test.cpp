// The manifest: round trip, every flipped bit, hostile contents under a right checksum.
#include "state/manifest.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <random>

#include "offload/digest.h"
#include "poise/error.h"
#include "support/temp_folder.h"

namespace poise::state {
namespace {

using testing::message_of;

Manifest some() {
  Manifest m;
  m.written_by = "0.1.0";
  m.config = "{\"a\": [1, 2]}";
  m.table_hash = 0x0123456789abcdefu;
  m.ranks = 2;
  m.stage = 3;
  m.optimizer = "adamw";
  m.moments.resize(2);
  m.learning_rate = 0.1;
  m.progress = {120, 3, 65536.5, 7, 1, {{0.1, 1e-300}}, -2};
  m.cursor = std::int64_t{1} << 40;
  m.user = {{"who", "\xC3\xA9"}, {"", "x"}};
  m.parameters = {{"w", {"tied"}, {2, 3}, {1, 0}, "F32", true}, {"e", {}, {0}, {0}, "BF16", false}};
  m.buffers = {{"mean", {4}, "F32"}};
  m.files = {{"rank-00000.safetensors", 100, 0xffffffffffffffffu, offload::Hash::xxh3, 0},
             {"folder/config.json", 3, 5, offload::Hash::xxh64, std::nullopt}};
  return m;
}

TEST(Manifest, ComesBack) {
  const auto want = some(), got = manifest_from(to_text(want), "m");
  EXPECT_EQ(to_text(got), to_text(want));
  EXPECT_EQ(got.progress.loss_scale, 65536.5);
  EXPECT_EQ(got.progress.loss_weight_exponent, -2);
  EXPECT_EQ(got.progress.noise->variance, 0.1);
  EXPECT_EQ(got.progress.noise->signal, 1e-300);
  EXPECT_EQ(got.cursor, std::int64_t{1} << 40);
  EXPECT_EQ(got.user, want.user);
  EXPECT_EQ(got.parameters[0].order, (std::vector<std::int64_t>{1, 0}));
  EXPECT_EQ(got.parameters[0].aliases, std::vector<std::string>{"tied"});
  EXPECT_EQ(got.files[0].digest, 0xffffffffffffffffu);
  EXPECT_EQ(got.files[0].hash, offload::Hash::xxh3);
  EXPECT_EQ(got.files[1].hash, offload::Hash::xxh64) << "of an earlier version";
  EXPECT_EQ(got.files[1].rank, std::nullopt);
}

TEST(Manifest, SaysWhatMomentsAre) {
  auto want = some();
  EXPECT_EQ(to_text(want).find("arrays"), std::string::npos) << "as in version 1";
  want.moments = {{"U8", 1}, {"F32", 256}};
  const auto got = manifest_from(to_text(want), "m");
  EXPECT_EQ(got.moments, want.moments);
  EXPECT_EQ(got.moments[1].numel({"w", {}, {3, 100}, {0, 1}, "F32", true}), 2);
}

TEST(Manifest, RefusesEveryFlippedBitAndEveryCut) {
  const auto text = to_text(some());
  for (std::size_t bit = 0; bit < 8 * text.size(); ++bit) {
    auto other = text;
    other[bit / 8] = static_cast<char>(other[bit / 8] ^ (1 << bit % 8));
    EXPECT_THROW(manifest_from(other, "m"), Error) << bit;
  }
  for (std::size_t size = 0; size < text.size(); ++size) {
    EXPECT_THROW(manifest_from(text.substr(0, size), "m"), Error) << size;
  }
}

// With the checksum that belongs to it.
std::string sealed(std::string text) {
  const auto at = std::string("{\n  \"xxh64\": \"").size();
  text.replace(at, 16, 16, '0');
  return text.replace(at, 16, offload::hex(offload::xxh64_of(text)));
}

std::string with(const std::string& pointer, const nlohmann::ordered_json& value) {
  auto json = nlohmann::ordered_json::parse(to_text(some()));
  json[nlohmann::ordered_json::json_pointer(pointer)] = value;
  return sealed(json.dump(2) + '\n');
}

TEST(Manifest, RefusesANewerVersion) {
  const auto message = message_of([] { manifest_from(with("/version", 5), "m"); });
  EXPECT_NE(message.find("m has version 5 of the format, and this poise reads up to 4"),
            std::string::npos)
      << message;
}

TEST(Manifest, RefusesFilesOutsideItsFolder) {
  for (const std::string name : {"../x", "/etc/passwd", "a/../../b", "", ".", "a//b", "a/"}) {
    const auto message = message_of([&] { manifest_from(with("/files/0/name", name), "m"); });
    EXPECT_NE(message.find("the name of a file is missing or not what it should be"),
              std::string::npos)
        << name << ": " << message;
  }
}

TEST(Manifest, RefusesWrongTypesAndNumbers) {
  using Json = nlohmann::ordered_json;
  const std::pair<const char*, Json> wrong[] = {
      {"/updates", -1},
      {"/updates", 1.5},
      {"/updates", "1"},
      {"/updates", std::uint64_t{1} << 63},
      {"/parameters", 1},
      {"/parameters/0", 1},
      {"/parameters/0/shape", {-1, 2}},
      {"/parameters/0/shape", {std::int64_t{1} << 40, std::int64_t{1} << 40}},
      {"/parameters/0/order", {0, 0}},
      {"/parameters/0/order", {0, 2}},
      {"/parameters/0/order", Json::array({0})},
      {"/files/0/xxh3", "zz"},
      {"/files/1/xxh64", "-123456789abcdef"},
      {"/format", "another"},
      {"/user", {{"a", 1}}},
      {"/loss_scaler", nullptr},
      {"/files/0/rank", -1},
  };
  for (const auto& [pointer, value] : wrong) {
    const auto message = message_of(
        [&, &pointer = pointer, &value = value] { manifest_from(with(pointer, value), "m"); });
    EXPECT_EQ(message.rfind("[state] m is damaged: ", 0), 0u) << pointer << ": " << message;
  }
}

TEST(Manifest, TakesAnyBytes) {
  const auto good = to_text(some());
  std::mt19937_64 random(3);
  const std::string signs = "{}[]\",:\\0123456789-.etrufalsn ";
  const auto count = testing::rounds("POISE_FUZZ", 100'000) / 5;
  for (std::int64_t i = 0; i < count; ++i) {
    auto text = good;
    for (auto edits = 1 + random() % 3; edits > 0; --edits) {
      const auto at = 40 + random() % (text.size() - 40);
      if (random() % 3 == 0) {
        text.insert(at, std::string(random() % 40, signs[random() % signs.size()]));
      } else {
        text[at] = signs[random() % signs.size()];
      }
    }
    try {
      const auto m = manifest_from(sealed(text), "m");
      for (const auto& file : m.files) {
        const auto path = "/" + file.name + "/";
        ASSERT_EQ(path.find("/../"), std::string::npos) << file.name;
        ASSERT_NE(file.name.front(), '/');
      }
    } catch (const Error&) {
    }
  }
}

TEST(Manifest, RefusesDeepNesting) {
  const auto text = to_text(some());
  auto deep = text;
  deep.insert(deep.find("\"a\": [") + 6, std::string(100'000, '['));
  EXPECT_THROW(manifest_from(sealed(deep), "m"), Error);
}

}  // namespace
}  // namespace poise::state

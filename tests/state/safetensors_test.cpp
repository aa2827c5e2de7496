// Headers: what is written comes back, and what is wrong is refused by name.
#include "state/safetensors.h"

#include <gtest/gtest.h>

#include <cstring>
#include <random>

#include "poise/error.h"
#include "state/json_scanner.h"
#include "support/temp_folder.h"

namespace poise::state {
namespace {

using testing::message_of;

Header parse(const std::string& text, std::uint64_t data_bytes) {
  return parse_header(text, data_bytes, "some.safetensors");
}

TEST(Safetensors, WhatIsWrittenComesBack) {
  std::vector<TensorEntry> tensors{{"a \"quoted\" \\ name\n", at::kFloat, {2, 3}},
                                   {"\xC3\xA9\xF0\x9F\x98\x80", at::kBFloat16, {5}},
                                   {"scalar", at::kLong, {}},
                                   {"empty", at::kHalf, {0, 4}},
                                   {"bytes", at::kByte, {7}},
                                   {"flag", at::kBool, {1, 1}}};
  const std::map<std::string, std::string> metadata{{"key", "a\tvalue"}, {"", ""}};
  const auto bytes = write_header(tensors, metadata);
  EXPECT_EQ(bytes.size() % 64, 0u);
  std::uint64_t length;
  std::memcpy(&length, bytes.data(), 8);
  ASSERT_EQ(length, bytes.size() - 8);
  const auto data = 24u + 10 + 8 + 0 + 7 + 1;
  const auto header = parse(bytes.substr(8), data);
  EXPECT_EQ(header.metadata, metadata);
  EXPECT_EQ(header.data_begin, bytes.size());
  ASSERT_EQ(header.tensors.size(), tensors.size());
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const auto& got = header.tensors[i];
    const auto& want = tensors[i];
    EXPECT_EQ(got.name, want.name);
    EXPECT_EQ(got.type, want.type);
    EXPECT_EQ(got.shape, want.shape);
    EXPECT_EQ(got.begin, want.begin);
    EXPECT_EQ(got.end, want.end);
  }
}

// Keys in other orders, white space, escapes: what other writers may make.
TEST(Safetensors, ReadsWhatOthersWrite) {
  const auto header = parse(
      "{ \"\\u00e9\\ud83d\\ude00\" : {\"shape\":[ 2 ],\"data_offsets\":[4,8],\"dtype\":\"F16\"},\n"
      "\"b\":{\"dtype\":\"F32\",\"shape\":[],\"data_offsets\":[0,4]} }   ",
      8);
  ASSERT_EQ(header.tensors.size(), 2u);
  EXPECT_EQ(header.tensors[0].name, "b");  // in order of bytes
  EXPECT_EQ(header.tensors[1].name, "\xC3\xA9\xF0\x9F\x98\x80");
  EXPECT_TRUE(parse("{}", 0).tensors.empty());
  EXPECT_TRUE(parse("{\"__metadata__\":{}}", 0).tensors.empty());
}

struct Wrong {
  std::string text;
  std::uint64_t data_bytes;
  std::string says;
};

TEST(Safetensors, RefusesWhatIsWrong) {
  const std::string a = "\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}";
  const auto one = [](const std::string& rest) { return "{\"a\":{" + rest + "}}"; };
  const std::vector<Wrong> all{
      {"", 0, "does not begin with '{'"},
      {" {}", 0, "does not begin with '{'"},
      {"{", 0, "no '\"'"},
      {"{" + a, 4, "no '}'"},
      {"{" + a + "}x", 4, "something follows it"},
      {"{" + a + "," + a + "}", 4, "tensor 'a' comes twice"},
      {"{" + a + ",}", 4, "no '\"'"},
      {"{" + a + "}", 3, "its tensors have 4 bytes, and 3 follow"},
      {"{" + a + "}", 5, "its tensors have 4 bytes, and 5 follow"},
      {one("\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[4,8]"), 8, "tensor 'a' lies at 4"},
      {one("\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,4]"), 4,
       "which is not what its type"},
      {one("\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[4,0]"), 4, "tensor 'a'"},
      {one("\"dtype\":\"F31\",\"shape\":[1],\"data_offsets\":[0,4]"), 4, "unknown type F31"},
      {one("\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0]"), 4,
       "lacks its type, shape or place"},
      {one("\"dtype\":\"F32\",\"shape\":[1]"), 4, "lacks its type, shape or place"},
      {one("\"dtype\":\"F32\",\"dtype\":\"F32\""), 4, "'dtype' twice"},
      {one("\"more\":1"), 4, "unknown key 'more'"},
      {one("\"dtype\":\"F32\",\"shape\":[-1],\"data_offsets\":[0,4]"), 4, "no whole number"},
      {one("\"dtype\":\"F32\",\"shape\":[1.0],\"data_offsets\":[0,4]"), 4, "not whole"},
      {one("\"dtype\":\"F32\",\"shape\":[01],\"data_offsets\":[0,4]"), 4, "begins with 0"},
      {one("\"dtype\":\"F32\",\"shape\":[99999999999999999999],\"data_offsets\":[0,4]"), 4,
       "beyond 2^64"},
      {one("\"dtype\":\"F32\",\"shape\":[18446744073709551615],\"data_offsets\":[0,4]"), 4,
       "larger than any memory"},
      // 2^62 x 4 x 4 bytes would be 0 in 64 bits.
      {one("\"dtype\":\"F32\",\"shape\":[4611686018427387904,4],\"data_offsets\":[0,0]"), 0,
       "which is not what its type"},
      {"{\"\x80\":1}", 0, "no UTF-8"},
      {"{\"\\ud800\":1}", 0, "half a character"},
      {"{\"\\q\":1}", 0, "wrong escape"},
      {"{\"a\nb\":1}", 0, "control character"},
      {"{\"__metadata__\":{\"a\":\"1\",\"a\":\"2\"}}", 0, "__metadata__ has 'a' twice"},
      {"{\"__metadata__\":{},\"__metadata__\":{}}", 0, "__metadata__ comes twice"},
      {"{\"__metadata__\":{\"a\":1}}", 0, "no '\"'"},
      // Both claim the first byte.
      {"{" + a + ",\"b\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}", 4,
       "tensor 'b' lies at 0"},
  };
  for (const auto& [text, bytes, says] : all) {
    const auto message = message_of([&, &text = text, bytes = bytes] { parse(text, bytes); });
    EXPECT_NE(message.find(says), std::string::npos) << text << "\n" << message;
    EXPECT_EQ(message.rfind("[state] some.safetensors is damaged: ", 0), 0u) << message;
  }
}

TEST(Safetensors, RefusesLengthsThatTheFileDoesNotHave) {
  const testing::TempFolder folder;
  const auto read = [&](std::uint64_t length, const std::string& rest) {
    std::string bytes(8, '\0');
    std::memcpy(bytes.data(), &length, 8);
    const auto path = folder.write("x.safetensors", bytes + rest);
    return message_of([&] { read_header(InputFile(path)); });
  };
  EXPECT_EQ(read(2, "{}"), "");
  EXPECT_NE(read(3, "{}").find("says that its header has 3 bytes"), std::string::npos);
  EXPECT_NE(read(~std::uint64_t{0}, "{}").find("says that its header has"), std::string::npos);
  const auto path = folder.write("short.safetensors", "1234567");
  EXPECT_NE(message_of([&] { read_header(InputFile(path)); }).find("too few"), std::string::npos);
}

// Mutations of a good header: read or refused with an Error, nothing else. What is read lies inside
// the data.
TEST(Safetensors, TakesAnyBytes) {
  std::vector<TensorEntry> tensors{
      {"a.weight", at::kFloat, {4, 8}}, {"b\\\xC3\xA9", at::kBFloat16, {3}}, {"c", at::kLong, {}}};
  const auto good = write_header(tensors, {{"format", "pt"}}).substr(8);
  const std::uint64_t data_bytes = 128 + 6 + 8;
  std::mt19937_64 random(7);
  const std::string signs = "{}[]\",:\\u0123456789eE.-+ \n\x80\xC3truF32__metadata__";
  std::int64_t read = 0;
  const auto count = testing::rounds("POISE_FUZZ", 100'000);
  for (std::int64_t i = 0; i < count; ++i) {
    auto text = good;
    for (auto edits = 1 + random() % 4; edits > 0 && !text.empty(); --edits) {
      const auto at = random() % text.size();
      switch (random() % 5) {
        case 0:
          text[at] = static_cast<char>(random());
          break;
        case 1:
          text[at] = signs[random() % signs.size()];
          break;
        case 2:
          text.erase(at, 1 + random() % 8);
          break;
        case 3:
          text.insert(at, text.substr(random() % text.size(), random() % 24));
          break;
        default:
          text.resize(at);
      }
    }
    try {
      const auto header = parse(text, data_bytes);
      ++read;
      std::uint64_t end = 0;
      for (const auto& tensor : header.tensors) {
        ASSERT_EQ(tensor.begin, end);
        ASSERT_LE(tensor.begin, tensor.end);
        end = tensor.end;
        ASSERT_TRUE(is_utf8(tensor.name));
      }
      ASSERT_EQ(end, data_bytes);
    } catch (const Error& error) {
      ASSERT_NE(std::string(error.what()).find("some.safetensors"), std::string::npos);
    }
  }
  EXPECT_GT(read, count / 1000);  // some mutations only change a name or white space
}

}  // namespace
}  // namespace poise::state

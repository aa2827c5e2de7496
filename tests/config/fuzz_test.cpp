// Outside bytes: whatever is done to a file, reading ends in a Config or in Error.
#include <gtest/gtest.h>

#include <random>

#include "poise/config.h"
#include "poise/error.h"

namespace poise {
namespace {

// True where the text was accepted.
bool reads(const std::string& text) {
  try {
    const Config config = Config::from_json(text);
    config.validate();
    return true;
  } catch (const Error&) {
    return false;
  }  // anything else fails the test
}

TEST(Fuzz, ChangedBytesEndInAConfigOrInError) {
  Config start;
  start.optimizer.groups = {{"*.bias", 0.5, 0}};
  start.data.train = {"a"};
  const std::string valid = start.to_json();
  std::mt19937_64 random(20240607);
  const std::string likely = "{}[]\",:0123456789eE+-./*\\utrnf \n";
  int accepted = 0;
  for (int round = 0; round < 3000; ++round) {
    std::string text = valid;
    const int changes = 1 + static_cast<int>(random() % 4);
    for (int i = 0; i < changes && !text.empty(); ++i) {
      const std::size_t at = random() % text.size();
      switch (random() % 6) {
        case 0:
          text[at] = static_cast<char>(random());
          break;
        case 1:
          text[at] = likely[random() % likely.size()];
          break;
        case 2:
          text.erase(at, 1 + random() % 8);
          break;
        case 3:
          text.insert(at, text.substr(random() % text.size(), random() % 40));
          break;
        case 4:
          text.resize(at);
          break;
        default:  // stays valid JSON: the schema's turn
          if (text[at] >= '0' && text[at] <= '9') text[at] = static_cast<char>('0' + random() % 10);
          break;
      }
    }
    accepted += reads(text);
  }
  // Most changes break something; some (digits, blanks) do not. Both paths were walked.
  EXPECT_GT(accepted, 50);
  EXPECT_LT(accepted, 2500);
}

TEST(Fuzz, BytesAtRandomAreRefused) {
  std::mt19937_64 random(7);
  for (int round = 0; round < 500; ++round) {
    std::string text(random() % 64, '\0');
    for (auto& c : text) c = static_cast<char>(random());
    EXPECT_FALSE(reads(text));
  }
}

}  // namespace
}  // namespace poise

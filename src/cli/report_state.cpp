// The report of a run that is resumed: its sums go on to the bit.
#include <limits>
#include <nlohmann/json.hpp>

#include "cli/report.h"
#include "poise/error.h"

namespace poise::cli {
namespace {

using Json = nlohmann::ordered_json;

double number(const Json& value) {
  if (value.is_number()) return value.get<double>();
  const auto infinity = std::numeric_limits<double>::infinity();
  return value == "inf" ? infinity : value == "-inf" ? -infinity : infinity - infinity;
}

}  // namespace

std::string Report::text() const {
  Json losses = Json::array();
  for (const double loss : losses_) losses.push_back(plain(loss));
  const Json out = {
      {"updates", updates_},
      {"tokens", tokens_},
      {"logged_updates", logged_updates_},
      {"logged_loss", plain(logged_loss_)},
      {"logged_tokens", logged_tokens_},
      {"skipped", skipped_},
      {"peak_bytes", peak_bytes_},
      {"accounts", accounts_},
      {"losses", losses},
      {"lines", metrics_.lines()},
  };
  return out.dump();
}

void Report::go_on(const std::string& text) {
  std::int64_t lines = 0;
  try {
    const auto in = Json::parse(text);
    updates_ = in.at("updates").get<std::int64_t>();
    tokens_ = in.at("tokens").get<double>();
    logged_updates_ = in.at("logged_updates").get<std::int64_t>();
    logged_loss_ = number(in.at("logged_loss"));
    logged_tokens_ = in.at("logged_tokens").get<double>();
    skipped_ = in.at("skipped").get<std::int64_t>();
    peak_bytes_ = in.at("peak_bytes").get<std::int64_t>();
    accounts_ = in.at("accounts").get<decltype(accounts_)>();
    lines = in.at("lines").get<std::int64_t>();
    losses_.clear();
    for (const auto& loss : in.at("losses")) losses_.push_back(number(loss));
  } catch (const Json::exception& error) {
    fail("cli", "the save does not say where its run was: ", error.what(),
         "; resume from a save of `poise train`");
  }
  metrics_.go_on_after(lines);
}

void Report::begin_anew() { metrics_.go_on_after(0); }

}  // namespace poise::cli

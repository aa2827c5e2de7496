// Uses a public symbol of poise, a type that crosses the boundary, and torch; prints one line.
#include <ATen/ops/ones.h>

#include <cstdio>

#include "poise/error.h"
#include "poise/log.h"

int main() {
  std::string logged;
  poise::log::set_sink([&](poise::log::Level, const std::string& line) { logged = line; });
  try {
    poise::fail("consumer", "sum ", at::ones({2, 3}).sum().item<float>());
  } catch (const poise::Error& error) {
    poise::log::warning(error.what());
  }
  std::printf("%s\n", logged.c_str());
  return logged == "[consumer] sum 6" ? 0 : 1;
}

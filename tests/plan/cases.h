// Rows of the tables in cases/: comma-separated, no quotes, first line names the columns.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <fstream>
#include <map>
#include <sstream>
#include <string>
#include <vector>

namespace poise::plan {

class Case {
 public:
  explicit Case(std::map<std::string, std::string> cells) : cells_(std::move(cells)) {}
  const std::string& text(const std::string& column) const { return cells_.at(column); }
  double number(const std::string& column) const { return std::stod(text(column)); }
  std::int64_t count(const std::string& column) const {
    return static_cast<std::int64_t>(number(column));
  }
  bool has(const std::string& column) const { return !text(column).empty(); }

 private:
  std::map<std::string, std::string> cells_;
};

inline std::vector<std::string> cells_of(const std::string& line) {
  std::vector<std::string> cells;
  std::stringstream stream(line);
  for (std::string cell; std::getline(stream, cell, ',');) cells.push_back(cell);
  if (!line.empty() && line.back() == ',') cells.emplace_back();
  return cells;
}

inline std::vector<Case> cases(const std::string& name) {
  std::ifstream file(std::string(POISE_PLAN_CASES) + "/" + name + ".csv");
  EXPECT_TRUE(file) << name;
  std::string line;
  std::getline(file, line);
  const auto columns = cells_of(line);
  std::vector<Case> all;
  while (std::getline(file, line)) {
    const auto cells = cells_of(line);
    EXPECT_EQ(cells.size(), columns.size()) << line;
    std::map<std::string, std::string> named;
    for (std::size_t i = 0; i < columns.size(); ++i) named[columns[i]] = cells.at(i);
    all.emplace_back(std::move(named));
  }
  EXPECT_FALSE(all.empty()) << name;
  return all;
}

// One unit in the last digit that was printed.
inline double last_digit(const std::string& printed) {
  const auto dot = printed.find('.');
  return dot == std::string::npos ? 1 : std::pow(10.0, -double(printed.size() - dot - 1));
}

}  // namespace poise::plan

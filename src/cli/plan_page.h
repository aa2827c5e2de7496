// The planner's answer, as text for people and as JSON.
#pragma once

#include <iosfwd>
#include <string>
#include <vector>

#include "poise/plan.h"

namespace poise::cli {

struct Page {
  const plan::Job& job;
  const plan::Answer* answer = nullptr;  // of the search; null where none was made
  const plan::Plan* written = nullptr;   // the plan that a file holds
  std::vector<plan::Lever> levers;
  plan::Price price;               // of nothing: no cost is shown
  std::vector<std::string> units;  // names of a traced model's blocks
};

void print_page(std::ostream& out, const Page& page);
std::string page_json(const Page& page);

// Of each rank.
double tokens_per_second(const plan::Job& job, const plan::Plan& plan);

}  // namespace poise::cli

// The planner's answer, as text for people and as JSON.
#pragma once

#include <iosfwd>
#include <string>

#include "poise/plan.h"

namespace poise::cli {

// `answer`: of the search, null where none was made. `written`: the plan that a file holds, or
// null.
void print_page(std::ostream& out, const plan::Job& job, const plan::Answer* answer,
                const plan::Plan* written);
std::string page_json(const plan::Job& job, const plan::Answer* answer, const plan::Plan* written);

}  // namespace poise::cli

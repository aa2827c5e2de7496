// The planner's answer as one HTML page that needs nothing but itself.
#pragma once

#include <string>

#include "cli/plan_page.h"

namespace poise::cli {

// Tables, and drawings: bytes by account over the moments of an update, time against memory, what
// each lever buys.
std::string page_html(const Page& page);

}  // namespace poise::cli

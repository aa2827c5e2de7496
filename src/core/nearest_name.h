// The known name that is closest to a misspelt one, for error messages. Torch-free.
#pragma once

#include <string>
#include <vector>

namespace poise {

// Smallest edit distance (Levenshtein 1966); the first of equals; "" when `known` is empty.
std::string nearest_name(const std::string& wanted, const std::vector<std::string>& known);

}  // namespace poise

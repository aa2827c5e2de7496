// Which files a corpus reads: files as given, folders walked in sorted order.
#pragma once

#include <string>
#include <vector>

namespace poise::data {

// Regular files of `paths` in order. Of a folder: those whose name ends in `suffix`, sorted by
// their path inside it byte by byte (the same on every machine). A link inside a folder counts only
// where it leads to a file of that folder, and a file reached twice counts once. Throws Error
// naming what is missing, unreadable or no file.
std::vector<std::string> walk(const std::vector<std::string>& paths, const std::string& suffix);

}  // namespace poise::data

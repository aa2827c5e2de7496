// `poise inspect`: what saves hold, whether they are whole, in what two differ, and their model
// alone.
#pragma once

#include <iosfwd>
#include <string>

namespace poise::cli {

struct InspectArguments {
  std::string path;         // a save, or a directory of saves
  std::string other;        // a save to compare with
  std::string export_file;  // gets the model
};

// Returns the exit code: 1 where a save is damaged or two differ. Throws Error where there is none.
int inspect(const InspectArguments& arguments, std::ostream& out);

}  // namespace poise::cli

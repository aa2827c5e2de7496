// The pages of `poise inspect`.
#include "cli/inspect.h"

#include <ostream>
#include <vector>

#include "poise/error.h"
#include "poise/state.h"

namespace poise::cli {
namespace {

std::string save_at(const std::string& path) {
  auto save = state::find(path);
  if (save.empty()) {
    fail("cli", "no whole save in ", path, "; give a save or a directory that holds one");
  }
  return save;
}

bool show(const std::string& save, std::ostream& out) {
  try {
    for (const auto& line : state::describe(save)) out << line << '\n';
    state::verify(save);
    out << "  whole: every byte is what was saved\n";
    return true;
  } catch (const Error& error) {
    out << save << "\n  DAMAGED: " << error.what() << '\n';
    return false;
  }
}

int compare(const std::string& save, const std::string& other, std::ostream& out) {
  const auto lines = state::differences(save, other);
  out << save << " and " << other << (lines.empty() ? " hold the same state\n" : " differ:\n");
  for (const auto& line : lines) out << "  " << line << '\n';
  return lines.empty() ? 0 : 1;
}

}  // namespace

int inspect(const InspectArguments& arguments, std::ostream& out) {
  const auto latest = save_at(arguments.path);
  if (!arguments.other.empty()) return compare(latest, save_at(arguments.other), out);
  if (!arguments.export_file.empty()) {
    state::export_model(latest, arguments.export_file);
    out << latest << " -> " << arguments.export_file << '\n';
    return 0;
  }
  auto saves = state::list(arguments.path);
  if (saves.empty()) saves = {latest};
  bool whole = true;
  for (const auto& save : saves) whole = show(save, out) && whole;
  if (saves.size() > 1) out << "latest: " << latest << '\n';
  return whole ? 0 : 1;
}

}  // namespace poise::cli

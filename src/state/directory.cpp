// Saves in their directory.
#include "state/directory.h"

#include <algorithm>
#include <cctype>
#include <cstdio>
#include <set>
#include <utility>
#include <vector>

#include "poise/best_save.h"
#include "poise/error.h"
#include "poise/log.h"
#include "poise/state.h"
#include "state/files.h"
#include "state/saver.h"

namespace poise::state {
namespace {

constexpr char kLatest[] = "latest";
constexpr char kBest[] = "best";
constexpr char kNewLink[] = ".latest.new";
constexpr char kSaving[] = ".saving";
constexpr char kRemoving[] = ".removing";

bool ends_with(const std::string& text, const std::string& end) {
  return text.size() >= end.size() && text.compare(text.size() - end.size(), end.size(), end) == 0;
}

bool is_left_over(const std::string& name) {
  return name.front() == '.' &&
         (ends_with(name, kSaving) || ends_with(name, kRemoving) || name == kNewLink);
}

bool is_save(const std::string& folder) { return is_file(in(folder, kManifest)); }

// "update-00000120" -> "update-".
std::string stem_of(std::string name) {
  while (!name.empty() && std::isdigit(static_cast<unsigned char>(name.back())) != 0) {
    name.pop_back();
  }
  return name;
}

struct WholeSave {
  std::int64_t made = 0;  // time
  std::int64_t updates = 0;
  std::string name;
  auto operator<=>(const WholeSave&) const = default;
};

// Oldest first: by when they were made, for a run may have gone back to an older one. Damaged ones
// are said and left out.
std::vector<WholeSave> saves_in(const std::string& directory) {
  std::vector<WholeSave> saves;
  if (!is_folder(in(directory, "."))) return saves;
  for (const auto& name : names_in(directory)) {
    const auto folder = in(directory, name);
    // A link is another name of a save that is here, too.
    if (name.front() == '.' || !is_folder(folder) || !is_save(folder)) continue;
    try {
      const auto updates = read_manifest(folder).progress.updates;
      saves.push_back({changed_at(in(folder, kManifest)), updates, name});
    } catch (const Error& error) {
      log::warning("a save is left out: ", error.what());
    }
  }
  std::sort(saves.begin(), saves.end());
  return saves;
}

}  // namespace

std::string default_name(std::int64_t updates) {
  char name[32];
  std::snprintf(name, sizeof name, "update-%08lld", static_cast<long long>(updates));
  return name;
}

std::string shard_name(int rank, int part) {
  char name[32];
  std::snprintf(name, sizeof name, "rank-%05d", rank);
  return join(name, part == 0 ? "" : join('-', part), ".safetensors");
}

std::string temporary_name(const std::string& name, const std::string& word) {
  return join('.', name, '.', word, kSaving);
}

void check_name(const std::string& name) {
  const bool fits = !name.empty() && name.front() != '.' && name != kLatest &&
                    name.find('/') == std::string::npos && name.size() <= 200;
  if (!fits) {
    fail("state", "a save cannot have the name '", name,
         "'; it is a folder's name without /, does not begin with a dot, and is not ", kLatest);
  }
}

void check_place(const std::string& directory, const std::string& name, bool best) {
  const auto place = in(directory, name);
  if (is_there(place) && !(is_folder(place) && is_save(place))) {
    fail("state", place,
         " is there and is no save, so that it is not replaced; move it away, or give "
         "this save another name");
  }
  if (best && name == kBest) {
    fail("state", "a save cannot have the name '", name,
         "' and be the best one, to which a link of that name leads; give it another name");
  }
  for (const auto* link_name : {kLatest, kBest}) {
    const auto link = in(directory, link_name);
    const bool is_made = link_name == kLatest || best;
    if (is_made && is_there(link) && link_target(link).empty()) {
      fail("state", link,
           " is there and is no link to a save; move it away, or save into another "
           "directory");
    }
  }
}

void clear_left_overs(const std::string& directory) {
  for (const auto& name : names_in(directory)) {
    if (is_left_over(name)) remove_tree(in(directory, name));
  }
}

namespace {

void link_in(const std::string& directory, const std::string& name, const char* link) {
  remove_tree(in(directory, kNewLink));  // of one that was killed here
  link_to(name, in(directory, kNewLink));
  rename_over(in(directory, kNewLink), in(directory, link));
}

}  // namespace

void commit_folder(const std::string& directory, const std::string& temporary,
                   const std::string& name, Manifest manifest, bool best) {
  std::set<std::string> known;
  for (const auto& file : manifest.files) known.insert(file.name);
  std::set<std::string> folders{temporary};
  for (const auto& path : files_below(temporary)) {
    for (auto slash = path.find('/'); slash != std::string::npos;
         slash = path.find('/', slash + 1)) {
      folders.insert(in(temporary, path.substr(0, slash)));
    }
    if (known.count(path) > 0) continue;
    const auto whole = in(temporary, path);
    sync(whole);
    const InputFile file(whole);
    const auto hash = offload::Hash::xxh3;
    manifest.files.push_back({path, file.size(), file.digest(hash), hash, std::nullopt});
  }
  write_new_file(in(temporary, kManifest), to_text(manifest));
  for (const auto& folder : folders) sync(folder);
  put_in_place(temporary, in(directory, name));
  sync(directory);
  // Before `latest`: a run that goes on from the save before makes this one again.
  if (best) link_in(directory, name, kBest);
  link_in(directory, name, kLatest);
  sync(directory);
  if (is_folder(temporary)) remove_tree(temporary);  // the save of that name before this one
}

void rotate(const std::string& directory, const std::string& newest, std::int64_t limit,
            std::int64_t keep_every) {
  if (limit <= 0) return;
  std::vector<std::string> alike;
  const auto best = link_target(in(directory, kBest));
  for (const auto& [made, updates, name] : saves_in(directory)) {
    const bool nth = keep_every > 0 && updates > 0 && updates % keep_every == 0;
    const bool stays = nth || name == best;
    if (!stays && name != newest && stem_of(name) == stem_of(newest)) alike.push_back(name);
  }
  const auto kept = static_cast<std::size_t>(limit - 1);
  for (std::size_t i = 0; i + kept < alike.size(); ++i) {
    try {
      // Renamed first: what is half removed is no save.
      const auto going = in(directory, join('.', alike[i], kRemoving));
      rename_over(in(directory, alike[i]), going);
      remove_tree(going);
    } catch (const Error& error) {
      log::warning("an old save stays: ", error.what());
    }
  }
}

void mark_best(const std::string& save, const std::map<std::string, std::string>& user,
               std::int64_t total_limit, std::int64_t keep_every) {
  const auto slash = save.find_last_of('/');
  const auto directory = slash == std::string::npos ? std::string(".") : save.substr(0, slash + 1);
  const auto name = save.substr(slash + 1);
  check_name(name);
  const Lock lock(directory);
  check_place(directory, name, /*best=*/true);
  auto manifest = read_manifest(save);
  for (const auto& [key, value] : user) manifest.user[key] = value;
  const auto unfinished = in(directory, temporary_name(name, random_word()));
  write_new_file(unfinished, to_text(manifest));
  // By its time saves are put in order, and this one is as old as it was.
  set_changed_at(unfinished, changed_at(in(save, kManifest)));
  rename_over(unfinished, in(save, kManifest));
  sync(save);
  link_in(directory, name, kBest);
  sync(directory);
  rotate(directory, name, total_limit, keep_every);
}

std::string find(const std::string& path) {
  if (is_save(path)) return path;
  const auto latest = link_target(in(path, kLatest));
  const bool is_name = !latest.empty() && latest.find('/') == std::string::npos;
  if (is_name && is_save(in(path, latest))) return in(path, latest);
  // Killed between the save and its link.
  const auto saves = saves_in(path);
  return saves.empty() ? std::string() : in(path, saves.back().name);
}

std::vector<std::string> list(const std::string& directory) {
  std::vector<std::string> paths;
  for (const auto& save : saves_in(directory)) paths.push_back(in(directory, save.name));
  return paths;
}

}  // namespace poise::state

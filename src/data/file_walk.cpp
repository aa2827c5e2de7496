// The sorted walk over files and folders. POSIX calls, not std::filesystem: libtorch exports the
// latter's functions from another libstdc++ than ours, and some of them crash when the two meet.
#include "data/file_walk.h"

#include <dirent.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <optional>
#include <set>
#include <utility>

#include "poise/error.h"
#include "poise/log.h"

namespace poise::data {
namespace {

[[noreturn]] void fail_on(const std::string& path) {
  if (errno == ENOENT) fail("data", "no such file or folder: ", path, "; check the path");
  fail("data", "cannot read ", path, ": ", std::strerror(errno), "; check its permissions");
}

mode_t kind_of(const std::string& path) {
  struct stat status {};
  if (::stat(path.c_str(), &status) != 0) fail_on(path);
  return status.st_mode;
}

// The real path without any link in it; nothing where it leads nowhere.
std::optional<std::string> resolved(const std::string& path) {
  const std::unique_ptr<char, void (*)(void*)> real(::realpath(path.c_str(), nullptr), std::free);
  if (!real) return std::nullopt;
  return std::string(real.get());
}

std::vector<std::string> names_in(const std::string& folder) {
  const std::unique_ptr<DIR, int (*)(DIR*)> open(::opendir(folder.c_str()), ::closedir);
  if (!open) fail_on(folder);
  std::vector<std::string> names;
  for (;;) {
    errno = 0;
    const dirent* entry = ::readdir(open.get());
    if (!entry && errno != 0) fail_on(folder);
    if (!entry) return names;
    const std::string name = entry->d_name;
    if (name != "." && name != "..") names.push_back(name);
  }
}

struct Found {
  std::string key;  // path inside the folder: what is sorted
  std::string file;
};

class FolderWalk {
 public:
  FolderWalk(const std::string& folder, const std::string& suffix) : suffix_(suffix) {
    const auto root = resolved(folder);
    if (!root) fail_on(folder);
    root_ = *root == "/" ? *root : *root + '/';
    visit("");
  }
  std::vector<std::string> sorted_files();
  std::size_t ignored_links() const { return ignored_links_; }

 private:
  void visit(const std::string& inside);  // "" or a path inside the root that ends in /
  void follow(const std::string& key);

  std::string root_;  // ends in /
  std::string suffix_;
  std::vector<Found> files_;
  std::vector<Found> links_;  // with their targets
  std::size_t ignored_links_ = 0;
};

void FolderWalk::visit(const std::string& inside) {
  for (const std::string& name : names_in(root_ + inside)) {
    const std::string key = inside + name;
    struct stat status {};
    if (::lstat((root_ + key).c_str(), &status) != 0) fail_on(root_ + key);
    if (S_ISLNK(status.st_mode)) {
      follow(key);
    } else if (S_ISDIR(status.st_mode)) {
      visit(key + '/');
    } else if (S_ISREG(status.st_mode) && key.ends_with(suffix_)) {
      files_.push_back({key, root_ + key});
    }
  }
}

void FolderWalk::follow(const std::string& key) {
  auto target = resolved(root_ + key);
  if (!target || !target->starts_with(root_) || !S_ISREG(kind_of(*target))) {
    ++ignored_links_;
  } else if (key.ends_with(suffix_)) {
    links_.push_back({key, std::move(*target)});
  }
}

std::vector<std::string> FolderWalk::sorted_files() {
  const auto by_key = [](const Found& a, const Found& b) { return a.key < b.key; };
  std::set<std::string> seen;
  for (const Found& found : files_) seen.insert(found.file);
  std::sort(links_.begin(), links_.end(), by_key);
  for (const Found& link : links_) {
    if (seen.insert(link.file).second) files_.push_back(link);
  }
  std::sort(files_.begin(), files_.end(), by_key);
  std::vector<std::string> result;
  for (Found& found : files_) result.push_back(std::move(found.file));
  return result;
}

std::vector<std::string> walk_folder(const std::string& folder, const std::string& suffix) {
  FolderWalk found(folder, suffix);
  auto files = found.sorted_files();
  if (found.ignored_links() > 0) {
    log::info("[data] ", folder, ": ", found.ignored_links(),
              " links not followed (to a folder, out of it, or to nothing)");
  }
  if (files.empty()) {
    fail("data", "no file", suffix.empty() ? "" : " ending in '" + suffix + "'",
         " in folder: ", folder, "; check path and suffix");
  }
  return files;
}

}  // namespace

std::vector<std::string> walk(const std::vector<std::string>& paths, const std::string& suffix) {
  if (paths.empty()) fail("data", "no path given; name a file or a folder");
  std::vector<std::string> result;
  for (const std::string& path : paths) {
    const mode_t kind = kind_of(path);
    if (S_ISDIR(kind)) {
      for (std::string& file : walk_folder(path, suffix)) result.push_back(std::move(file));
    } else if (S_ISREG(kind)) {
      result.push_back(path);
    } else {
      fail("data", "neither a file nor a folder: ", path, "; name a regular file");
    }
  }
  return result;
}

}  // namespace poise::data

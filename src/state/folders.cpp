// Folders, links and the lock.
#include <dirent.h>
#include <fcntl.h>
#include <ftw.h>
#include <stdio.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <memory>
#include <mutex>
#include <set>

#include "core/fork.h"
#include "poise/error.h"
#include "poise/interrupt.h"
#include "state/files.h"

namespace poise::state {
namespace {

[[noreturn]] void refuse(const char* what, const std::string& path) {
  fail("state", "cannot ", what, ' ', path, ": ", std::strerror(errno),
       "; look at the path and its file system");
}

int remove_one(const char* path, const struct stat*, int, struct FTW*) { return ::remove(path); }

mode_t mode_of(const std::string& path) {
  struct stat found {};
  return ::lstat(path.c_str(), &found) == 0 ? found.st_mode : 0;
}

void collect(const std::string& folder, const std::string& prefix, std::vector<std::string>& out) {
  for (const auto& name : names_in(folder)) {
    const auto path = in(folder, name);
    if (is_folder(path)) {
      collect(path, prefix + name + '/', out);
    } else if (is_file(path)) {
      out.push_back(prefix + name);
    } else {
      fail("state", path, " is neither a file nor a folder; a save holds nothing else");
    }
  }
}

}  // namespace

std::string in(const std::string& folder, const std::string& name) {
  std::string path = folder;
  if (!path.empty() && path.back() != '/') path += '/';
  path += name;
  return path;
}

bool is_file(const std::string& path) { return S_ISREG(mode_of(path)); }
bool is_folder(const std::string& path) { return S_ISDIR(mode_of(path)); }
bool is_there(const std::string& path) { return mode_of(path) != 0; }

std::int64_t changed_at(const std::string& path) {
  struct stat found {};
  if (::lstat(path.c_str(), &found) != 0) return 0;
  return std::int64_t{found.st_mtim.tv_sec} * 1'000'000'000 + found.st_mtim.tv_nsec;
}

void set_changed_at(const std::string& path, std::int64_t nanoseconds) {
  constexpr std::int64_t kSecond = 1'000'000'000;
  const timespec times[] = {{0, UTIME_OMIT}, {nanoseconds / kSecond, nanoseconds % kSecond}};
  if (::utimensat(AT_FDCWD, path.c_str(), times, 0) != 0) refuse("set the time of", path);
}

std::int64_t free_bytes(const std::string& path) {
  struct statvfs found {};
  if (::statvfs(path.c_str(), &found) != 0) refuse("look at", path);
  return static_cast<std::int64_t>(found.f_bavail) * static_cast<std::int64_t>(found.f_frsize);
}

void make_folder(const std::string& path) {
  if (::mkdir(path.c_str(), 0777) != 0) refuse("make the folder", path);
}

void make_folders(const std::string& path) {
  if (is_folder(in(path, "."))) return;
  for (std::size_t at = 1; at <= path.size(); ++at) {
    if (at < path.size() && path[at] != '/') continue;
    const auto part = path.substr(0, at);
    if (::mkdir(part.c_str(), 0777) != 0 && errno != EEXIST) refuse("make the folder", part);
  }
  struct stat found {};
  if (::stat(path.c_str(), &found) != 0) refuse("use the folder", path);
  if (!S_ISDIR(found.st_mode)) {
    fail("state", path, " is no folder; choose another directory for saves");
  }
}

std::vector<std::string> names_in(const std::string& folder) {
  const std::unique_ptr<DIR, int (*)(DIR*)> open(::opendir(folder.c_str()), ::closedir);
  if (!open) refuse("list", folder);
  std::vector<std::string> names;
  errno = 0;
  while (const auto* entry = ::readdir(open.get())) {
    const std::string name = entry->d_name;
    if (name != "." && name != "..") names.push_back(name);
    errno = 0;
  }
  if (errno != 0) refuse("list", folder);
  std::sort(names.begin(), names.end());
  return names;
}

std::vector<std::string> files_below(const std::string& folder) {
  std::vector<std::string> files;
  collect(folder, "", files);
  return files;
}

void sync(const std::string& path) {
  const Descriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW));
  if (file.get() < 0) refuse("open", path);
  // Some network file systems have no such thing for folders.
  int result = 0;
  do {
    result = ::fsync(file.get());
  } while (result != 0 && errno == EINTR);
  if (result != 0 && errno != EINVAL) refuse("write", path);
}

void remove_tree(const std::string& path) {
  if (::nftw(path.c_str(), remove_one, 16, FTW_DEPTH | FTW_PHYS) != 0 && errno != ENOENT) {
    refuse("remove", path);
  }
}

void rename_over(const std::string& from, const std::string& to) {
  if (::rename(from.c_str(), to.c_str()) != 0) refuse("make", to);
}

void put_in_place(const std::string& folder, const std::string& other) {
  if (mode_of(other) == 0) return rename_over(folder, other);
  if (::renameat2(AT_FDCWD, folder.c_str(), AT_FDCWD, other.c_str(), RENAME_EXCHANGE) == 0) return;
  fail("state", "cannot replace ", other, ": ", std::strerror(errno),
       "; this file system cannot exchange folders in one step: remove that one, or give this save "
       "another name");
}

void link_to(const std::string& target, const std::string& link) {
  if (::symlink(target.c_str(), link.c_str()) != 0) refuse("make the link", link);
}

std::string link_target(const std::string& link) {
  std::string target(4096, '\0');
  const auto length = ::readlink(link.c_str(), target.data(), target.size());
  target.resize(length > 0 ? static_cast<std::size_t>(length) : 0);
  return target;
}

namespace {

// A lock of fcntl's is the process's: it does not keep two saves of one process apart, and goes
// when any of them closes the file.
struct OfThisProcess {
  std::mutex mutex;
  std::condition_variable gone;
  std::set<std::tuple<int, dev_t, ino_t>> held;  // by fork: a child holds nothing
};
OfThisProcess& of_this_process() {
  static auto* one = new OfThisProcess;
  return *one;
}

}  // namespace

Lock::InProcess::InProcess(const std::string& folder) {
  struct stat found {};
  if (::stat(folder.c_str(), &found) != 0) refuse("use the folder", folder);
  folder_ = {fork_generation(), found.st_dev, found.st_ino};
  auto& all = of_this_process();
  std::unique_lock lock(all.mutex);
  interruptible_wait(all.gone, lock, [&] { return all.held.count(folder_) == 0; });
  all.held.insert(folder_);
}

Lock::InProcess::~InProcess() {
  auto& all = of_this_process();
  const std::lock_guard lock(all.mutex);
  all.held.erase(folder_);
  all.gone.notify_all();
}

Lock::Lock(const std::string& folder) : in_process_(folder) {
  const auto path = in(folder, ".lock");
  file_ = Descriptor(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0666));
  if (file_.get() < 0) refuse("make", path);
  // Not flock: a data loader's worker would inherit that, and keep it after its parent was killed.
  struct flock wanted {};
  wanted.l_type = F_WRLCK;
  wanted.l_whence = SEEK_SET;
  if (::fcntl(file_.get(), F_SETLK, &wanted) == 0) return;
  if (errno == EAGAIN || errno == EACCES) {
    fail("state", "another process is saving into ", folder,
         "; give each run a directory of its own");
  }
  // A file system without locks: nothing is wrong with it but this.
}

}  // namespace poise::state

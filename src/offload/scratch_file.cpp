// Opening, growing, and clearing what dead processes left.
#include "offload/scratch_file.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "poise/error.h"
#include "poise/log.h"

namespace poise::offload {
namespace {

constexpr const char* kPrefix = "poise-offload-";

constexpr const char* kOtherFolder = "set offload.directory to a folder that can be written";

// Every folder on the way that is not there.
void make_directory(const std::string& path) {
  for (std::size_t end = path.find('/', 1);; end = path.find('/', end + 1)) {
    const auto part = path.substr(0, end);
    if (mkdir(part.c_str(), 0700) != 0 && errno != EEXIST && errno != EROFS && errno != EACCES) {
      fail("offload", "cannot make the folder ", part, ": ", std::strerror(errno), "; ",
           kOtherFolder);
    }
    if (end == std::string::npos) break;
  }
  struct stat status;
  if (stat(path.c_str(), &status) != 0) {
    fail("offload", "cannot make the folder ", path, ": ", std::strerror(errno), "; ",
         kOtherFolder);
  }
  if (!S_ISDIR(status.st_mode)) {
    fail("offload", "offload.directory is no folder: ", path, "; give another one");
  }
}

// A file of ours whose lock nobody holds belongs to a process that is gone.
bool clear_if_dead(int directory, const char* name) {
  const int file = openat(directory, name, O_RDONLY | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK);
  if (file < 0) return false;
  struct stat status;
  const bool dead = fstat(file, &status) == 0 && S_ISREG(status.st_mode) &&
                    status.st_uid == geteuid() && flock(file, LOCK_EX | LOCK_NB) == 0;
  const bool cleared = dead && unlinkat(directory, name, 0) == 0;
  close(file);
  return cleared;
}

void clear_left_overs(const std::string& path) {
  DIR* directory = opendir(path.c_str());
  if (directory == nullptr) return;  // opening the file will say why
  int cleared = 0;
  while (const dirent* entry = readdir(directory)) {
    if (std::strncmp(entry->d_name, kPrefix, std::strlen(kPrefix)) != 0) continue;
    cleared += clear_if_dead(dirfd(directory), entry->d_name) ? 1 : 0;
  }
  closedir(directory);
  if (cleared > 0) {
    log::info("[offload] ", cleared, " files that a dead run left in ", path, " were cleared");
  }
}

}  // namespace

ScratchFile::ScratchFile(const std::string& directory, Name name) : directory_(directory) {
  make_directory(directory);
  clear_left_overs(directory);
  const int error = name == Name::none && open_unnamed() == 0 ? 0 : open_named();
  if (error != 0) {
    fail("offload", "cannot open a file in ", directory, ": ", std::strerror(error), "; ",
         error == EMFILE || error == ENFILE ? "raise the limit of open files (ulimit -n)"
                                            : kOtherFolder);
  }
  if (!file_->direct()) note_page_cache("its file system has none");
}

// These two return 0 or an errno.
int ScratchFile::open_unnamed() {
  Descriptor file(open(directory_.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600));
  if (file.get() < 0) return errno;
  label_ = join("the unnamed file in ", directory_);
  file_.emplace(std::move(file));
  return 0;
}

int ScratchFile::open_named() {
  timespec now{};
  clock_gettime(CLOCK_REALTIME, &now);
  label_ = join(directory_, '/', kPrefix, getpid(), '-', now.tv_sec, '-', now.tv_nsec, ".tmp");
  Descriptor file(open(label_.c_str(), O_CREAT | O_EXCL | O_RDWR | O_NOFOLLOW | O_CLOEXEC, 0600));
  if (file.get() < 0) return errno;
  // From here to the unlink a kill leaves the file: unlocked then, and cleared by the next run.
  flock(file.get(), LOCK_EX | LOCK_NB);
  unlink(label_.c_str());
  file_.emplace(std::move(file));
  return 0;
}

void ScratchFile::grow(std::int64_t bytes) {
  const FileSizeSignalBlocked blocked;
  int error = 0;
  do {
    error = fallocate(descriptor(), 0, bytes_, bytes) == 0 ? 0 : errno;
  } while (error == EINTR);
  if (error == EOPNOTSUPP) error = ftruncate(descriptor(), bytes_ + bytes) == 0 ? 0 : errno;
  if (error != 0) {
    fail("offload", "cannot take ", bytes, " bytes at offset ", bytes_, " of ", label_, ": ",
         std::strerror(error), "; ", advice_for(error));
  }
  bytes_ += bytes;
}

void ScratchFile::note_refusal() { note_page_cache("it was refused"); }

void ScratchFile::note_page_cache(const char* why) {
  if (noted_.exchange(true)) return;
  log::info("[offload] ", label_, " is used without O_DIRECT (", why,
            "): it goes through the page cache, which takes memory of the host");
}

const char* advice_for(int error) {
  switch (error) {
    case EFBIG:
      return "raise the limit of file sizes (ulimit -f)";
    case ENOSPC:
    case EDQUOT:
      return "free some room there, or set offload.directory to another disk";
    default:
      return "look at the disk (dmesg), or set offload.directory to another one";
  }
}

}  // namespace poise::offload

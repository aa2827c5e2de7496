// mmap and pread behind MappedFile.
#include "data/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "poise/error.h"

namespace poise::data {
namespace {

[[noreturn]] void fail_on(const char* what, const std::string& path) {
  const char* remedy =
      errno == EACCES ? "; check its permissions" : "; check that it is a readable file";
  fail("data", "cannot ", what, ' ', path, ": ", std::strerror(errno), remedy);
}

class Descriptor {
 public:
  explicit Descriptor(const std::string& path)
      : value_(::open(path.c_str(), O_RDONLY | O_CLOEXEC)) {
    if (value_ < 0) fail_on("open", path);
  }
  ~Descriptor() { ::close(value_); }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int get() const { return value_; }

 private:
  int value_;
};

}  // namespace

MappedFile::MappedFile(std::string path, Access access) : path_(std::move(path)) {
  const Descriptor file(path_);
  struct stat status {};
  if (::fstat(file.get(), &status) != 0) fail_on("stat", path_);
  bytes_ = status.st_size;
  device_ = status.st_dev;
  inode_ = status.st_ino;
  if (bytes_ == 0 || access == Access::read) return;
  void* map =
      ::mmap(nullptr, static_cast<std::size_t>(bytes_), PROT_READ, MAP_PRIVATE, file.get(), 0);
  if (map == MAP_FAILED) fail_on("map", path_);
  map_ = static_cast<const unsigned char*>(map);
}

MappedFile::~MappedFile() {
  if (map_) ::munmap(const_cast<unsigned char*>(map_), static_cast<std::size_t>(bytes_));
}

MappedFile::MappedFile(MappedFile&& other) noexcept
    : path_(std::move(other.path_)),
      bytes_(other.bytes_),
      map_(std::exchange(other.map_, nullptr)),
      device_(other.device_),
      inode_(other.inode_) {}

// Memory behind the end of a file ends the process when it is read. A file that was removed or
// replaced is still there for its map.
void MappedFile::check_length(std::int64_t end) const {
  struct stat status {};
  if (::stat(path_.c_str(), &status) != 0) return;
  const bool same = status.st_dev == device_ && status.st_ino == inode_;
  if (same && status.st_size < end) fail_on_end(status.st_size);
}

// Without a map the old file is gone: what is there now has other bytes at the same places.
void MappedFile::check_same(int file) const {
  struct stat status {};
  if (::fstat(file, &status) != 0) fail_on("stat", path_);
  if (status.st_dev == device_ && status.st_ino == inode_) return;
  fail("data", "file was replaced while it was read: ", path_,
       "; leave the files as they are during a run");
}

void MappedFile::fail_on_end(std::int64_t offset) const {
  fail("data", "file became shorter while it was read: ", path_, " ended at byte ", offset, " of ",
       bytes_, "; leave the files as they are during a run");
}

void MappedFile::copy(std::int64_t offset, std::int64_t count, unsigned char* to) const {
  POISE_CHECK(offset >= 0 && count >= 0 && offset + count <= bytes_, path_);
  if (map_) {
    check_length(offset + count);
    std::memcpy(to, map_ + offset, static_cast<std::size_t>(count));
    return;
  }
  if (count == 0) return;
  const Descriptor file(path_);
  check_same(file.get());
  while (count > 0) {
    const ssize_t got = ::pread(file.get(), to, static_cast<std::size_t>(count), offset);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) fail_on("read", path_);
    if (got == 0) fail_on_end(offset);
    to += got;
    offset += got;
    count -= got;
  }
}

}  // namespace poise::data

// Writing, reading and moving files.
#include "state/files.h"

#include <dirent.h>
#include <fcntl.h>
#include <ftw.h>
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <utility>

#include "offload/digest.h"
#include "poise/error.h"

namespace poise::state {
namespace {

constexpr std::size_t kReadTile = std::size_t{4} << 20;
constexpr std::size_t kReadAhead = std::size_t{32} << 20;

[[noreturn]] void refuse(const char* what, const std::string& path) {
  const int reason = errno;
  const char* advice = reason == ENOSPC || reason == EDQUOT
                           ? "; free some space. Earlier saves are untouched"
                           : "; look at the path and its file system";
  fail("state", "cannot ", what, ' ', path, ": ", std::strerror(reason), advice);
}

int checked(int result, const char* what, const std::string& path) {
  if (result < 0) refuse(what, path);
  return result;
}

// Again where a signal came in between.
template <class Call>
auto repeated(Call call) {
  for (;;) {
    const auto result = call();
    if (result >= 0 || errno != EINTR) return result;
  }
}

Descriptor open_new(const std::string& path) {
  constexpr int kNew = O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW;
  return Descriptor(
      checked(repeated([&] { return ::open(path.c_str(), kNew, 0666); }), "make", path));
}

void to_disk(int file, const std::string& path) {
  checked(repeated([&] { return ::fsync(file); }), "write", path);
}

}  // namespace

OutputFile::OutputFile(std::string path) : path_(std::move(path)), file_(open_new(path_)) {}

void OutputFile::write(char* data, std::size_t size) {
  constexpr auto kSector = static_cast<std::size_t>(offload::kSector);
  auto whole = size;
  if (file_.direct()) whole = (size + kSector - 1) / kSector * kSector;
  std::memset(data + size, 0, whole - size);
  move(data, whole);
  size_ += size;
}

void OutputFile::write_from_anywhere(const char* data, std::size_t size) {
  POISE_CHECK(copies());
  move(data, size);
  size_ += size;
}

void OutputFile::move(const char* data, std::size_t size) {
  using Next = offload::Request::Next;
  const offload::FileSizeSignalBlocked blocked;
  offload::Request request(static_cast<std::int64_t>(size), true);
  for (auto next = size == 0 ? Next::over : Next::again; next == Next::again;) {
    const auto at = request.moved();
    const auto done =
        ::pwrite(file_.descriptor(), data + at, static_cast<std::size_t>(request.left()),
                 static_cast<off_t>(size_) + at);
    next = request.answered(done < 0 ? -errno : done, file_);
    if (next != Next::failed) continue;
    errno = request.error() != 0 ? request.error() : ENOSPC;
    refuse("write", path_);
  }
}

void OutputFile::finish() {
  const auto size = static_cast<off_t>(size_);
  checked(repeated([&] { return ::ftruncate(file_.descriptor(), size); }), "write", path_);
  to_disk(file_.descriptor(), path_);
  file_.close();
}

InputFile::InputFile(std::string path)
    : path_(std::move(path)),
      file_(checked(::open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW), "open", path_)) {
  struct stat found {};
  checked(::fstat(file_.get(), &found), "open", path_);
  if (!S_ISREG(found.st_mode)) fail("state", path_, " is no file; look at how it came there");
  size_ = static_cast<std::uint64_t>(found.st_size);
}

void InputFile::read(void* target, std::size_t size, std::uint64_t offset) const {
  auto* to = static_cast<char*>(target);
  while (size > 0) {
    const auto place = static_cast<off_t>(offset);
    const auto done = repeated([&] { return ::pread(file_.get(), to, size, place); });
    if (done < 0) refuse("read", path_);
    if (done == 0) {
      fail("state", path_, " ends at byte ", offset, "; it was cut off: load another save");
    }
    to += done;
    offset += static_cast<std::uint64_t>(done);
    size -= static_cast<std::size_t>(done);
  }
}

std::uint64_t InputFile::digest(offload::Hash hash) const {
  const auto tile = std::make_unique<char[]>(kReadTile);
  offload::Digest digest(hash);
  for (std::uint64_t at = 0; at < size_;) {
    const auto length = static_cast<std::size_t>(std::min<std::uint64_t>(kReadTile, size_ - at));
    // The kernel's own read-ahead is far too short for a fast disk.
    ::posix_fadvise(file_.get(), static_cast<off_t>(at == 0 ? 0 : at + kReadAhead),
                    static_cast<off_t>(at == 0 ? kReadAhead + kReadTile : kReadTile),
                    POSIX_FADV_WILLNEED);
    read(tile.get(), length, at);
    digest.update(tile.get(), length);
    at += length;
  }
  return digest.value();
}

void write_new_file(const std::string& path, const std::string& bytes) {
  const auto file = open_new(path);
  for (std::size_t at = 0; at < bytes.size();) {
    const auto left = bytes.size() - at;
    const auto done = repeated([&] { return ::write(file.get(), bytes.data() + at, left); });
    if (done <= 0) refuse("write", path);
    at += static_cast<std::size_t>(done);
  }
  to_disk(file.get(), path);
}

std::string read_file(const std::string& path, std::uint64_t limit) {
  const InputFile file(path);
  if (file.size() > limit) {
    fail("state", path, " has ", file.size(), " bytes, more than the ", limit,
         " that such a file can have; load another save");
  }
  std::string bytes(static_cast<std::size_t>(file.size()), '\0');
  file.read(bytes.data(), bytes.size(), 0);
  return bytes;
}

}  // namespace poise::state

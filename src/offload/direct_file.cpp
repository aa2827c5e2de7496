// Flags of files, and the cases of an answer.
#include "offload/direct_file.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <signal.h>
#include <sys/statfs.h>
#include <time.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

namespace poise::offload {
namespace {

constexpr int kRetries = 100;  // of one request that the system asks to make again

// tmpfs takes the flag and copies all the same.
bool is_in_memory(int file) {
  struct statfs system {};
  return ::fstatfs(file, &system) == 0 &&
         (system.f_type == TMPFS_MAGIC || system.f_type == RAMFS_MAGIC);
}

bool switch_on(int file) {
  return !is_in_memory(file) && ::fcntl(file, F_SETFL, ::fcntl(file, F_GETFL) | O_DIRECT) == 0;
}

}  // namespace

Descriptor::~Descriptor() {
  if (fd_ >= 0) ::close(fd_);
}
Descriptor::Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
Descriptor& Descriptor::operator=(Descriptor&& other) noexcept {
  std::swap(fd_, other.fd_);
  return *this;
}

DirectFile::DirectFile(Descriptor file) : file_(std::move(file)), direct_(switch_on(file_.get())) {}

void DirectFile::use_page_cache() {
  if (!direct_.exchange(false)) return;
  ::fcntl(file_.get(), F_SETFL, ::fcntl(file_.get(), F_GETFL) & ~O_DIRECT);
}

void DirectFile::close() { file_ = Descriptor(); }

Request::Next Request::answered(std::int64_t result, DirectFile& file) {
  const auto failed = [this](int error) {
    error_ = error;
    return Next::failed;
  };
  // Some file systems take the flag and refuse the request. Others may have been under way then.
  if ((result == -EINVAL || result == -EOPNOTSUPP) && !std::exchange(refused_, true)) {
    file.use_page_cache();
    return Next::again;
  }
  if (result == -EINTR || result == -EAGAIN) {
    return ++retries_ > kRetries ? failed(static_cast<int>(-result)) : Next::again;
  }
  if (result <= 0) return failed(static_cast<int>(-result));
  moved_ += result;
  if (moved_ == bytes_) return Next::over;
  if (moved_ % kSector != 0 && file.direct()) {
    if (!write_) return failed(0);  // the end of the file
    file.use_page_cache();
  }
  return Next::again;  // what comes next says why it was short
}

FileSizeSignalBlocked::FileSizeSignalBlocked() {
  sigset_t set, before;
  sigemptyset(&set);
  sigaddset(&set, SIGXFSZ);
  pthread_sigmask(SIG_BLOCK, &set, &before);
  was_blocked_ = sigismember(&before, SIGXFSZ) == 1;
}

FileSizeSignalBlocked::~FileSizeSignalBlocked() {
  if (was_blocked_) return;
  const int error = errno;
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGXFSZ);
  const timespec now{};
  while (sigtimedwait(&set, nullptr, &now) == SIGXFSZ) {
  }
  pthread_sigmask(SIG_UNBLOCK, &set, nullptr);
  errno = error;
}

}  // namespace poise::offload

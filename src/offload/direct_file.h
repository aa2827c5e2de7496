// A file that is read and written past the page cache where its file system can, and what the
// system's answers to its requests mean. The files of saves and of the file store are such.
#pragma once

#include <atomic>
#include <cstdint>

namespace poise::offload {

inline constexpr std::int64_t kSector = 4096;  // of O_DIRECT: addresses, offsets, sizes

// A file descriptor that closes itself.
class Descriptor {
 public:
  explicit Descriptor(int fd = -1) : fd_(fd) {}
  ~Descriptor();
  Descriptor(Descriptor&& other) noexcept;
  Descriptor& operator=(Descriptor&& other) noexcept;
  int get() const { return fd_; }

 private:
  int fd_;
};

class DirectFile {
 public:
  // An open file, opened without O_DIRECT: one that is refused with it may be made all the same.
  explicit DirectFile(Descriptor file);
  int descriptor() const { return file_.get(); }
  bool direct() const { return direct_; }  // past the page cache
  void use_page_cache();                   // from now on
  void close();

 private:
  Descriptor file_;
  std::atomic<bool> direct_;
};

// A request to a file until all its bytes have moved: whoever makes it, of what is left, hands the
// system's answer to answered().
class Request {
 public:
  explicit Request(std::int64_t bytes = 0, bool write = false) : bytes_(bytes), write_(write) {}
  bool write() const { return write_; }
  std::int64_t bytes() const { return bytes_; }
  std::int64_t moved() const { return moved_; }
  std::int64_t left() const { return bytes_ - moved_; }

  enum class Next { over, again, failed };
  Next answered(std::int64_t result, DirectFile& file);  // bytes, or a negative errno
  int error() const { return error_; }  // of a request that failed; 0: nothing more would move

 private:
  std::int64_t bytes_, moved_ = 0;
  bool write_, refused_ = false;
  int retries_ = 0, error_ = 0;
};

// Blocks SIGXFSZ for its life, so that a file size limit is an errno and not the process's end.
class FileSizeSignalBlocked {
 public:
  FileSizeSignalBlocked();
  ~FileSizeSignalBlocked();
  FileSizeSignalBlocked(const FileSizeSignalBlocked&) = delete;
  FileSizeSignalBlocked& operator=(const FileSizeSignalBlocked&) = delete;

 private:
  bool was_blocked_ = false;
};

}  // namespace poise::offload

// One file's bytes, read only: mapped, or read piece by piece where maps would run out.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <string>

namespace poise::data {

// Never changes after construction, so threads and forked processes share it without a lock.
class MappedFile {
 public:
  enum class Access { mapped, read };

  // Throws Error naming the file where it cannot be opened, sized or mapped.
  MappedFile(std::string path, Access access);
  ~MappedFile();
  MappedFile(MappedFile&& other) noexcept;
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;
  MappedFile& operator=(MappedFile&&) = delete;

  std::int64_t bytes() const { return bytes_; }
  const std::string& path() const { return path_; }
  // Copies [offset, offset + count) to `to`. Throws Error where the file has become shorter,
  // or, without a map, is another one by now.
  void copy(std::int64_t offset, std::int64_t count, unsigned char* to) const;

 private:
  void check_length(std::int64_t end) const;
  void check_same(int file) const;
  [[noreturn]] void fail_on_end(std::int64_t offset) const;

  std::string path_;
  std::int64_t bytes_ = 0;
  const unsigned char* map_ = nullptr;  // null: read from the file
  dev_t device_ = 0;                    // of what was opened
  ino_t inode_ = 0;
};

}  // namespace poise::data

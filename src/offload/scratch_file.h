// The file under a file store: without a name where the file system can, so that nothing is left
// of it however the process ends; else with one that is locked and taken away at once.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>

namespace poise::offload {

class ScratchFile {
 public:
  enum class Name { none, taken_away };  // tests ask for the second, as some file systems do
  // Throws Error: the folder cannot be made or written to, too many open files.
  explicit ScratchFile(const std::string& directory, Name name = Name::none);
  ~ScratchFile();
  ScratchFile(const ScratchFile&) = delete;
  ScratchFile& operator=(const ScratchFile&) = delete;

  int descriptor() const { return descriptor_; }
  const std::string& label() const { return label_; }  // for messages
  std::int64_t bytes() const { return bytes_; }
  // Takes the room on the disk at once. Throws Error: full, or over the limit of file sizes.
  void grow(std::int64_t bytes);

  bool direct() const { return direct_; }  // past the page cache
  void use_page_cache();

 private:
  int open_unnamed();
  int open_named();
  void note_page_cache(const char* why) const;

  std::string directory_;
  std::string label_;
  int descriptor_ = -1;
  std::int64_t bytes_ = 0;
  std::atomic<bool> direct_ = false;
};

// What to do about an errno of the disk.
const char* advice_for(int error);

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

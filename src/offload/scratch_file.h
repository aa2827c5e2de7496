// The file under a file store: without a name where the file system can, so that nothing is left
// of it however the process ends; else with one that is locked and taken away at once.
#pragma once

#include <atomic>
#include <cstdint>
#include <optional>
#include <string>

#include "offload/direct_file.h"

namespace poise::offload {

class ScratchFile {
 public:
  enum class Name { none, taken_away };  // tests ask for the second, as some file systems do
  // Throws Error: the folder cannot be made or written to, too many open files.
  explicit ScratchFile(const std::string& directory, Name name = Name::none);
  ScratchFile(const ScratchFile&) = delete;
  ScratchFile& operator=(const ScratchFile&) = delete;

  DirectFile& file() { return *file_; }
  int descriptor() const { return file_->descriptor(); }
  const std::string& label() const { return label_; }  // for messages
  std::int64_t bytes() const { return bytes_; }
  // Takes the room on the disk at once. Throws Error: full, or over the limit of file sizes.
  void grow(std::int64_t bytes);

  void note_refusal();  // of O_DIRECT; said once

 private:
  int open_unnamed();
  int open_named();
  void note_page_cache(const char* why);

  std::string directory_;
  std::string label_;
  std::optional<DirectFile> file_;
  std::int64_t bytes_ = 0;
  std::atomic<bool> noted_ = false;
};

// What to do about an errno of the disk.
const char* advice_for(int error);

}  // namespace poise::offload

// Files and folders by POSIX calls: every result is read, and every failure is an Error that names
// the path. (Not std::filesystem: libtorch exports one of another libstdc++.)
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

#include "offload/digest.h"
#include "offload/direct_file.h"

namespace poise::state {

using offload::Descriptor;

// A new file, written from front to back; past the page cache where the file system can.
class OutputFile {
 public:
  explicit OutputFile(std::string path);
  // `data` lies at a multiple of kSector, in memory up to the next multiple of kSector; only the
  // last write may have another `size` than a multiple of it.
  void write(char* data, std::size_t size);
  // Whether the system copies what is written, so that it may lie anywhere and have any size.
  bool copies() const { return !file_.direct(); }
  void write_from_anywhere(const char* data, std::size_t size);
  void finish();  // its true length, on the disk

 private:
  void move(const char* data, std::size_t size);

  std::string path_;
  offload::DirectFile file_;
  std::uint64_t size_ = 0;
};

class InputFile {
 public:
  explicit InputFile(std::string path);  // links are not followed
  const std::string& path() const { return path_; }
  std::uint64_t size() const { return size_; }
  void read(void* target, std::size_t size, std::uint64_t offset) const;
  std::uint64_t digest(offload::Hash hash) const;  // of all of it

 private:
  std::string path_;
  Descriptor file_;
  std::uint64_t size_ = 0;
};

void write_new_file(const std::string& path, const std::string& bytes);  // on the disk
std::string read_file(const std::string& path, std::uint64_t limit);

std::string in(const std::string& folder, const std::string& name);
bool is_file(const std::string& path);
bool is_folder(const std::string& path);           // itself, not a link to one
bool is_there(const std::string& path);            // whatever it is
std::int64_t changed_at(const std::string& path);  // nanoseconds; 0: it is not there
void set_changed_at(const std::string& path, std::int64_t nanoseconds);
std::int64_t free_bytes(const std::string& path);  // of its file system
void make_folders(const std::string& path);
void make_folder(const std::string& path);
std::vector<std::string> names_in(const std::string& folder);     // sorted, without . and ..
std::vector<std::string> files_below(const std::string& folder);  // paths from it, sorted
void sync(const std::string& path);                               // a file or a folder
void remove_tree(const std::string& path);
void rename_over(const std::string& from, const std::string& to);
// `folder` takes the place of `other` and the other way round, in one step where `other` is there.
void put_in_place(const std::string& folder, const std::string& other);
void link_to(const std::string& target, const std::string& link);
std::string link_target(const std::string& link);  // empty: it is no link

// Held by one save at a time; a dead process lets go of it.
class Lock {
 public:
  // Waits for another one of this process; throws Error where another process has it.
  explicit Lock(const std::string& folder);
  Lock(const Lock&) = delete;
  Lock& operator=(const Lock&) = delete;

 private:
  class InProcess {
   public:
    explicit InProcess(const std::string& folder);
    ~InProcess();
    InProcess(const InProcess&) = delete;
    InProcess& operator=(const InProcess&) = delete;

   private:
    std::tuple<int, dev_t, ino_t> folder_;
  };
  InProcess in_process_;
  Descriptor file_;  // closed before another save of this process may open it
};

}  // namespace poise::state

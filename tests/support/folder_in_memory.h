// A folder in memory, which the system copies to; tests are skipped where there is none.
#pragma once

#include <stdlib.h>

#include <string>

#include "state/files.h"

namespace poise::testing {

class FolderInMemory {
 public:
  FolderInMemory() {
    if (::mkdtemp(path_.data()) == nullptr) path_.clear();
  }
  ~FolderInMemory() {
    if (!path_.empty()) state::remove_tree(path_);
  }
  FolderInMemory(const FolderInMemory&) = delete;
  FolderInMemory& operator=(const FolderInMemory&) = delete;
  bool is_there() const { return !path_.empty(); }
  const std::string& path() const { return path_; }

 private:
  std::string path_ = "/dev/shm/poise_test_XXXXXX";
};

}  // namespace poise::testing

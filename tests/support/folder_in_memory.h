// A folder in memory, which the system copies to; tests are skipped where there is none, or not as
// much of it as they need: containers have 64 MB by default.
#pragma once

#include <stdlib.h>

#include <cstdint>
#include <string>
#include <utility>

#include "state/files.h"

namespace poise::testing {

class FolderInMemory {
 public:
  explicit FolderInMemory(std::int64_t bytes) {
    if (::mkdtemp(path_.data()) == nullptr) {
      path_.clear();
    } else if (state::free_bytes(path_) < bytes) {
      state::remove_tree(std::exchange(path_, {}));
    }
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

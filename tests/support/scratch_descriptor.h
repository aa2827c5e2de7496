// The descriptor of an engine's scratch file, so that a test can spoil it behind its back.
#pragma once

#include <unistd.h>

#include <string>

namespace poise::testing {

// Of a file without a name in `folder` that this process has open; -1 where there is none.
inline int scratch_descriptor(const std::string& folder) {
  for (int fd = 3; fd < 256; ++fd) {
    char target[512];
    const auto length =
        readlink(("/proc/self/fd/" + std::to_string(fd)).c_str(), target, sizeof target - 1);
    if (length <= 0) continue;
    target[length] = 0;
    const std::string name(target);
    if (name.find("(deleted)") != std::string::npos && name.find(folder) != std::string::npos) {
      return fd;
    }
  }
  return -1;
}

}  // namespace poise::testing

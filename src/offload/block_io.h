// Reads and writes of blocks, several at a time: by io_uring, or by threads that call pread and
// pwrite. One thread drives it.
#pragma once

#include <sys/uio.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace poise::offload {

struct BlockRequest {
  int file = -1;
  bool write = false;
  int buffer = 0;       // index of the buffer that the request is known by
  bool inside = false;  // `data` lies in that buffer, which may be registered
  char* data = nullptr;
  std::int64_t bytes = 0;
  std::int64_t offset = 0;
};
struct BlockResult {
  int buffer = 0;
  std::int64_t result = 0;  // bytes moved, or a negative errno
};

class BlockIo {
 public:
  virtual ~BlockIo() = default;
  virtual void start(const BlockRequest& request) = 0;  // at most one for each buffer
  virtual BlockResult wait() = 0;                       // of any request that was started
  virtual const char* name() const = 0;
};

// `why_not` is set where the system has no io_uring for us (then null is returned), or where it
// only refused to register the buffers.
std::unique_ptr<BlockIo> make_ring(const std::vector<iovec>& buffers, std::string& why_not);
// As many threads as buffers, but at most 16.
std::unique_ptr<BlockIo> make_threads(std::size_t buffers);

}  // namespace poise::offload

// Blocks over io_uring, with registered buffers where the system lets us lock them.
#include <liburing.h>

#include <cstring>

#include "offload/block_io.h"
#include "poise/error.h"

namespace poise::offload {
namespace {

class Ring final : public BlockIo {
 public:
  explicit Ring(io_uring ring) : ring_(ring) {}
  ~Ring() override { io_uring_queue_exit(&ring_); }

  int register_buffers(const std::vector<iovec>& buffers) {
    const int result =
        io_uring_register_buffers(&ring_, buffers.data(), static_cast<unsigned>(buffers.size()));
    registered_ = result == 0;
    return result;
  }

  void start(const BlockRequest& r) override {
    io_uring_sqe* entry = io_uring_get_sqe(&ring_);
    POISE_CHECK(entry != nullptr);  // as many entries as buffers
    const auto bytes = static_cast<unsigned>(r.bytes);
    const auto offset = static_cast<std::uint64_t>(r.offset);
    const bool fixed = registered_ && r.inside;
    if (fixed && r.write) {
      io_uring_prep_write_fixed(entry, r.file, r.data, bytes, offset, r.buffer);
    } else if (fixed) {
      io_uring_prep_read_fixed(entry, r.file, r.data, bytes, offset, r.buffer);
    } else if (r.write) {
      io_uring_prep_write(entry, r.file, r.data, bytes, offset);
    } else {
      io_uring_prep_read(entry, r.file, r.data, bytes, offset);
    }
    io_uring_sqe_set_data64(entry, static_cast<std::uint64_t>(r.buffer));
    io_uring_submit(&ring_);  // what it could not take now, wait() submits
  }

  BlockResult wait() override {
    io_uring_cqe* done = nullptr;
    int result = 0;
    do {  // what was started and not submitted goes along
      result = io_uring_submit_and_wait(&ring_, 1);
    } while (result == -EINTR || result == -EAGAIN || result == -EBUSY);
    if (result >= 0) result = io_uring_peek_cqe(&ring_, &done);
    if (result < 0) {
      fail("offload", "io_uring stopped working: ", std::strerror(-result),
           "; set offload.io to threads");
    }
    const BlockResult outcome{static_cast<int>(io_uring_cqe_get_data64(done)), done->res};
    io_uring_cqe_seen(&ring_, done);
    return outcome;
  }

  const char* name() const override { return registered_ ? "io_uring" : "io_uring, unregistered"; }

 private:
  io_uring ring_;
  bool registered_ = false;
};

}  // namespace

std::unique_ptr<BlockIo> make_ring(const std::vector<iovec>& buffers, std::string& why_not) {
  io_uring ring;
  const int result = io_uring_queue_init(static_cast<unsigned>(buffers.size()), &ring, 0);
  if (result < 0) {
    why_not = std::strerror(-result);
    return nullptr;
  }
  auto made = std::make_unique<Ring>(ring);
  const int registered = made->register_buffers(buffers);
  if (registered < 0) {
    why_not = join("its buffers cannot be locked (", std::strerror(-registered),
                   "; RLIMIT_MEMLOCK): it works without");
  }
  return made;
}

}  // namespace poise::offload

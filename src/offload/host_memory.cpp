// Pages of the host, pinned or not, counted apart from the ledger.
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <sys/mman.h>

#include <atomic>
#include <mutex>

#include "offload/pinned_pages.h"
#include "poise/error.h"
#include "poise/log.h"
#include "poise/offload.h"

namespace poise::offload {
namespace {

constexpr std::int64_t kPage = 4096;
constexpr std::int64_t kHugePage = 2 << 20;

std::int64_t whole_pages(std::int64_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

std::string megabytes(std::int64_t bytes) { return join((bytes + (1 << 20) - 1) >> 20, " MiB"); }

}  // namespace

// Tensors share it, so that they may outlive the HostMemory.
struct HostMemory::Books {
  c10::Device device;
  std::int64_t pinned_budget;
  std::mutex mutex;
  std::int64_t bytes = 0, pinned = 0, peak = 0;
  bool noted = false;

  // Whether it could be; says once where it could not.
  bool pin(void* data, std::int64_t wanted) {
    const std::lock_guard guard(mutex);
    if (pinned + wanted > pinned_budget) {
      note(join("pinned memory is used up to offload.pinned_budget_bytes (",
                megabytes(pinned_budget), ")"));
      return false;
    }
    const auto why = pin_pages(data, static_cast<std::size_t>(wanted), device);
    if (!why.empty()) {
      note(join("the driver pins no further memory (", why, ")"));
      return false;
    }
    pinned += wanted;
    return true;
  }
  void note(const std::string& why) {
    if (!std::exchange(noted, true)) {
      log::info("[offload] ", why, "; further host memory is pageable and slower (said once)");
    }
  }
  void add(std::int64_t more) {
    const std::lock_guard guard(mutex);
    bytes += more;
    peak = std::max(peak, bytes);
  }
  void remove(std::int64_t less, bool was_pinned) {
    const std::lock_guard guard(mutex);
    bytes -= less;
    if (was_pinned) pinned -= less;
  }
};

HostMemory::HostMemory(c10::Device device, std::int64_t pinned_budget_bytes)
    : books_(std::make_shared<Books>(device, pinned_budget_bytes)) {}

at::Tensor HostMemory::allocate(std::int64_t numel, at::ScalarType dtype) {
  const auto options = at::TensorOptions(dtype);
  const auto bytes = whole_pages(numel * static_cast<std::int64_t>(c10::elementSize(dtype)));
  if (bytes == 0) return at::empty({0}, options);
  const auto books = books_;
  void* data = mmap(nullptr, static_cast<std::size_t>(bytes), PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) {
    fail("offload", "the host has no ", megabytes(bytes), " more (", megabytes(books->bytes),
         " are held); offload less, or to a file");
  }
  if (bytes >= 2 * kHugePage) madvise(data, static_cast<std::size_t>(bytes), MADV_HUGEPAGE);
  const bool pinned = books->device.is_cuda() && books->pin(data, bytes);
  books->add(bytes);
  return at::from_blob(
      data, {numel},
      [books, bytes, pinned](void* address) {
        if (pinned) unpin_pages(address, books->device);
        munmap(address, static_cast<std::size_t>(bytes));
        books->remove(bytes, pinned);
      },
      options);
}

std::int64_t HostMemory::bytes() const {
  const std::lock_guard guard(books_->mutex);
  return books_->bytes;
}
std::int64_t HostMemory::pinned_bytes() const {
  const std::lock_guard guard(books_->mutex);
  return books_->pinned;
}
std::int64_t HostMemory::peak_bytes() const {
  const std::lock_guard guard(books_->mutex);
  return books_->peak;
}

}  // namespace poise::offload

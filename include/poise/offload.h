// Memory beyond the device: spans of elements that live in host memory or in a file, moved by
// asynchronous put() and fetch(). What lies here is outside the ledger and its budget; the stores
// count it themselves. (Ren et al. 2021, arXiv:2101.06840; Rajbhandari et al. 2021,
// arXiv:2104.07857.)
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>

#include "poise/config.h"
#include "poise/export.h"
#include "poise/stream.h"

namespace poise::offload {

// 1-D elements somewhere. One thread at a time; operations on the same elements keep their order.
class POISE_API Span {
 public:
  Span(std::int64_t numel, at::ScalarType dtype) : numel_(numel), dtype_(dtype) {}
  virtual ~Span();
  std::int64_t numel() const { return numel_; }
  at::ScalarType dtype() const { return dtype_; }

  // Elements [begin, begin + to.numel()) on their way into `to` (or from `from`): contiguous, of
  // the span's dtype, not to be touched before the event is over (event.synchronize() where the
  // host reads it). The event throws Error where the store failed, with file, offset and advice.
  Event fetch(std::int64_t begin, const at::Tensor& to);
  Event put(std::int64_t begin, const at::Tensor& from);

  // The elements themselves, where they are in memory of the device or the host, to be worked on
  // while no transfer is in flight; undefined for a file.
  virtual at::Tensor tensor() const { return {}; }

  // fetch() and put() from any dtype and device, waited for.
  void read(std::int64_t begin, const at::Tensor& to);
  void write(std::int64_t begin, const at::Tensor& from);

 private:
  virtual Event do_fetch(std::int64_t begin, const at::Tensor& to) = 0;
  virtual Event do_put(std::int64_t begin, const at::Tensor& from) = 0;
  std::int64_t numel_;
  at::ScalarType dtype_;
};
using SpanPtr = std::shared_ptr<Span>;

// Host memory outside ledger and budget: page-aligned, zero, pinned where `device` is a GPU until
// `pinned_budget_bytes` are (said once where that falls short). Tensors may outlive it.
class POISE_API HostMemory {
 public:
  HostMemory(c10::Device device, std::int64_t pinned_budget_bytes);
  at::Tensor allocate(std::int64_t numel, at::ScalarType dtype);  // 1-D; throws Error: none left
  std::int64_t bytes() const;                                     // held now
  std::int64_t pinned_bytes() const;                              // of them
  std::int64_t peak_bytes() const;

 private:
  struct Books;
  std::shared_ptr<Books> books_;
};

class POISE_API Store {
 public:
  virtual ~Store();
  // A span of zeros; its room is free again when the last copy of the handle and the last transfer
  // are gone. Throws Error where there is no room.
  virtual SpanPtr reserve(std::int64_t numel, at::ScalarType dtype) = 0;
  virtual std::int64_t file_bytes() const { return 0; }  // reserved now
};

// A tensor as a span; transfers run on a stream of the tensor's device.
POISE_API SpanPtr resident(const at::Tensor& tensor);

// In `memory`; transfers run on streams of `device`.
POISE_API std::shared_ptr<Store> host_store(std::shared_ptr<HostMemory> memory, c10::Device device);

// In a file without a name in policy.directory (made where it is missing), gone with the process;
// what a dead process left where files need a name is cleared. Takes tensors of the CPU. Blocks of
// policy.block_bytes travel policy.queue_depth at a time, each way, past the page cache
// (O_DIRECT) where the file system can, by io_uring, or by as many threads where that is missing or
// refused; both are said once. Every block has a checksum: one that was changed behind the store's
// back is an Error. 2 x queue_depth x block_bytes of `memory` are its buffers.
POISE_API std::shared_ptr<Store> file_store(const config::OffloadPolicy& policy,
                                            std::shared_ptr<HostMemory> memory);

// `store`, which takes tensors of the CPU, for those of `device` too: by way of `memory`, as much
// at once as is in flight. What waits for a fetch blocks its thread.
POISE_API std::shared_ptr<Store> staged_store(std::shared_ptr<Store> store,
                                              std::shared_ptr<HostMemory> memory,
                                              c10::Device device);

}  // namespace poise::offload

// Batches in an order that resumes anywhere: a counter-based permutation, a sampler whose cursor is
// a global sample index, memory-mapped byte and token files, and a loader that reads windows ahead.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "poise/error.h"
#include "poise/export.h"

namespace poise::data {

// A pseudo-random permutation of [0, n), chosen by (seed, epoch); 0 <= n <= 2^62. Nothing is stored
// per element and any position is read alone: the swap-or-not network (Hoang, Morris, Rogaway,
// CRYPTO 2012, arXiv:1208.1176). Its values are frozen: old cursors must find the same data.
class POISE_API Permutation {
 public:
  Permutation(std::int64_t n, std::uint64_t seed, std::uint64_t epoch);

  std::int64_t size() const { return static_cast<std::int64_t>(n_); }
  std::int64_t operator()(std::int64_t position) const;  // throws Error outside [0, n)

 private:
  struct Round {
    std::uint64_t offset;  // x is paired with offset - x (mod n)
    std::uint64_t key;     // of the bit that says whether the pair is swapped
  };
  std::uint64_t n_;
  std::vector<Round> rounds_;  // about 24 + 4 log2(n)
};

enum class Order { shuffled, sequential };

// What happens to a window that reaches the end of an epoch. No sample is ever dropped.
enum class Tail {
  short_window,  // it ends there: the last window of an epoch may be shorter
  next_epoch,    // it runs on into the next epoch
};

struct SamplerOptions {
  std::uint64_t seed = 42;
  Order order = Order::shuffled;
  Tail tail = Tail::short_window;
  std::int64_t ranks = 1;
  std::int64_t rank = 0;
};

// Which samples a rank takes. A cursor is a global sample index: epoch cursor / n, position cursor
// % n in that epoch's order. A window is the `count` positions from its cursor on, all ranks
// together; each rank takes one contiguous block of them, so the same data is seen whatever the
// number of ranks. Stateless: every call is a pure function of the cursor.
class POISE_API Sampler {
 public:
  Sampler(std::int64_t n, const SamplerOptions& options = {});  // throws Error on no samples

  // Sample indices of this rank for the window at `cursor` (can be empty in a short window).
  std::vector<std::int64_t> indices(std::int64_t cursor, std::int64_t count) const;
  // Cursor of the window after it.
  std::int64_t advance(std::int64_t cursor, std::int64_t count) const;

  std::int64_t size() const { return n_; }
  const SamplerOptions& options() const { return options_; }

 private:
  std::int64_t n_;
  SamplerOptions options_;
};

struct Batch {
  at::Tensor inputs;
  at::Tensor targets;
};

// Where batches come from. batch() may run on another thread than the one that trains.
class POISE_API Source {
 public:
  virtual ~Source() = default;
  virtual std::int64_t size() const = 0;  // samples
  virtual Batch batch(const std::vector<std::int64_t>& indices) const = 0;
};

enum class Element { byte, uint16, uint32 };  // little endian on disk

struct CorpusOptions {
  std::vector<std::string> paths = {};  // files or folders, joined in this order
  std::string suffix = {};  // of the files taken from folders, for example ".py"; empty: all
  std::int64_t sequence_length = 0;  // T, elements of one input
  Element element = Element::byte;
};

// Files read as one long row of bytes or tokens, mapped, never copied as a whole. Folders are
// walked in sorted order; links that lead out of a folder are not followed (counted in the log).
// Sample i is the T + 1 elements from i * T on: the first T are the input, the last T the target.
// Throws Error naming the file or the numbers: unreadable, empty, shorter than one sample.
// Files must not shrink while they are open. Thread-safe and fork-safe (nothing changes after
// opening).
class POISE_API ByteCorpus : public Source {
 public:
  explicit ByteCorpus(const CorpusOptions& options);
  ~ByteCorpus() override;
  ByteCorpus(const ByteCorpus&);  // shares the files
  ByteCorpus& operator=(const ByteCorpus&);

  struct Sample {
    at::Tensor input;   // int64 [T]
    at::Tensor target;  // int64 [T], the input one element later
  };
  Sample sample(std::int64_t i) const;
  Batch batch(const std::vector<std::int64_t>& indices) const override;  // int64 [B, T] each

  std::int64_t size() const override;  // samples
  std::int64_t elements() const;       // bytes or tokens
  std::int64_t sequence_length() const { return sequence_length_; }
  std::size_t files() const;

  // Cuts the last `fraction` of the elements off; both parts share the files and no element.
  struct Split;
  Split split(double fraction) const;

 private:
  struct Files;
  ByteCorpus() = default;
  void check_length(const char* what) const;
  void read(std::int64_t i, std::int64_t* input, std::int64_t* target) const;

  std::shared_ptr<const Files> files_;
  std::int64_t begin_ = 0;  // elements of files_
  std::int64_t end_ = 0;
  std::int64_t sequence_length_ = 0;
};
struct ByteCorpus::Split {
  ByteCorpus train;
  ByteCorpus validation;
};

enum class Memory { pageable, pinned };

struct WindowOptions {
  std::int64_t micro_batch_size = 1;  // samples of one micro-batch on a rank
  std::int64_t accumulation = 1;      // micro-batches of one window on a rank
  std::int64_t prefetch = 2;          // windows read ahead on another thread; 0: none
  std::int64_t epochs = 0;            // next() ends after so many; 0: never
  Memory memory = Memory::pageable;   // of the batches; pinned has no effect without a GPU
};

// The windows of a source in a sampler's order. Reading ahead changes no batch and no cursor; an
// error of the reading thread is thrown by the next() that would have handed out its window.
class POISE_API WindowLoader {
 public:
  WindowLoader(std::shared_ptr<const Source> source, const SamplerOptions& sampler,
               const WindowOptions& options);
  ~WindowLoader();
  WindowLoader(const WindowLoader&) = delete;
  WindowLoader& operator=(const WindowLoader&) = delete;

  // This rank's micro-batches of the next update; nullopt after the last epoch. Where a short
  // window has fewer samples than ranks, a rank's window may hold no micro-batch.
  std::optional<std::vector<Batch>> next();

  std::int64_t cursor() const;     // of the next window handed out
  void seek(std::int64_t cursor);  // reads nothing that is skipped
  // Micro-batches of the windows from the next one on; what was read ahead of another size is
  // dropped.
  void set_accumulation(std::int64_t micro_batches);
  std::int64_t window_samples() const;  // of a full window, all ranks
  const Sampler& sampler() const;

  // for (auto& window : loader): from the cursor on.
  class Iterator {
   public:
    using iterator_category = std::input_iterator_tag;
    using value_type = std::vector<Batch>;
    using difference_type = std::ptrdiff_t;
    using pointer = value_type*;
    using reference = value_type&;
    Iterator() = default;
    explicit Iterator(WindowLoader* loader) : loader_(loader) { ++*this; }
    reference operator*() const { return *window_; }
    Iterator& operator++() {
      auto window = loader_->next();
      window_ = window ? std::make_shared<value_type>(std::move(*window)) : nullptr;
      return *this;
    }
    bool operator==(const Iterator& other) const { return !window_ && !other.window_; }

   private:
    WindowLoader* loader_ = nullptr;
    std::shared_ptr<value_type> window_;
  };
  Iterator begin() { return Iterator(this); }
  Iterator end() { return {}; }

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// Casts a floating tensor; integer, bool and complex ones stay as they are. Of a batch only the
// inputs are cast: what the loss is measured against keeps its digits.
POISE_API at::Tensor cast_inputs(const at::Tensor& tensor, at::ScalarType dtype);
POISE_API Batch cast_inputs(const Batch& batch, at::ScalarType dtype);

// A copy in page-locked memory, from which a GPU copies without waiting; the same tensor where
// there is no GPU.
POISE_API at::Tensor pinned(const at::Tensor& tensor);

// Groups the batches of any range (torch::data loaders, vectors, generators) by `count`, the last
// window shorter: for (auto& window : windows(*loader, 4)) engine.step(window, loss).
template <class Range>
class Windows {
 public:
  using Inner = decltype(std::begin(std::declval<Range&>()));
  using Last = decltype(std::end(std::declval<Range&>()));
  using Value = std::decay_t<decltype(*std::declval<Inner&>())>;

  Windows(Range&& range, std::size_t count) : range_(std::forward<Range>(range)), count_(count) {}

  class Iterator {
   public:
    Iterator(Inner inner, Last last, std::size_t count)
        : inner_(std::move(inner)), last_(std::move(last)), count_(count) {
      fill();
    }
    std::vector<Value>& operator*() { return window_; }
    Iterator& operator++() {
      fill();
      return *this;
    }
    bool operator!=(std::default_sentinel_t) const { return !window_.empty(); }

   private:
    void fill() {
      window_.clear();
      for (; window_.size() < count_ && inner_ != last_; ++inner_) window_.push_back(*inner_);
    }
    Inner inner_;
    Last last_;
    std::size_t count_;
    std::vector<Value> window_;
  };
  Iterator begin() { return Iterator(std::begin(range_), std::end(range_), count_); }
  std::default_sentinel_t end() const { return {}; }

 private:
  Range range_;  // a reference where an lvalue was given
  std::size_t count_;
};

template <class Range>
Windows<Range> windows(Range&& range, std::size_t count) {
  if (count == 0) fail("data", "windows of 0 batches; give 1 or more");
  return Windows<Range>(std::forward<Range>(range), count);
}

}  // namespace poise::data

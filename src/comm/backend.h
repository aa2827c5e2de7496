// What carries a group's collectives. Every function blocks until this rank's part is over (on
// CUDA: is queued on the current stream) and is called in order of submission, on the group's
// stream; Group has checked shapes, dtypes and devices before. Not called in a world of one.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "comm/notes.h"
#include "comm/numbers.h"
#include "poise/comm.h"

namespace poise::comm {

// What a collective is about: compared between ranks where the backend can, and said in errors.
struct Call {
  Kind kind = Kind::barrier;
  std::string what;
  std::int64_t bytes = 0;  // of the larger of its tensors
  c10::ScalarType dtype = c10::ScalarType::Byte;
  int root = 0;             // broadcast
  int root_name = 0;        // what errors call it
  std::int64_t number = 0;  // collectives of this group before it

  bool operator==(const Call&) const = default;
};

// "collective 7, reduce_scatter of 'blocks.0' (4096 bytes of Float)"
std::string describe(const Call& call);
// The error of two ranks in different collectives, as described.
std::string differing(int rank_a, const std::string& a, int rank_b, const std::string& b);

class Backend {
 public:
  explicit Backend(Numbers numbers = {}) : numbers_(std::move(numbers)) {}
  virtual ~Backend() = default;
  virtual std::string name() const = 0;
  int called(int rank) const { return numbers_.of(rank); }  // in errors

  virtual void all_gather(const Call&, const at::Tensor& whole, const at::Tensor& mine) = 0;
  virtual void reduce_scatter(const Call&, const at::Tensor& mine, const at::Tensor& whole) = 0;
  virtual void all_reduce(const Call&, const at::Tensor& values) = 0;
  virtual void all_to_all(const Call&, const at::Tensor& received, const at::Tensor& sent) = 0;
  virtual void broadcast(const Call&, const at::Tensor& values) = 0;  // from call.root
  virtual void barrier(const Call&) = 0;

  // Scratch for reductions of `bytes`; called between collectives, on the caller's thread.
  virtual void reserve(std::int64_t bytes) {}
  virtual std::int64_t all_reduce_scratch(std::int64_t bytes) const { return 0; }  // of `bytes`

  // From any thread; by default kept here, for a rank without peers.
  virtual void leave_note(const std::string& key, const std::string& text) {
    own_.leave(key, text);
  }
  virtual std::optional<std::string> note(const std::string& key) { return own_.find(key); }

  // From any thread: ends what blocks on any rank. The first message wins.
  virtual void abort(const std::string& message) noexcept = 0;
  virtual void check() const = 0;  // throws the failure, if there is one

 private:
  const Numbers numbers_;
  Notes own_;
};

// For a world of one, whatever it calls itself.
std::unique_ptr<Backend> alone(std::string name);

}  // namespace poise::comm

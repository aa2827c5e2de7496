// Bytes that come and go in the order of the operations, and the highest they were.
#pragma once

#include <algorithm>
#include <cstdint>

namespace poise::plan {

class Tape {
 public:
  // `inside`: what a matrix product takes for each byte of its result, until that is done.
  explicit Tape(std::int64_t held = 0, std::int64_t inside = 0)
      : now_(held), peak_(held), inside_(inside) {}
  Tape& take(std::int64_t bytes) {
    now_ += bytes;
    peak_ = std::max(peak_, now_);
    return *this;
  }
  Tape& give(std::int64_t bytes) {
    now_ -= bytes;
    return *this;
  }
  // Memory of one operation only.
  Tape& pass(std::int64_t bytes) { return take(bytes).give(bytes); }
  // The result of a matrix product.
  Tape& multiply(std::int64_t bytes) { return take(bytes).pass(inside_ * bytes); }
  std::int64_t now() const { return now_; }
  std::int64_t peak() const { return peak_; }

 private:
  std::int64_t now_;
  std::int64_t peak_;
  std::int64_t inside_;
};

}  // namespace poise::plan

// Bytes that come and go in the order of the operations, and the highest they were.
#pragma once

#include <algorithm>
#include <cstdint>

namespace poise::plan {

class Tape {
 public:
  // `inside`: what a matrix product takes for each byte of its result, until that is done, and
  // `panels` whatever its result.
  explicit Tape(std::int64_t held = 0, std::int64_t inside = 0, std::int64_t panels = 0)
      : now_(held), peak_(held), inside_(inside), panels_(panels) {}
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
  Tape& multiply(std::int64_t bytes) { return multiply(bytes, panels_); }
  Tape& multiply(std::int64_t bytes, std::int64_t panels) {
    return take(bytes).pass(inside_ * bytes + panels);
  }
  std::int64_t now() const { return now_; }
  std::int64_t peak() const { return peak_; }

 private:
  std::int64_t now_;
  std::int64_t peak_;
  std::int64_t inside_;
  std::int64_t panels_;
};

}  // namespace poise::plan

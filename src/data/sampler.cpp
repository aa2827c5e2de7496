// The order of data: from a cursor to the samples of one rank.
#include <algorithm>
#include <limits>

#include "poise/data.h"

namespace poise::data {
namespace {

void check_window(std::int64_t cursor, std::int64_t count) {
  if (cursor < 0) fail("data", "cursor is ", cursor, "; a global sample index is 0 or more");
  if (count < 1) fail("data", "a window of ", count, " samples; give 1 or more");
  if (cursor > std::numeric_limits<std::int64_t>::max() - count) {
    fail("data", "cursor ", cursor, " + ", count, " samples is past 2^63; seek to a smaller one");
  }
}

}  // namespace

Sampler::Sampler(std::int64_t n, const SamplerOptions& options) : n_(n), options_(options) {
  if (n < 1) fail("data", "no samples: size is ", n, "; give data with one sample or more");
  if (options.ranks < 1 || options.rank < 0 || options.rank >= options.ranks) {
    fail("data", "rank ", options.rank, " of ", options.ranks, " ranks; give 0 <= rank < ranks");
  }
  Permutation(n, options.seed, 0);  // refuses an n that is too large now, not in the first window
}

std::int64_t Sampler::advance(std::int64_t cursor, std::int64_t count) const {
  check_window(cursor, count);
  if (options_.tail == Tail::next_epoch) return cursor + count;
  return cursor + std::min(count, n_ - cursor % n_);
}

std::vector<std::int64_t> Sampler::indices(std::int64_t cursor, std::int64_t count) const {
  const std::int64_t samples = advance(cursor, count) - cursor;
  // Block `rank` of `ranks`: floor(samples * rank / ranks), written so that it cannot overflow.
  const auto cut = [&](std::int64_t rank) {
    return samples / options_.ranks * rank + samples % options_.ranks * rank / options_.ranks;
  };
  std::int64_t at = cursor + cut(options_.rank);
  const std::int64_t end = cursor + cut(options_.rank + 1);

  std::vector<std::int64_t> result;
  result.reserve(static_cast<std::size_t>(end - at));
  while (at < end) {
    const std::int64_t epoch = at / n_;
    const std::int64_t first = at % n_;
    const std::int64_t last = std::min(n_, first + (end - at));
    if (options_.order == Order::sequential) {
      for (std::int64_t i = first; i < last; ++i) result.push_back(i);
    } else {
      const Permutation order(n_, options_.seed, static_cast<std::uint64_t>(epoch));
      for (std::int64_t i = first; i < last; ++i) result.push_back(order(i));
    }
    at += last - first;
  }
  return result;
}

}  // namespace poise::data

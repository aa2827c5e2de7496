// Two equations, E|g_n|^2 = |G|^2 + tr(Sigma) / n at two sizes n, solved; each of their solutions
// is averaged, as their ratio is biased.
#include "engine/noise_scale.h"

#include <limits>

namespace poise::engine {
namespace {

constexpr double kKept = 0.95;  // of an average, at each window

}  // namespace

void NoiseScale::add(const std::vector<Small>& small, bool joined, double big_squares,
                     double big_tokens) {
  double squares = 0, tokens = 0, inverse = 0, ranks = 0;
  for (const auto& one : small) {
    squares += one.squares;
    tokens += one.tokens;
    if (one.tokens > 0) {
      inverse += 1 / one.tokens;
      ranks += 1;
    }
  }
  if (ranks == 0 || big_tokens <= 0) return;
  if (joined) {
    inverse = 1 / tokens;
  } else {
    squares /= ranks;
    inverse /= ranks;
  }
  const double big_inverse = 1 / big_tokens;
  if (!(inverse > big_inverse)) return;  // one size alone
  const double variance = (squares - big_squares) / (inverse - big_inverse);
  const double signal = big_squares - variance * big_inverse;
  const double kept = measured_ ? kKept : 0;
  variance_ = kept * variance_ + (1 - kept) * variance;
  signal_ = kept * signal_ + (1 - kept) * signal;
  measured_ = true;
}

std::optional<NoiseScale::State> NoiseScale::state() const {
  if (!measured_) return std::nullopt;
  return State{variance_, signal_};
}

void NoiseScale::load(const State& saved) {
  variance_ = saved.variance;
  signal_ = saved.signal;
  measured_ = true;
}

double NoiseScale::value() const {
  if (!measured_) return 0;
  if (variance_ <= 0) return 0;
  return signal_ > 0 ? variance_ / signal_ : std::numeric_limits<double>::infinity();
}

}  // namespace poise::engine

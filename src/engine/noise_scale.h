// The gradient noise scale: from how many tokens on a larger batch stops to help. Measured from two
// batch sizes that every window has, its first micro-batches and itself. (McCandlish et al. 2018,
// arXiv:1812.06162, appendix A.1.)
#pragma once

#include <optional>
#include <vector>

namespace poise::engine {

class NoiseScale {
 public:
  // What a rank measured of its window's first micro-batch.
  struct Small {
    double squares = 0;  // square sum of the mean gradient, or of this rank's shard of it
    double tokens = 0;   // 0: no micro-batch here
  };

  // A window: mean gradients over `small` tokens and over `big_tokens` of them.
  // `joined`: the ranks' shards make one gradient of all their tokens; else each rank has its own.
  void add(const std::vector<Small>& small, bool joined, double big_squares, double big_tokens);

  // tr(Sigma) / |G|^2 over the windows so far, recent ones most, in counted tokens; infinite where
  // the gradient cannot be told from the noise; 0 before anything was measured.
  double value() const;

  // What a save keeps; nullopt before anything was measured.
  struct State {
    double variance = 0, signal = 0;
  };
  std::optional<State> state() const;
  void load(const State& saved);

 private:
  double variance_ = 0;  // moving averages: of the trace of the covariance over tokens,
  double signal_ = 0;    // and of the true gradient's square
  bool measured_ = false;
};

}  // namespace poise::engine

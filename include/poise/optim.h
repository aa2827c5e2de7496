// Optimizers over flat spans, in two phases where they need sums over whole parameters, and
// learning rate schedules as pure functions of the update count. An optimizer knows nothing of
// ranks: it sees this rank's spans.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "poise/config.h"
#include "poise/export.h"

namespace poise::optim {

// One parameter's piece [begin, end) of a span, elements. The gap up to the next segment is padding
// that holds zeros and stays zero.
struct Segment {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  int group = 0;                // index into the groups' settings
  std::int64_t first = 0;       // place of element `begin` in its parameter, in memory order
  std::uint64_t parameter = 0;  // a number that the parameter's name makes
  int index = 0;                // of the parameter in Span::parameters
  std::int64_t missed = 0;      // updates of the run that were not the parameter's: it was frozen
  bool frozen = false;          // it is now
};

// A whole parameter, of which a span may hold a piece.
struct Parameter {
  std::vector<std::int64_t> sizes, strides;
};

// An array that an optimizer keeps beside the masters, zero before update 1: one element for
// `block` of theirs, counted from each parameter's begin. 256, where all parameters and shards
// begin, is a multiple of `block`. Or `factored`: for each parameter of Span::parameters as many as
// factored_numel() says, one after the other, whole on every rank and on the CPU.
struct Moment {
  at::ScalarType dtype = at::kFloat;
  std::int64_t block = 1;
  bool factored = false;
};

// Rows and columns of a parameter of two or more dimensions (the last two; each of the others
// counts by itself): all sizes without the last one, then all without the last but one. Of less
// dimensions: its elements.
POISE_API std::int64_t factored_numel(const Parameter& parameter);

// This rank's contiguous run of one unit's parameters. All tensors 1-D with the same numel, but
// moments in blocks or factored.
struct Span {
  at::Tensor master;                // fp32; the parameters themselves where they are fp32
  at::Tensor low;                   // bf16 or fp16 copy that forward uses; undefined for fp32
  at::Tensor gradient;              // fp32, bf16 or fp16: weighted sum over the window
  std::vector<at::Tensor> moments;  // as Optimizer::moments() says
  std::vector<Segment> segments;    // ascending, disjoint
  // Where the optimizer has rounds(): all parameters of the unit, in order, and what earlier rounds
  // of this update gave, summed over all ranks, on the CPU.
  std::vector<Parameter> parameters;
  std::vector<at::Tensor> sums;
};

// Settings of a parameter group at one update, schedule applied.
struct GroupSettings {
  double lr = 0;
  double weight_decay = 0;
};

class POISE_API Optimizer {
 public:
  virtual ~Optimizer();

  virtual std::string name() const = 0;
  virtual std::vector<Moment> moments() const = 0;
  int num_moments() const { return static_cast<int>(moments().size()); }
  // Whether an update of some segments writes moments of parameters that have none of them.
  bool keeps_whole_moments() const;

  // How often it needs sums over whole parameters (trust ratios, factored moments) before it may
  // update any of their elements. 0: it is elementwise, or by blocks, and works on any piece.
  virtual int rounds() const { return 0; }

  // What this span adds to the sums of a round: fp64, 1-D, on the span's device, in an order of the
  // optimizer's own by span.parameters; zeros for parameters that have no piece here. Writes
  // nothing.
  virtual at::Tensor sums(int round, const Span& span, const std::vector<GroupSettings>& groups,
                          std::int64_t update, double factor) const;

  // In place: gradient x factor is the mean clipped gradient. `update` counts applied updates from
  // 1. Writes master, moments and low in one pass; does not touch gradient.
  virtual void apply(Span& span, const std::vector<GroupSettings>& groups, std::int64_t update,
                     double factor) const = 0;
};

// An update of the segments that are not frozen, each as of its parameter's own number of updates:
// what is frozen keeps master and moments, and low is made of the master.
POISE_API void apply_to_awake(const Optimizer& optimizer, Span& span,
                              const std::vector<GroupSettings>& groups, std::int64_t update,
                              double factor);
// What they add to the sums of a round.
POISE_API at::Tensor sums_of_awake(const Optimizer& optimizer, int round, Span& span,
                                   const std::vector<GroupSettings>& groups, std::int64_t update,
                                   double factor);

// Throws Error on an unknown type, naming the known ones. `seed`: of optimizers that round at
// random.
POISE_API std::unique_ptr<Optimizer> make_optimizer(const config::OptimizerPolicy& policy,
                                                    std::uint64_t seed = 0);

// What policy.lr is multiplied by where an update has so many samples: 1 at policy.lr_batch_size,
// in proportion to the batch (Goyal et al. 2017, arXiv:1706.02677), or to its root (Krizhevsky
// 2014, arXiv:1404.5997; for Adam: Malladi et al. 2022, arXiv:2205.10287).
POISE_API double batch_multiplier(const config::OptimizerPolicy& policy, std::int64_t samples);

// Multiplier of the peak learning rate for the update that follows `applied` applied updates
// (0 for the first). Same shapes as transformers' schedules of those names.
POISE_API double schedule_multiplier(const config::SchedulePolicy& policy, std::int64_t applied);

}  // namespace poise::optim

// Optimizers over flat spans in two phases, and learning rate schedules as pure functions of the
// update count. An optimizer knows nothing of ranks: it sees this rank's spans.
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
  int group = 0;  // index into the groups' settings
};

// This rank's contiguous run of one unit's parameters. All tensors 1-D with the same numel.
struct Span {
  at::Tensor master;                // fp32; the parameters themselves where they are fp32
  at::Tensor low;                   // bf16 or fp16 copy that forward uses; undefined for fp32
  at::Tensor gradient;              // fp32, bf16 or fp16: weighted sum over the window
  std::vector<at::Tensor> moments;  // Optimizer::num_moments() tensors, fp32, zero before update 1
  std::vector<Segment> segments;    // ascending, disjoint
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
  virtual int num_moments() const = 0;

  // Phase 1: per-span statistics that must be summed over ranks before phase 2 (trust ratios,
  // factored moments); fp32, 1-D. Empty for AdamW, Adam and SGD.
  virtual at::Tensor stats(const Span& span, const std::vector<GroupSettings>& groups,
                           double factor) const;

  // Phase 2, in place: gradient x factor is the mean clipped gradient. `update` counts applied
  // updates from 1. Writes master, moments and low in one pass; does not touch gradient.
  virtual void apply(Span& span, const std::vector<GroupSettings>& groups, std::int64_t update,
                     double factor, const at::Tensor& summed_stats) const = 0;
};

// Throws Error on an unknown type, naming the known ones.
POISE_API std::unique_ptr<Optimizer> make_optimizer(const config::OptimizerPolicy& policy);

// Multiplier of the peak learning rate for the update that follows `applied` applied updates
// (0 for the first). Same shapes as transformers' schedules of those names.
POISE_API double schedule_multiplier(const config::SchedulePolicy& policy, std::int64_t applied);

}  // namespace poise::optim

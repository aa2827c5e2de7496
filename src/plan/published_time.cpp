// Seconds of an update of somebody else's run: each block's matrices, attention and elementwise
// passes, collectives, the pipeline's idle time, the update.
#include <algorithm>
#include <cmath>

#include "plan/published.h"

namespace poise::plan::published {
namespace {

constexpr double kRamp = 8e-6;    // of a kernel, until it fills the device
constexpr double kEager = 15e-6;  // an operation as Python and autograd issue it
constexpr double kHooks = 2e-3;   // of a block whose modules fetch and release parameters in Python
constexpr double kPart = 2.5e-3;  // a broadcast of one rank's part to many
constexpr double kMatrices = 0.8;  // of the peak, the best that large products were seen to reach
constexpr double kReached = 0.85;  // of the memory's rate

// What was reached of all that, by kind of device: medians over the runs of tests/plan/cases/runs.
struct Constant {
  const char* device;
  double value;
};
constexpr Constant kConstants[] = {{"A100", 0.98},       {"A100-80GB", 0.84}, {"A100-40GB", 0.83},
                                   {"A800-80GB", 0.92},  {"H100-80GB", 0.82}, {"H100-96GB", 0.67},
                                   {"H200-141GB", 0.71}, {"V100-32GB", 1.13}, {"V100-16GB", 0.90}};
constexpr double kOther = 0.8;  // of devices without such runs

class Seconds {
 public:
  explicit Seconds(const Run& r)
      : r_(r),
        t_(r.tp),
        h_(static_cast<double>(r.model.width)),
        f_(static_cast<double>(r.model.ffn)),
        q_(static_cast<double>(r.model.heads) *
           static_cast<double>(r.model.head_width > 0 ? r.model.head_width
                                                      : r.model.width / r.model.heads)),
        kv_(q_ * static_cast<double>(r.model.kv_heads > 0 ? r.model.kv_heads : r.model.heads) /
            static_cast<double>(r.model.heads)),
        tokens_(r.micro_batch * r.sequence / r.cp),
        gated_(r.model.mlp == Mlp::gated),
        fused_(r.fused_attention && (r.compiled || r.fused_mlp)) {}

  double update() const {
    const double layers = static_cast<double>(r_.model.layers) / r_.pp;
    const double block = forward() + backward() + again();
    const double head = 3 * matrix(tokens_, h_, vocabulary()) + loss();
    // The last stage has the head; the others wait for it, and it for them at both ends.
    const double stage = layers * block + passes();
    const double bubble = (r_.pp - 1.0) / r_.vpp * stage;
    double once = r_.accumulation * (stage + head) + bubble;
    if (r_.pp > 1) once = std::max(once, r_.accumulation * (stage + head));
    const double issue =
        r_.accumulation * layers * issued() + (r_.pp - 1.0) * layers * issued() / r_.vpp;
    once = std::max(once, issue);
    return once + sharing(once) + optimizer();
  }

 private:
  double vocabulary() const { return static_cast<double>(r_.model.vocabulary) / t_; }
  double peak() const {
    const auto& d = r_.device;
    const double rate = r_.compute == 4 ? d.float_flops : d.half_flops;
    return rate * (r_.fp8 ? 1.8 : 1);  // twice the rate, less the casts
  }
  double memory(double bytes) const { return bytes / (kReached * r_.device.memory_rate); }

  // A product of (m x k) and (k x n).
  double matrix(double m, double k, double n) const {
    if (m <= 0 || k <= 0 || n <= 0) return 0;
    const double compute = 2 * m * k * n / (peak() * kMatrices);
    return std::max(compute, memory(r_.compute * (m * k + k * n + m * n))) + kRamp;
  }
  double matrices() const {
    return matrix(tokens_, h_, (q_ + 2 * kv_) / t_) + matrix(tokens_, q_ / t_, h_) +
           matrix(tokens_, h_, (gated_ ? 2 : 1) * f_ / t_) + matrix(tokens_, f_ / t_, h_);
  }
  // Scores and their product with the values; causal halves are skipped where they are fused.
  double attention(double passes) const {
    const double flops = passes * 4 * tokens_ * r_.sequence * q_ / t_;
    const double rate = r_.device.half_flops *
                        (r_.compute == 4 ? r_.device.float_flops / r_.device.half_flops : 1) *
                        kMatrices;
    if (r_.fused_attention) return flops / 2 / (attention_rate() * rate / kMatrices);
    const double scores = tokens_ * r_.sequence * static_cast<double>(r_.model.heads) / t_;
    const double bytes = passes * scores * (r_.dropout ? 6 : 4) * r_.compute;
    return flops / (0.5 * rate) + memory(bytes);
  }
  // Of the peak: FlashAttention 2 reports 0.6 on an A100 and 0.34 on an H100, and 0.25 to 0.4 of
  // its first version on an A100 (arXiv:2307.08691); kernels written for the H100 0.55 and more.
  double attention_rate() const {
    const bool hopper = r_.device.half_flops > 500e12;
    if (r_.first_flash) return hopper ? 0.2 : 0.35;
    return !hopper ? 0.6 : r_.fused_mlp ? 0.55 : 0.34;
  }
  double elementwise() const {
    const double shared = r_.sequence_parallel ? t_ : 1;
    const double width = r_.compute;
    const double norms = (fused_ ? 8 : gated_ && r_.tp == 1 && r_.pp == 1 ? 20 : 12) * h_ / shared;
    const double gelu = r_.gelu_by_parts ? 18 : 2;  // eight operations more
    const double mlp = (gated_ ? (fused_ ? 3 : 5) : gelu) * f_ / t_;
    const double rotary = (gated_ ? (fused_ ? 4 : 8) : 2) * q_ / t_;
    return memory(width * tokens_ * (norms + mlp + rotary));
  }
  double forward() const { return matrices() + attention(1) + elementwise() + tensor(2); }
  double backward() const {
    return 2 * matrices() + attention(2.5) + 1.8 * elementwise() + tensor(2);
  }
  double again() const {
    switch (r_.kept) {
      case Kept::input:
        return forward();
      case Kept::other_blocks:
        return forward() / 2;
      case Kept::operators:
        return 0.5 * matrices() + elementwise();
      case Kept::no_scores:
        return r_.fused_attention ? 0 : attention(1);
      case Kept::no_gelu:
      case Kept::all:
        return 0;
    }
    return 0;
  }
  double loss() const { return memory(tokens_ * vocabulary() * (r_.head == Head::fused ? 8 : 30)); }

  // ---- what the CPU issues for a block
  double issued() const {
    const double operations = r_.compiled ? 12 : fused_ ? 30 : 60;  // views too
    const double rounds = 3 + (r_.kept == Kept::input          ? 1
                               : r_.kept == Kept::other_blocks ? 0.5
                                                               : 0);
    const double hooks = r_.sharding == Sharding::deepspeed && r_.stage >= 3 ? kHooks : 0;
    return rounds * (operations * kEager + hooks) + (r_.tp > 1 ? 4 * kEager : 0);
  }

  // ---- collectives
  double node() const { return 0.75 * r_.device.node_rate; }
  double network() const { return 0.8 * r_.device.network_rate; }
  // `count` all-reduces (or their halves) of a block's output over the tensor-parallel group.
  double tensor(double count) const {
    if (r_.tp == 1) return 0;
    const double bytes = 2 * (t_ - 1) / t_ * tokens_ * h_ * r_.compute;
    const double rate = r_.tp > 8 ? network() : node();
    return count * (bytes / rate + 10e-6 + 2e-6 * t_);
  }
  // A micro-batch's way in and out of a stage, forward and backward.
  double passes() const {
    if (r_.pp == 1) return 0;
    const bool inside = r_.world <= 8;
    const double bytes = tokens_ * h_ * r_.compute / (inside ? 1 : r_.sequence_parallel ? t_ : 1);
    return 2 * r_.vpp * (bytes / (inside ? node() : network()) + 15e-6);
  }
  double parameters_here() const {
    return static_cast<double>(parameters(r_.model)) / (t_ * r_.pp);
  }
  // Beside the compute as far as the framework lets them run there.
  double sharing(double compute) const {
    const double ranks = r_.dp * r_.cp;
    if (ranks <= 1) return 0;
    const double moved = (ranks - 1) / ranks * parameters_here();
    const bool inside = r_.world <= 8;
    // Ranks of a tensor-parallel group share a node, and its ways out.
    // DeepSpeed gathers parameter by parameter: one way out each.
    const bool alone = r_.sharding == Sharding::deepspeed;
    const double rate = inside ? node()
                        : alone
                            ? network()
                            : std::min(node(), network() * std::max(1.0, std::min(8 / t_, ranks)));
    if (r_.stage >= 3) {
      const double gathers = (r_.keeps_gathered ? 1 : 2) * r_.accumulation * moved * 2 / rate;
      const double reduces =
          r_.accumulation * moved * (r_.sharding == Sharding::fsdp ? 4 : 2) / rate;
      return std::max(0.0, gathers + reduces - 0.9 * compute) + 0.05 * (gathers + reduces);
    }
    const double parts = r_.broadcasts_parts && r_.stage >= 1 ? r_.shards * kPart : 0;
    const double all = 2 * moved * std::max(2.0, std::min(4.0, r_.gradient)) / rate;
    const bool overlaps = r_.sharding == Sharding::replicas || r_.fused_mlp;
    return parts + (overlaps ? std::max(0.05 * all, all - 0.5 * compute / r_.accumulation) : all);
  }
  double optimizer() const {
    const double split = r_.stage >= 1 ? r_.shards : 1;
    return memory(parameters_here() / split * r_.trained *
                  (2 * (r_.master + r_.moments + r_.parameter) + r_.gradient));
  }

  const Run& r_;
  const double t_, h_, f_, q_, kv_, tokens_;
  const bool gated_, fused_;
};

}  // namespace

double device_constant(const Device& device) {
  for (const auto& known : kConstants) {
    if (device.name == known.device) return known.value;
  }
  return kOther;
}

double tokens_per_second(const Run& run) {
  const double tokens = run.micro_batch * run.sequence * run.accumulation * run.dp;
  return device_constant(run.device) * tokens / Seconds(run).update() / run.world;
}

}  // namespace poise::plan::published

// Peak bytes of a rank of somebody else's run, moment by moment.
#include <algorithm>
#include <cmath>

#include "plan/published.h"

namespace poise::plan::published {
namespace {

constexpr double kGib = 1024.0 * 1024 * 1024;
// What a caching allocator reserves beyond what is allocated: a tenth (GMLake, ASPLOS 2024,
// measured 10 to 33% without its remedy).
constexpr double kReserved = 1.10;
constexpr double kFull = 0.99;   // of its memory that a device with nothing to spare reads
constexpr double kBucket = 5e8;  // elements: DeepSpeed's default

double query(const Transformer& m) {
  return static_cast<double>(m.heads * (m.head_width > 0 ? m.head_width : m.width / m.heads));
}
double keys(const Transformer& m) {
  return query(m) * static_cast<double>(m.kv_heads > 0 ? m.kv_heads : m.heads) /
         static_cast<double>(m.heads);
}

class Moments {
 public:
  explicit Moments(const Run& r)
      : r_(r),
        e_(r.activation > 0 ? r.activation : r.compute),
        t_(r.tp),
        h_(static_cast<double>(r.model.width)),
        f_(static_cast<double>(r.model.ffn)),
        q_(query(r.model)),
        kv_(keys(r.model)),
        tokens_(r.micro_batch * r.sequence / r.cp),
        layers_(static_cast<double>(r.model.layers)),
        outside_(r.sequence_parallel ? t_ : 1) {}

  double highest() const {
    // Where nothing was read, all stages must fit.
    const bool first = r_.reads_first_stage && r_.meter != Meter::fits;
    double most = 0;
    for (int stage = 0; stage < (first ? 1 : r_.pp); ++stage) {
      most = std::max(most, of_stage(stage));
    }
    return most;
  }

 private:
  // Parameters of a pipeline stage on one rank of its tensor-parallel group.
  double block() const {
    auto one = r_.model;
    one.vocabulary = 1;
    one.positions = 0;
    one.head_norm = false;
    auto two = one;
    two.layers = one.layers + 1;
    return static_cast<double>(parameters(two) - parameters(one)) / t_;
  }
  double table() const { return static_cast<double>(r_.model.vocabulary) * h_ / t_; }
  double blocks(int stage) const {
    if (r_.balances_stages) {
      const double all = layers_ + table() / block();
      const auto until = [&](int stages) {
        return std::min(layers_, std::ceil(all * stages / r_.pp - 1e-9));
      };
      return until(stage + 1) - until(stage);
    }
    const auto even = std::floor(layers_ / r_.pp);
    const auto more = layers_ - even * r_.pp;
    // Remainders go to the middle.
    return even + (stage > 0 && stage <= more ? 1 : 0);
  }
  // Those of embedding and head.
  double outer(int stage) const {
    double all = 0;
    const bool first = stage == 0, last = stage == r_.pp - 1;
    if (first) all += table() + static_cast<double>(r_.model.positions) * h_;
    if (last && (!r_.model.tied || !first)) all += table();
    return all;
  }
  double elements(int stage) const { return blocks(stage) * block() + outer(stage); }

  // ---- what a block keeps, bytes
  double all_kept() const {
    const bool gated = r_.model.mlp == Mlp::gated;
    const bool fused_norms = r_.compiled || r_.tp > 1 || r_.pp > 1 || !gated;
    // Inputs of both norms and, where it is not made again, what comes out of them.
    double outside = 2 * e_ * h_ + (r_.compiled ? 0 : 2 * e_ * h_);
    if (!fused_norms) outside += 2 * (4 + e_) * h_;
    if (r_.dropout) outside += 2 * h_;
    // Under autocast the residual stream and the norms stay in fp32 beside 16-bit copies.
    if (r_.autocast) outside += 2 * e_ * h_;
    double inside = e_ * (2 * q_ + 2 * kv_);
    inside += e_ * f_ * (gated ? (r_.compiled ? 2 : r_.fused_mlp ? 3 : 4) : 2);
    // Inputs of frozen matrices are not needed.
    if (r_.trained < 1 && !r_.keeps_frozen_inputs) inside -= e_ * f_;
    // Where linear layers keep what they gathered, it is whole.
    const double gathered = r_.keeps_inputs_whole ? 2 * e_ * h_ * (1 - 1 / outside_) : 0;
    return tokens_ * (outside / outside_ + gathered + inside / t_) + scores();
  }
  double scores() const {
    if (r_.fused_attention) return 0;
    const double width = r_.autocast ? 4 : e_;  // softmax in fp32
    const double each = width + (r_.dropout ? 1 + width : 0) + (r_.autocast ? e_ : 0);
    return each * tokens_ * r_.sequence * static_cast<double>(r_.model.heads) / t_;
  }
  double input() const { return tokens_ * e_ * h_ / outside_; }
  double kept() const {
    if (r_.offloads_activations) return 0;
    switch (r_.kept) {
      case Kept::all:
        return all_kept();
      case Kept::no_scores:
        return all_kept() - scores();
      case Kept::no_gelu:
        return all_kept() - tokens_ * e_ * f_ / t_;
      case Kept::operators:
        return input() + tokens_ * e_ * ((2 * q_ + kv_ + f_) / t_ + h_ / outside_);
      case Kept::other_blocks:
        return (all_kept() + input()) / 2;
      case Kept::input:
        return input();
    }
    return 0;
  }
  // Beyond what all blocks keep, while one runs backward.
  double work() const {
    const double again =
        r_.kept == Kept::all ? 0 : all_kept() - (r_.offloads_activations ? 0 : kept());
    const double mlp = tokens_ * e_ * ((r_.model.mlp == Mlp::gated ? 3 : 2) * f_ / t_ + 2 * h_);
    const double attention =
        tokens_ * e_ * (2 * q_ / t_ + 2 * h_) + (r_.fused_attention ? 0 : 2 * scores_once());
    return again + std::max(mlp, attention);
  }
  double scores_once() const {
    return e_ * tokens_ * r_.sequence * static_cast<double>(r_.model.heads) / t_;
  }
  // Logits, which the model's output holds, their log-softmax, its gradient and theirs.
  double head() const {
    const double logits = tokens_ * static_cast<double>(r_.model.vocabulary) / t_;
    const double capped = r_.caps_logits ? e_ * logits : 0;
    switch (r_.head) {
      case Head::none:
        return 0;
      case Head::in_place:
        return capped + e_ * logits;
      case Head::fused:
        return capped + 2 * e_ * logits;
      case Head::chunked:
        return capped + 2 * e_ * logits + 12 * logits / 8;
      case Head::plain:
        return capped + 4 * e_ * logits;
      case Head::whole:
        return capped + (e_ + 12) * logits;
    }
    return 0;
  }
  double in_flight(int stage) const {
    if (r_.pp == 1) return 1;
    const double warm = std::min<double>(r_.pp - stage, r_.accumulation);
    return r_.vpp > 1 ? warm + (r_.pp - 1.0) / r_.vpp : warm;
  }

  double of_stage(int stage) const {
    const double all = elements(stage), trained = all * r_.trained;
    const auto split = [&](int from) { return r_.stage >= from ? r_.shards : 1; };
    const double tables = r_.table > 0 ? outer(stage) : 0;
    double held = ((all - tables) * r_.parameter + tables * r_.table) / split(3);
    if (!r_.offloads_optimizer) held += trained * (r_.master + r_.moments) / split(1);
    double gradients =
        (r_.frozen_gradients ? all : trained) * r_.gradient / (r_.joins_once ? 1 : split(2));
    held += trained * r_.whole_masters;
    if (r_.autocast) held += 2 * all;  // its copies of the matrices, kept for the backward
    if (r_.offloads_states) held = gradients = 0;
    if (r_.offloads_optimizer && r_.stage >= 2) gradients = 0;  // each goes out as it is joined
    // 16-bit gradients beside fp32 sums; buckets.
    double moving = 0;
    const double unit = std::max(block(), stage == 0 || stage == r_.pp - 1 ? table() : 0.0);
    if (r_.stage >= 3) {
      const double width = r_.fp8 ? 2 : e_;
      held += r_.keeps_gathered ? all * width : (2 * block() + 2 * table()) * width;
      moving = 2 * block() * (width + 4 * (r_.trained < 1 ? 0 : 1));
    } else if (r_.sharding == Sharding::deepspeed && (r_.dp > 1 || r_.gradient > e_)) {
      moving = r_.gradient > e_ ? all * e_ : 2 * std::min(kBucket, all) * e_;
    } else if (r_.gradient > r_.compute && r_.trained == 1) {
      moving = unit * e_;
    }
    const bool persistent =
        r_.accumulation > 1 || r_.sharding == Sharding::megatron || r_.gradient > r_.compute;
    const double before = r_.updates_in_backward ? 0 : persistent ? gradients : 0;
    const double after = r_.updates_in_backward ? unit * r_.gradient : gradients;
    const bool last = stage == r_.pp - 1;
    const double stored = in_flight(stage) * blocks(stage) * kept();
    double most = held + before + moving + stored + std::max(last ? head() : 0.0, work());
    most = std::max(most, held + after + moving + kept() * (in_flight(stage) - 1) * blocks(stage) +
                              kept() + work());
    // The update: DeepSpeed's fp16 optimizer casts its gradients first.
    double update = held + gradients;
    if (r_.sharding == Sharding::deepspeed && r_.gradient < 4 && r_.stage < 3) {
      update += 4 * trained / split(1);
    }
    if (r_.updates_all_at_once) update += trained * r_.moments / 2 / split(1);
    return std::max(most, update);
  }

  const Run& r_;
  const double e_, t_, h_, f_, q_, kv_, tokens_, layers_, outside_;
};

}  // namespace

double meter_offset(const Run& run) {
  if (run.meter != Meter::device && run.meter != Meter::fits) return 0;
  const int communicators = (run.tp > 1) + (run.dp > 1) + (run.pp > 1) + (run.world > 1);
  return (1.5 + communicators) * kGib;
}

double peak_bytes(const Run& run) {
  const double allocated = Moments(run).highest(), offset = meter_offset(run);
  const bool reserved = run.meter == Meter::reserved || run.meter == Meter::device;
  if (!reserved) return allocated + offset;
  // Near the end of its memory the allocator gives back what it only keeps.
  const auto memory = static_cast<double>(run.device.memory);
  const double read = allocated * kReserved + offset;
  return read > memory && allocated + offset <= memory ? kFull * memory : read;
}

}  // namespace poise::plan::published

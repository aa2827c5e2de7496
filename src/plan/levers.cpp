// What would lower a run's need beyond what the search may choose: each lever alone, searched anew.
#include <algorithm>
#include <functional>

#include "poise/error.h"
#include "poise/plan.h"

namespace poise::plan {
namespace {

constexpr std::int64_t kRank = 16;  // of adapters

// Parameters of low-rank adapters on every matrix of the blocks.
std::int64_t adapters(const Job& job) {
  if (job.traced) {
    std::int64_t elements = 0;
    for (const auto& flat : job.traced->chains.front().flats) elements += flat.elements;
    return elements / 100;  // about what rank 16 is of matrices that are thousands wide
  }
  const auto& m = job.model;
  const auto head = m.head_width > 0 ? m.head_width : m.width / m.heads;
  const auto query = m.heads * head, kv = (m.kv_heads > 0 ? m.kv_heads : m.heads) * head;
  const auto attention = 2 * (m.width + query) + 2 * (m.width + kv);
  const auto mlp = (m.mlp == Mlp::gated ? 3 : 2) * (m.width + m.ffn);
  return m.layers * kRank * (attention + mlp);
}

class Pulled {
 public:
  explicit Pulled(const Job& job) : job_(job), widths_(widths(job)) {}

  std::vector<Lever> all() {
    same();
    other();
    return std::move(found_);
  }

 private:
  // A traced model may have been traced without.
  bool knows_activations() const {
    if (!job_.traced) return true;
    for (const auto& link : job_.traced->chains.front().links) {
      if (link.away[0].backward_peak > 0) return true;
    }
    return false;
  }

  void pull(const char* name, const std::string& setting, bool changes,
            const std::function<void(Job&)>& change) {
    auto job = job_;
    change(job);
    Lever lever{name, setting, changes, false, {}};
    const auto answer = search(job);
    lever.fits = answer.fits;
    lever.plan = answer.best;
    found_.push_back(std::move(lever));
  }

  // The training stays the same.
  void same() {
    using config::Offload;
    config::OffloadPolicy offload;
    const auto add = [&](const char* name, const char* setting) {
      pull(name, setting, false, [&](Job& job) { job.offloads = {offload}; });
    };
    if (may_offload(job_.optimizer)) {
      offload.optimizer = Offload::host;
      add("optimizer states on the host", "offload.optimizer: host");
      offload.gradients = Offload::host;
      add("optimizer states and gradients on the host",
          "offload.optimizer, offload.gradients: host");
      offload.parameters = Offload::host;
      if (job_.machine.ranks == 1 || job_.stages.empty() || job_.stages.back() == 3) {
        add("optimizer states, gradients and parameters on the host",
            "offload.optimizer, .gradients, .parameters: host");
      }
    }
    if (knows_activations()) {
      offload = {};
      offload.activations = Offload::host;
      add("activations on the host", "offload.activations: host");
    }
    // Where the micro-batch is given, it must divide what is left for each rank.
    const auto given = std::max<std::int64_t>(job_.micro_batch, 1);
    if (job_.global_batch % (2 * given * job_.machine.ranks) == 0) {
      pull("twice the ranks", join(2 * job_.machine.ranks, " ranks"), false, [](Job& job) {
        if (job.machine.ranks == 1) job.stages.clear();  // of one rank none is a choice
        for (int& group : job.shard_ranks) {
          if (group == job.machine.ranks) group *= 2;  // all of them
        }
        job.machine.ranks *= 2;
      });
    }
  }

  void other() {
    const auto with = [&](const char* name, const std::string& setting, Widths w) {
      pull(name, setting, true, [&](Job& job) { job.widths = w; });
    };
    if (widths_.parameter == 2 && widths_.accumulator == 4) {
      auto w = widths_;
      w.accumulator = 2;
      with("gradients accumulated in 16 bits", "precision.fp32_accumulation: false", w);
    }
    if (widths_.moments == 8) {
      auto w = widths_;
      w.moments = 2 * (1 + 4.0 / 256);  // a scale for each 256 elements
      with("moments in 8 bits", "optimizer.moments: 8bit", w);
    }
    if (widths_.parameter == 4) {
      pull("parameters in 16 bits, with masters", "precision.parameters: bf16", true, [](Job& job) {
        job.precision.dtype = job.precision.parameters = config::DType::bf16;
        job.widths.reset();
      });
    }
    auto frozen = widths_;
    frozen.master = frozen.moments = frozen.accumulator = 0;
    pull("LoRA adapters alone are trained", join("rank ", kRank, " on every matrix"), true,
         [&](Job& job) {
           job.widths = frozen;
           job.extra_states = 16 * adapters(job_);
         });
    if (!job_.traced && job_.sequence > 1) {
      pull("sequences of half the length", join("--seq ", job_.sequence / 2), true,
           [](Job& job) { job.sequence /= 2; });
    }
  }

  const Job& job_;
  const Widths widths_;
  std::vector<Lever> found_;
};

}  // namespace

std::vector<Lever> levers(const Job& job) { return Pulled(job).all(); }

}  // namespace poise::plan

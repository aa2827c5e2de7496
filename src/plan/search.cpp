// Every combination that keeps the effective batch, the fastest that fits, and what it beat.
#include <algorithm>
#include <limits>
#include <optional>

#include "plan/states.h"
#include "poise/error.h"

namespace poise::plan {
namespace {

std::vector<std::int64_t> divisors(std::int64_t n) {
  std::vector<std::int64_t> all;
  for (std::int64_t d = 1; d * d <= n; ++d) {
    if (n % d != 0) continue;
    all.push_back(d);
    if (d * d != n) all.push_back(n / d);
  }
  std::sort(all.begin(), all.end());
  return all;
}

void check(const Job& job) {
  const auto ranks = static_cast<std::int64_t>(job.machine.ranks);
  if (job.sequence < 1 || job.global_batch < 1) {
    fail("plan", "a sequence of ", job.sequence, " tokens and a global batch of ", job.global_batch,
         " sequences; give at least 1 of each");
  }
  if (job.global_batch % ranks != 0) {
    const auto below = job.global_batch / ranks * ranks;
    fail("plan", "a global batch of ", job.global_batch, " over ", ranks,
         " ranks is no whole number on each; the nearest that are: ",
         below > 0 ? join(below, " and ") : std::string(), below + ranks);
  }
  const auto mine = job.global_batch / ranks;
  for (const int group : job.shard_ranks) {
    if (group < 1 || job.machine.ranks % group != 0) {
      fail("plan", "groups of ", group, " ranks that shard do not divide the ", ranks,
           " ranks; give a divisor of them");
    }
  }
  if (job.micro_batch > 0 && mine % job.micro_batch != 0) {
    std::string allowed;
    for (const auto d : divisors(mine)) allowed += join(allowed.empty() ? "" : ", ", d);
    fail("plan", "a micro-batch of ", job.micro_batch, " does not divide the ", mine,
         " sequences of each rank; these do: ", allowed);
  }
}

// Tokens of a chunk of the loss head: about 2^27 logits at a time. 0: whole logits are no more.
std::int64_t chunk_for(const Job& job, std::int64_t micro_batch) {
  if (job.traced) return 0;
  std::int64_t chunk = 256;
  while (2 * chunk * job.model.vocabulary <= 1 << 27) chunk *= 2;
  return chunk < micro_batch * job.sequence ? chunk : 0;
}

struct Sharding {
  int stage;
  bool keep;
  int ranks;  // of a group
};

// All ranks together; where they are more than a node's, a node's, replicated by the other nodes.
std::vector<int> groups(const Job& job) {
  if (!job.shard_ranks.empty()) return job.shard_ranks;
  const int all = job.machine.ranks, node = job.machine.ranks_per_node;
  if (node > 1 && node < all && all % node == 0) return {all, node};
  return {all};
}

std::vector<Sharding> shardings(const Job& job) {
  if (job.machine.ranks == 1) return {{0, false, 1}};
  std::vector<Sharding> found;
  for (const int group : groups(job)) {
    for (int stage = group == job.machine.ranks ? 0 : 1; stage <= 3; ++stage) {
      found.push_back({stage, false, group});
    }
    found.push_back({3, true, group});
  }
  return found;
}

// What the formulas may be short of, as a share of the activations: those of fp32 without selective
// recomputation are exact on the CPU, the others are not (docs/planner.md has how far off they
// were).
double uncertainty(const Job& job, const Plan& plan) {
  if (job.machine.device.place == Place::gpu) return 0;  // reserve() stands for it
  if (job.traced) return 0;
  if (job.precision.dtype != config::DType::fp32) return 0.08;
  return plan.choice.recompute == Recompute::selective ? 0.03 : 0;
}

class Search {
 public:
  explicit Search(const Job& job) : job_(job) {
    answer_.budget =
        job.budget > 0 ? job.budget : job.machine.device.memory - reserve(job.machine.device);
    widths_ = widths(job);
    shardings_ = shardings(job);
    if (!job.stages.empty()) {
      std::erase_if(shardings_, [&](const Sharding& one) {
        return std::find(job.stages.begin(), job.stages.end(), one.stage) == job.stages.end();
      });
    }
    for (const auto& sharding : shardings_) {
      for (const auto& offload : job.offloads) {
        // Ranks that all keep whole parameters have none to send away.
        const bool away = offload.parameters != config::Offload::none;
        if (!away || sharding.stage == 3 || job.machine.ranks == 1) {
          combined_.push_back({sharding, offload});
        }
      }
    }
    if (combined_.empty()) {
      fail("plan", "no stage that may be chosen can offload parameters; allow stage 3");
    }
  }

  Answer run() {
    const auto mine = job_.global_batch / job_.machine.ranks;
    auto before = std::numeric_limits<std::int64_t>::max();
    for (const auto micro_batch : divisors(mine)) {
      if (job_.micro_batch > 0 && micro_batch != job_.micro_batch) continue;
      lowest_ = 0;
      at(micro_batch, mine / micro_batch);
      // Larger micro-batches only take more, but for the first whose logits come in chunks; a few
      // beyond the budget show what memory would buy.
      if (lowest_ > 2 * answer_.budget && lowest_ >= before) break;
      before = lowest_;
    }
    settle();
    return std::move(answer_);
  }

 private:
  void at(std::int64_t micro_batch, std::int64_t accumulation) {
    for (const auto chunk : chunks(micro_batch)) {
      Choice shape;
      shape.micro_batch = micro_batch;
      shape.loss_chunk_tokens = chunk;
      const auto made = chain(job_, shape);
      for (const auto& [sharding, offload] : combined_) {
        Choice choice;
        choice.offload = offload;
        choice.micro_batch = micro_batch;
        choice.accumulation = accumulation;
        choice.ranks = job_.machine.ranks;
        choice.ranks_reserve = job_.machine.device.place == Place::cpu;
        choice.shard_ranks = sharding.ranks == choice.ranks ? 0 : sharding.ranks;
        choice.activations_of = job_.activations_of;
        choice.stage = sharding.stage;
        choice.keep_gathered = sharding.keep;
        choice.reduces_every = sharding.stage >= 2;
        choice.loss_chunk_tokens = chunk;
        recomputations(made, std::move(choice));
      }
    }
  }

  std::vector<std::int64_t> chunks(std::int64_t micro_batch) const {
    if (!job_.searches_chunk) return {job_.loss_chunk_tokens};
    const auto chunk = chunk_for(job_, micro_batch);
    return chunk == 0 ? std::vector<std::int64_t>{0} : std::vector<std::int64_t>{0, chunk};
  }

  void recomputations(const Chain& made, Choice choice) {
    if (!job_.searches_recompute) {
      choice.recompute = job_.recompute;
      choice.recomputed = job_.recomputed;
      return take(made, choice);
    }
    const auto blocks = static_cast<std::size_t>(std::count_if(
        made.links.begin(), made.links.end(), [](const Link& link) { return link.block; }));
    choice.recomputed.assign(blocks, false);
    take(made, choice);
    choice.recompute = Recompute::whole;
    for (std::size_t n = 0; n < blocks; ++n) {
      choice.recomputed[n] = true;
      take(made, choice);
    }
    if (job_.traced) return uneven(made, choice);
    choice.recompute = Recompute::selective;
    take(made, choice);
  }

  // Where blocks differ the first n need not be the best n.
  void uneven(const Chain& made, Choice& choice) {
    if (alike(made)) return;
    auto best = cheapest_recompute(made, choice, widths_, answer_.budget - job_.extra_states);
    if (!best && plans_.front().choice.micro_batch == choice.micro_batch) {
      best = cheapest_recompute(made, choice, widths_, least_budget(made, choice, widths_));
    }
    if (!best) return;
    choice.recomputed = *best;
    take(made, choice);
  }

  static bool alike(const Chain& made) {
    const Link* first = nullptr;
    for (const auto& link : made.links) {
      if (!link.block) continue;
      if (first == nullptr) first = &link;
      for (std::size_t mode = 0; mode < link.passes.size(); ++mode) {
        const auto &a = link.passes[mode], &b = first->passes[mode];
        if (a.saved != b.saved || a.forward_peak != b.forward_peak ||
            a.backward_peak != b.backward_peak || a.again_flops != b.again_flops) {
          return false;
        }
      }
    }
    return true;
  }

  void take(const Chain& made, const Choice& choice) {
    Plan plan{choice, memory(made, choice, widths_), {}};
    add_states(plan.memory);
    plan.time = time(made, choice, widths_, job_.precision, job_.machine,
                     choice.micro_batch * job_.sequence);
    const auto need = needs(plan);
    lowest_ = lowest_ == 0 ? need : std::min(lowest_, need);
    plans_.push_back(std::move(plan));
  }

  void add_states(Memory& memory) const {
    const auto optimizer = static_cast<std::size_t>(::poise::memory::Account::optimizer);
    memory.held[optimizer] += job_.extra_states;
    memory.at_peak[optimizer] += job_.extra_states;
    memory.peak += job_.extra_states;
    memory.build += job_.extra_states;
  }

  std::int64_t needs(const Plan& plan) const {
    const auto activations =
        plan.memory.at_peak[static_cast<std::size_t>(::poise::memory::Account::activations)];
    const auto beyond = uncertainty(job_, plan) * static_cast<double>(activations);
    return plan.memory.highest() + static_cast<std::int64_t>(beyond);
  }

  static bool faster(const Plan& a, const Plan& b) {
    if (a.time.total != b.time.total) return a.time.total < b.time.total;
    return a.memory.highest() < b.memory.highest();
  }

  static bool alike(const Plan& a, const Plan& b) {
    return a.choice.stage == b.choice.stage && a.choice.micro_batch == b.choice.micro_batch &&
           a.choice.keep_gathered == b.choice.keep_gathered &&
           a.choice.shard_ranks == b.choice.shard_ranks;
  }

  void settle() {
    answer_.candidates = static_cast<int>(plans_.size());
    for (const auto& plan : plans_) {
      const auto need = needs(plan);
      if (answer_.floor == 0 || need < answer_.floor) answer_.floor = need;
    }
    std::sort(plans_.begin(), plans_.end(), faster);
    std::int64_t least = 0;
    for (const auto& plan : plans_) {
      const auto need = plan.memory.highest();
      if (least == 0 || need < least) {
        least = need;
        answer_.front.push_back(plan);
      }
    }
    const Plan* best = nullptr;
    const Plan* next = nullptr;
    for (const auto& plan : plans_) {
      if (needs(plan) > answer_.budget) continue;
      if (best == nullptr) {
        best = &plan;
      } else if (next == nullptr && !alike(*best, plan)) {
        next = &plan;
      }
    }
    answer_.fits = best != nullptr;
    answer_.best = best != nullptr ? *best : answer_.front.back();
    if (next != nullptr) {
      answer_.has_runner_up = true;
      answer_.runner_up = *next;
      answer_.why = reason(*next);
    }
    if (!answer_.fits) answer_.dominated_by = dominant(answer_.best.memory);
  }

  // The part of its time by which the runner-up is behind most.
  std::string reason(const Plan& other) const {
    const auto& a = answer_.best.time;
    const auto& b = other.time;
    const std::pair<const char*, double> parts[] = {
        {"compute of smaller pieces", b.forward + b.backward - a.forward - a.backward},
        {"recomputation", b.recompute - a.recompute},
        {"communication that is not overlapped", b.exposed - a.exposed},
        {"the optimizer's update", b.update - a.update},
        {"transfers to host and file that are not overlapped", b.transfers - a.transfers},
    };
    const auto* most = &parts[0];
    for (const auto& part : parts) {
      if (part.second > most->second) most = &part;
    }
    return most->first;
  }

  static std::string dominant(const Memory& memory) {
    if (memory.build > memory.peak) {
      return "the whole model, which every rank holds while the engine is built";
    }
    std::size_t most = 0;
    for (std::size_t i = 0; i < memory.at_peak.size(); ++i) {
      if (memory.at_peak[i] > memory.at_peak[most]) most = i;
    }
    return poise::memory::name_of(static_cast<poise::memory::Account>(most));
  }

  const Job& job_;
  Widths widths_;
  std::vector<Sharding> shardings_;
  std::vector<std::pair<Sharding, config::OffloadPolicy>> combined_;
  std::vector<Plan> plans_;
  std::int64_t lowest_ = 0;
  Answer answer_;
};

}  // namespace

Chain chain(const Job& job, const Choice& choice) {
  if (job.traced) return chain(*job.traced, choice.micro_batch);
  return chain(job.model, {choice.micro_batch, job.sequence, choice.loss_chunk_tokens},
               job.precision, job.machine.device.place, job.cpu);
}

Widths widths(const Job& job) {
  return job.widths ? *job.widths : widths(job.precision, job.optimizer);
}

Answer search(const Job& job) {
  check(job);
  return Search(job).run();
}

namespace {

const char* name_of(config::Offload place) {
  return place == config::Offload::host ? "host" : place == config::Offload::file ? "file" : "none";
}

std::string offloads(const config::OffloadPolicy& offload) {
  std::string text;
  const std::pair<const char*, config::Offload> kinds[] = {{"optimizer", offload.optimizer},
                                                           {"gradients", offload.gradients},
                                                           {"parameters", offload.parameters},
                                                           {"activations", offload.activations}};
  for (const auto& [kind, place] : kinds) {
    if (place == config::Offload::none) continue;
    text += join(text.empty() ? "" : ", ", "\"", kind, "\": \"", name_of(place), "\"");
  }
  return text;
}

// The chosen blocks' names.
std::string names_of(const std::vector<bool>& chosen, const std::vector<std::string>& units) {
  std::string names;
  for (std::size_t i = 0; i < chosen.size(); ++i) {
    if (!chosen[i]) continue;
    names += join(names.empty() ? "" : ", ", "\"", i < units.size() ? units[i] : join("blocks.", i),
                  "\"");
  }
  return names;
}

// The recomputed blocks as a policy: the first n where they are.
std::string recomputed(const Choice& choice, const std::vector<std::string>& units) {
  const auto& blocks = choice.recomputed;
  const auto count = std::count(blocks.begin(), blocks.end(), true);
  if (choice.recompute == Recompute::selective) return "{\"policy\": \"selective\"}";
  if (std::all_of(blocks.begin(), blocks.begin() + count, [](bool b) { return b; })) {
    return join("{\"policy\": \"first_m\", \"n\": ", count, "}");
  }
  return join("{\"policy\": \"list\", \"units\": [", names_of(blocks, units), "]}");
}

}  // namespace

std::string settings(const Choice& choice, const std::vector<std::string>& units) {
  std::string text = join("{\"batch\": {\"micro_batch_size\": ", choice.micro_batch,
                          ", \"accumulation\": ", choice.accumulation, "}");
  const auto blocks = std::count(choice.recomputed.begin(), choice.recomputed.end(), true);
  if (blocks > 0) text += join(", \"checkpointing\": ", recomputed(choice, units));
  if (choice.ranks > 1) {
    text += join(", \"zero\": {\"stage\": ", choice.stage);
    if (choice.keep_gathered) text += ", \"keep_gathered\": \"window\"";
    const bool groups = choice.shard_ranks > 0 && choice.shard_ranks < choice.ranks;
    // At stage 0 nothing is sharded, and the key is refused.
    if (groups && choice.stage > 0) text += join(", \"shard_group_size\": ", choice.shard_ranks);
    text += "}";
  }
  if (choice.loss_chunk_tokens > 0) {
    text += join(", \"model\": {\"loss_chunk_tokens\": ", choice.loss_chunk_tokens, "}");
  }
  auto away = offloads(choice.offload);
  const bool named = choice.offload.activations != config::Offload::none;
  if (named && !choice.activations_of.empty()) {
    away += join(", \"activation_units\": [", names_of(choice.activations_of, units), "]");
  }
  if (!away.empty()) text += join(", \"offload\": {", away, "}");
  return text + "}";
}

}  // namespace poise::plan

// What a rank holds between updates: parameters, masters, moments, accumulators, scratch.
#include <algorithm>
#include <numeric>

#include "plan/states.h"
#include "plan/transport.h"

namespace poise::plan {
namespace {

std::int64_t& of(Accounts& accounts, memory::Account account) {
  return accounts[static_cast<std::size_t>(account)];
}

int bytes_of(config::DType dtype) { return dtype == config::DType::fp32 ? 4 : 2; }

// Bytes of all moments of a parameter's element.
double moment_bytes(const config::OptimizerPolicy& optimizer) {
  if (optimizer.type == "sgd") return optimizer.momentum > 0 ? 4 : 0;
  const double eight_bits = 1 + 4.0 / 256;  // a scale for each 256 elements
  if (optimizer.type == "lion") return optimizer.moments == "8bit" ? eight_bits : 4;
  if (optimizer.type == "lars") return 4;
  if (optimizer.type == "adafactor") return 0;  // rows and columns, counted by flat
  // adam, adamw, lamb
  if (optimizer.moments == "bf16") return 4;
  if (optimizer.moments == "8bit") return 2 * eight_bits;
  return 8;
}

}  // namespace

Widths widths(const config::PrecisionPolicy& precision, const config::OptimizerPolicy& optimizer,
              config::DType gradient_dtype) {
  Widths w;
  w.parameter = bytes_of(precision.parameters);
  w.master = w.parameter == 4 ? 0 : 4;
  w.moments = moment_bytes(optimizer);
  w.factored = optimizer.type == "adafactor";
  w.accumulator = precision.fp32_accumulation ? 4 : w.parameter;
  w.wire = bytes_of(gradient_dtype);
  return w;
}

bool may_offload(const config::OptimizerPolicy& optimizer) {
  const auto& type = optimizer.type;
  return type != "adafactor" && type != "lamb" && type != "lars";
}

std::int64_t total(const Accounts& accounts) {
  return std::accumulate(accounts.begin(), accounts.end(), std::int64_t{0});
}

int shard_ranks(const Choice& choice) {
  return choice.shard_ranks > 0 ? std::min(choice.shard_ranks, choice.ranks) : choice.ranks;
}

Split split_of(const Choice& choice) {
  const int ranks = shard_ranks(choice);
  const int stage = ranks > 1 ? choice.stage : 0;
  const bool every = ranks > 1 && choice.reduces_every;
  const bool away = choice.offload.parameters != config::Offload::none;  // runs as at stage 3
  return {
      .optimizer = stage >= 1, .gradients = stage >= 2 && every, .parameters = stage >= 3 || away};
}

std::int64_t shard(std::int64_t elements, int ranks) {
  const std::int64_t rows = (elements + kAlignment - 1) / kAlignment;
  return (rows + ranks - 1) / ranks * kAlignment;
}

std::int64_t whole(std::int64_t elements, int ranks) { return shard(elements, ranks) * ranks; }

namespace {

// Elements whose states a rank keeps.
std::int64_t count(const std::vector<Flat>& flats, const Choice& choice) {
  const bool split = split_of(choice).optimizer;
  const int ranks = shard_ranks(choice);
  std::int64_t elements = 0;
  for (const auto& flat : flats) {
    elements += split ? shard(flat.elements, ranks) : whole(flat.elements, ranks);
  }
  return elements;
}

// Of an all-reduce of `bytes` (src/comm/on_cpu.cpp): one round of all of them, or a segment of
// each.
std::int64_t all_reduce_scratch(std::int64_t bytes, int ranks) {
  constexpr std::int64_t kTwoRounds = 16384, kLargestElement = 8;
  return ranks > 2 && bytes >= kTwoRounds ? bytes + ranks * kLargestElement : ranks * bytes;
}

// Held by collectives: ranks' shards on their way to a sum, sums on their way over replicas, and
// two buckets of what becomes whole, one that fills and one that travels.
std::int64_t communication(const std::vector<Flat>& flats, int rest, const Choice& choice) {
  const int ranks = shard_ranks(choice), replicas = choice.ranks / ranks;
  const auto buckets = ranks > 1 ? 2 * 4 * spreads(flats, rest, choice).largest() : 0;
  if (!choice.ranks_reserve) return buckets;
  std::int64_t largest = 0;
  for (const auto& flat : flats) largest = std::max(largest, whole(flat.elements, ranks));
  std::int64_t reserved = replicas > 1 ? all_reduce_scratch(4 * largest / ranks, replicas) : 0;
  if (ranks > 1) reserved += 4 * std::max(largest, joins(flats, rest, choice).largest());
  return reserved + buckets;
}

}  // namespace

Accounts states(const std::vector<Flat>& flats, const Choice& choice, const Widths& w, int rest) {
  using memory::Account;
  const auto split = split_of(choice);
  const auto away = [](config::Offload place) { return place != config::Offload::none; };
  Accounts held{};
  const int ranks = shard_ranks(choice);
  double states_away =
      away(choice.offload.optimizer)
          ? choice.offload.optimizer_fraction * static_cast<double>(count(flats, choice))
          : 0;
  for (const auto& flat : flats) {
    const auto mine = shard(flat.elements, ranks);
    const auto all = whole(flat.elements, ranks);
    const auto optimized = split.optimizer ? mine : all;
    if (!away(choice.offload.parameters)) {
      const auto frozen = split.parameters ? shard(flat.frozen, ranks) : whole(flat.frozen, ranks);
      of(held, Account::parameters) += w.parameter * ((split.parameters ? mine : all) + frozen);
    }
    // Whole flats from the first on, until the fraction is reached.
    if (states_away <= 0) {
      of(held, Account::optimizer) += w.master * optimized;
      // Whole: a multiple of 256 elements.
      of(held, Account::optimizer) +=
          static_cast<std::int64_t>(w.moments * static_cast<double>(optimized));
    }
    if (w.factored) of(held, Account::optimizer) += 4 * flat.factored;
    states_away -= static_cast<double>(optimized);
    if (!away(choice.offload.gradients)) {
      of(held, Account::gradients) += w.accumulator * (split.gradients ? mine : all);
    }
  }
  of(held, Account::communication) = communication(flats, rest, choice);
  return held;
}

}  // namespace poise::plan

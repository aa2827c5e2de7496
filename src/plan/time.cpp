// How long an update takes: compute at the device's reached rate, collectives where compute does
// not hide them, the optimizer at memory speed.
#include <algorithm>

#include "plan/states.h"
#include "plan/transport.h"

namespace poise::plan {
namespace {

double share(int ranks) { return (ranks - 1.0) / ranks; }

// Small matrices do not fill the device.
double reached(const Machine& machine, double tokens) {
  return machine.device.efficiency * tokens / (tokens + machine.device.half_tokens);
}

// Time of collectives among `ranks` that move `bytes` out of each in `count` calls.
class Links {
 public:
  // Neighbours: a shard group, all of a node's ranks where it does not end there.
  static Links inside(const Machine& machine, int ranks) {
    const auto& device = machine.device;
    const bool one_node = ranks <= machine.ranks_per_node;
    // Every device of a node has a way out of its own, and rings use all of them.
    const double out = machine.ranks_per_node * device.network_rate;
    return {ranks, one_node, one_node ? device.node_rate : std::min(device.node_rate, out)};
  }
  // The ranks of one place in their shard groups: each uses its own way out.
  static Links across(const Machine& machine, int ranks, int replicas) {
    const bool one_node = ranks * replicas <= machine.ranks_per_node;
    return {replicas, one_node, one_node ? machine.device.node_rate : machine.device.network_rate};
  }
  double seconds(double bytes, double count) const {
    return ranks_ == 1 ? 0 : bytes / rate_ + count * latency_;
  }

 private:
  Links(int ranks, bool one_node, double rate)
      : ranks_(ranks),
        rate_(0.8 * rate),
        latency_(10e-6 + 1e-6 * std::min(ranks - 1, 256) * (one_node ? 1 : 2)) {}

  int ranks_;
  double rate_, latency_;
};

double beyond(double moved, double hidden_by) { return std::max(0.0, moved - hidden_by); }

// Without a GPU what lies on the host is used where it is.
double host_seconds(const Device& device, double bytes) {
  return device.place == Place::cpu ? 0 : bytes / device.host_rate;
}

// States that lie away are updated by the host's CPU, tile by tile: reads, arithmetic and writes
// run beside each other, so the slowest counts.
double update_away(const Choice& choice, const Widths& w, const Device& device, double elements,
                   double each) {
  if (elements == 0) return 0;
  const bool file = choice.offload.optimizer == config::Offload::file;
  const double gradients =
      choice.offload.gradients == config::Offload::none ? elements * w.accumulator : 0;
  const double link = host_seconds(device, gradients + elements * w.parameter);
  double read_written = file ? 2 * elements * (w.master + w.moments) : 0;
  if (choice.offload.gradients == config::Offload::file) read_written += elements * w.accumulator;
  const double disk = read_written / device.file_rate;
  return std::max({elements * each / device.host_update, link, disk});
}

// Of what forward saves, in one micro-batch: there while it runs, back while backward does.
double activation_seconds(const Chain& chain, const Choice& choice, const Device& device) {
  if (choice.offload.activations == config::Offload::none) return 0;
  double bytes = 0;
  std::size_t block = 0;
  for (const auto& link : chain.links) {
    const auto place = link.block ? block++ : choice.activations_of.size();
    const bool named = place < choice.activations_of.size() && choice.activations_of[place];
    if (!choice.activations_of.empty() && !named) continue;
    const bool again = link.block && place < choice.recomputed.size() && choice.recomputed[place];
    bytes += link.away[static_cast<std::size_t>(again ? choice.recompute : Recompute::none)].sent;
  }
  // A copy takes time on a CPU, too.
  if (choice.offload.activations == config::Offload::file) return 2 * bytes / device.file_rate;
  return 2 * bytes / (device.place == Place::cpu ? device.memory_rate : device.host_rate);
}

// Parameters come once for forward and once for backward, gradients go as they are made.
double transfers_beyond(const Choice& choice, const Widths& w, const Device& device,
                        double elements, double activations, double compute) {
  const auto k = static_cast<double>(choice.accumulation);
  const auto ranks = static_cast<double>(shard_ranks(choice));
  double seconds = k * activations;
  if (choice.offload.parameters != config::Offload::none) {
    const double bytes = (choice.keep_gathered ? 1 : 2 * k) * elements / ranks * w.parameter;
    const bool file = choice.offload.parameters == config::Offload::file;
    seconds += file ? bytes / device.file_rate : host_seconds(device, bytes);
  }
  if (choice.offload.gradients != config::Offload::none) {
    const double joined = choice.reduces_every ? elements / ranks : elements;
    const double bytes = joined * w.accumulator;
    seconds += host_seconds(device, k * bytes);
    if (choice.offload.gradients == config::Offload::file) {
      // All but the first are added to what was there; ranks read their sums once more for norms.
      seconds += (2 * k - 1 + (ranks > 1 ? 1 : 0)) * bytes / device.file_rate;
    }
  }
  return beyond(seconds, compute);
}

}  // namespace

Traffic traffic(std::int64_t elements, const Choice& choice, const Widths& w) {
  const int ranks = shard_ranks(choice), replicas = choice.ranks / ranks;
  const double moved = share(ranks) * static_cast<double>(elements);
  const auto windows = static_cast<double>(choice.accumulation);
  Traffic t;
  // An all-reduce of the shard: there and back.
  t.across = 2 * share(replicas) * static_cast<double>(elements) / ranks * w.accumulator;
  t.reduces = (choice.reduces_every ? windows : 1) * moved * w.wire;
  t.gathers = moved * (choice.stage == 0 ? w.accumulator : w.parameter);
  if (choice.stage == 3) t.gathers *= choice.keep_gathered ? 1 : 2 * windows;
  return t;
}

Time time(const Chain& chain, const Choice& choice, const Widths& widths,
          const config::PrecisionPolicy& precision, const Machine& machine, std::int64_t tokens) {
  const auto& device = machine.device;
  const double peak =
      precision.dtype == config::DType::fp32 ? device.float_flops : device.half_flops;
  const double rate = peak * reached(machine, static_cast<double>(tokens));
  const auto k = static_cast<double>(choice.accumulation);
  double flops = 0, again = 0, bytes = 0, bytes_again = 0, links_again = 0;
  std::int64_t elements = 0;
  std::size_t block = 0;
  for (const auto& link : chain.links) {
    flops += link.flops;
    bytes += link.moved;
    bool repeats = !link.block;  // a chunked head always does
    if (link.block) repeats = block < choice.recomputed.size() && choice.recomputed[block++];
    if (!repeats) continue;
    const auto mode = link.block ? choice.recompute : Recompute::none;
    const auto& pass = link.passes[static_cast<std::size_t>(mode)];
    again += pass.again_flops;
    if (link.block) ++links_again;
    if (mode == Recompute::whole) bytes_again += link.moved;
    if (mode != Recompute::selective) continue;
    // Elementwise operations: what was not kept is written and read again.
    bytes_again += 2.0 * static_cast<double>(link.passes[0].saved - pass.saved);
  }
  const int ranks = shard_ranks(choice);
  for (const auto& flat : chain.flats) elements += whole(flat.elements, ranks);

  Time t;
  t.forward = k * (flops / rate + bytes / device.memory_rate +
                   static_cast<double>(chain.links.size()) * device.overhead / 3);
  t.backward = 2 * t.forward;
  t.recompute =
      k * (again / rate + bytes_again / device.memory_rate + links_again * device.overhead / 3);
  const auto split = split_of(choice);
  const auto owned =
      static_cast<double>(elements) / (split.optimizer ? static_cast<double>(ranks) : 1);
  const double each = 2.0 * (widths.moments + 4) + widths.accumulator + (widths.master ? 2 : 0);
  const auto& offload = choice.offload;
  double there = std::clamp(offload.optimizer_fraction, 0., 1.);
  // Sums on the host are read there, wherever the states are.
  if (offload.optimizer == config::Offload::none) {
    there = offload.gradients == config::Offload::none ? 0 : 1;
  }
  t.update = (1 - there) * owned * each / device.memory_rate +
             update_away(choice, widths, device, there * owned, each);
  t.transfers = transfers_beyond(choice, widths, device, static_cast<double>(elements),
                                 activation_seconds(chain, choice, device),
                                 t.forward + t.backward + t.recompute);

  const auto links = Links::inside(machine, ranks);
  const auto calls = static_cast<double>(chain.flats.size());
  const auto joined = static_cast<double>(joins(chain.flats, chain.rest, choice).calls());
  const auto moved = traffic(elements, choice, widths);
  const double reduces = links.seconds(moved.reduces, (choice.reduces_every ? k : 1) * joined);
  // What joins once per window hides behind the last micro-batch's backward.
  const double joins_behind =
      (t.backward + t.recompute) * (choice.overlap ? (choice.reduces_every ? 1 : 1 / k) : 0);
  if (split.parameters) {
    const double times = choice.keep_gathered ? 1 : 2 * k;
    const double gathers = links.seconds(moved.gathers, times * calls);
    const double forward = choice.keep_gathered ? gathers : gathers / 2;
    const double hiding = choice.keep_gathered ? t.forward / k : t.forward;
    // The first unit's gather and the last one's reduce have nothing beside them.
    t.exposed = beyond(forward, hiding) + beyond(gathers - forward + reduces, joins_behind) +
                (forward + reduces) / std::max(1.0, calls);
  } else {
    const auto spread = static_cast<double>(spreads(chain.flats, chain.rest, choice).calls());
    t.exposed = beyond(reduces, joins_behind) + reduces / std::max(1.0, joined) +
                links.seconds(moved.gathers, spread);
  }
  // Sums go to the other shard groups when the window is complete: nothing is left to hide them.
  t.exposed += Links::across(machine, ranks, choice.ranks / ranks).seconds(moved.across, calls);
  t.total = t.forward + t.backward + t.recompute + t.exposed + t.transfers + t.update;
  return t;
}

}  // namespace poise::plan

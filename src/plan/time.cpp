// How long an update takes: compute at the device's reached rate, collectives where compute does
// not hide them, the optimizer at memory speed.
#include <algorithm>

#include "plan/states.h"

namespace poise::plan {
namespace {

double share(const Choice& choice) { return (choice.ranks - 1.0) / choice.ranks; }

// Small matrices do not fill the device.
double reached(const Machine& machine, double tokens) {
  return machine.device.efficiency * tokens / (tokens + machine.device.half_tokens);
}

// Time of collectives that move `bytes` out of each rank in `count` calls.
class Links {
 public:
  explicit Links(const Machine& machine) : machine_(machine) {
    const auto& device = machine.device;
    const bool one_node = machine.ranks <= machine.ranks_per_node;
    // Every device of a node has a way out of its own, and rings use all of them.
    const double out = machine.ranks_per_node * device.network_rate;
    rate_ = 0.8 * (one_node ? device.node_rate : std::min(device.node_rate, out));
    latency_ = 10e-6 + 1e-6 * std::min(machine.ranks - 1, 256) * (one_node ? 1 : 2);
  }
  double seconds(double bytes, double count) const {
    return machine_.ranks == 1 ? 0 : bytes / rate_ + count * latency_;
  }

 private:
  const Machine& machine_;
  double rate_ = 1;
  double latency_ = 0;
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
  const double disk = file ? 2 * elements * (w.master + w.moments) / device.file_rate : 0;
  return std::max({elements * each / device.host_update, link, disk});
}

// Parameters come once for forward and once for backward, gradients go as they are made.
double transfers_beyond(const Choice& choice, const Widths& w, const Device& device,
                        double elements, double compute) {
  const auto k = static_cast<double>(choice.accumulation);
  const auto ranks = static_cast<double>(choice.ranks);
  double seconds = 0;
  if (choice.offload.parameters != config::Offload::none) {
    const double bytes = (choice.keep_gathered ? 1 : 2 * k) * elements / ranks * w.parameter;
    const bool file = choice.offload.parameters == config::Offload::file;
    seconds += file ? bytes / device.file_rate : host_seconds(device, bytes);
  }
  if (choice.offload.gradients != config::Offload::none) {
    const double joined = choice.reduces_every && choice.ranks > 1 ? elements / ranks : elements;
    seconds += host_seconds(device, k * joined * w.accumulator);
  }
  return beyond(seconds, compute);
}

}  // namespace

Traffic traffic(std::int64_t elements, const Choice& choice, const Widths& w) {
  if (choice.ranks == 1) return {};
  const double moved = share(choice) * static_cast<double>(elements);
  const auto windows = static_cast<double>(choice.accumulation);
  const double reduces = (choice.reduces_every ? windows : 1) * moved * w.wire;
  if (choice.stage == 0) return {.gathers = moved * w.accumulator, .reduces = reduces};
  if (choice.stage < 3) return {.gathers = moved * w.parameter, .reduces = reduces};
  const double times = choice.keep_gathered ? 1 : 2 * windows;
  return {.gathers = times * moved * w.parameter, .reduces = reduces};
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
  for (const auto& flat : chain.flats) elements += whole(flat.elements, choice.ranks);

  Time t;
  t.forward = k * (flops / rate + bytes / device.memory_rate +
                   static_cast<double>(chain.links.size()) * device.overhead / 3);
  t.backward = 2 * t.forward;
  t.recompute =
      k * (again / rate + bytes_again / device.memory_rate + links_again * device.overhead / 3);
  const auto split = split_of(choice);
  const auto owned =
      static_cast<double>(elements) / (split.optimizer ? static_cast<double>(choice.ranks) : 1);
  const double each = 2.0 * (widths.moments + 4) + widths.accumulator + (widths.master ? 2 : 0);
  const auto& offload = choice.offload;
  const double there = offload.optimizer == config::Offload::none
                           ? 0
                           : std::clamp(offload.optimizer_fraction, 0., 1.);
  t.update = (1 - there) * owned * each / device.memory_rate +
             update_away(choice, widths, device, there * owned, each);
  t.transfers = transfers_beyond(choice, widths, device, static_cast<double>(elements),
                                 t.forward + t.backward + t.recompute);

  const Links links(machine);
  const auto calls = static_cast<double>(chain.flats.size());
  const auto moved = traffic(elements, choice, widths);
  const double reduces = links.seconds(moved.reduces, (choice.reduces_every ? k : 1) * calls);
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
    t.exposed = beyond(reduces, joins_behind) + reduces / std::max(1.0, calls) +
                links.seconds(moved.gathers, calls);
  }
  t.total = t.forward + t.backward + t.recompute + t.exposed + t.transfers + t.update;
  return t;
}

}  // namespace poise::plan

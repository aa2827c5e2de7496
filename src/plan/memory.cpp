// The highest moment of an update: what is held, plus what forward and backward add link by link.
#include <algorithm>

#include "plan/moments.h"
#include "poise/error.h"

namespace poise::plan {

using ::poise::memory::Account;

Moments::Moments(const Chain& chain, const Choice& choice, const Widths& widths)
    : chain_(chain),
      choice_(choice),
      widths_(widths),
      split_(split_of(choice)),
      joining_(joining(chain, choice)),
      held_(states(chain.flats, choice, widths, chain.rest)),
      waiting_(chain.links.size()) {
  const bool offloads = choice.offload.activations != config::Offload::none;
  std::size_t place = 0;
  bool again = false;
  for (const auto& link : chain.links) {
    auto mode = mode_after(again, choice.recompute);
    bool away = offloads && choice.activations_of.empty();
    if (link.block) {
      const bool repeats = place < choice.recomputed.size() && choice.recomputed[place];
      mode = repeats ? choice.recompute : Recompute::none;
      again |= repeats;
      if (place < choice.activations_of.size()) away = offloads && choice.activations_of[place];
      ++place;
    }
    modes_.push_back(mode);
    away_.push_back(away);
  }
  leaving_.push_back(0);
  for (std::size_t i = 0; i < away_.size(); ++i) {
    leaving_.push_back(away_[i] ? pass(i, modes_[i]).leaving : leaving_.back());
  }
  const int ranks = shard_ranks(choice);
  for (const auto& flat : chain.flats) {
    const auto bytes = widths.parameter * (whole(flat.elements, ranks) + whole(flat.frozen, ranks));
    whole_parameters_.push_back(bytes);
    all_parameters_ += bytes;
  }
  for (std::size_t i = waiting_.size(); i-- > 1;) {
    waiting_[i - 1] = waiting_[i] + chain.links[i].held_gradient;
  }
}

// Whole parameters while link i runs and `next` is gathered ahead of it.
std::int64_t Moments::gathered(std::size_t i, std::size_t next) const {
  if (!split_.parameters) return 0;
  if (choice_.keep_gathered) return all_parameters_;
  auto bytes = whole_parameters(chain_.rest) + whole_parameters(flat_of(i));
  if (flat_of(next) != flat_of(i)) bytes += whole_parameters(flat_of(next));
  return bytes;
}

Moments::Bytes Moments::forward(std::size_t i, Recompute mode, std::int64_t kept) const {
  const auto leaving = away_[i] ? 0 : leaving_[i];
  return {.activations = kept + leaving + casts(i, mode) + pass(i, mode).forward_peak,
          .gathered = gathered(i, i + 1)};
}

Moments::Bytes Moments::backward(std::size_t i, Recompute mode, std::int64_t kept) const {
  const auto again = mode == Recompute::none ? 0 : chain_.links[i].casts;
  return {.activations = kept + waiting_[i] + leaving_.back() + casts(i, mode) + again +
                         pass(i, mode).backward_peak,
          .gathered = gathered(i, i == 0 ? size() : i - 1),
          .communication = joining_.backward[i]};
}

Moments::Bytes Moments::end() const {
  return {.gathered = choice_.keep_gathered ? gathered(size(), size()) : 0,
          .communication = joining_.end};
}

std::int64_t Moments::saved(std::size_t i, Recompute mode) const {
  return pass(i, mode).saved + casts(i, mode);
}

// The user's model is whole on every rank until its flats are made, one after the other; over
// several ranks each flat passes through a whole copy.
std::int64_t Moments::build() const {
  std::int64_t highest = 0, theirs = 0, made = 0;
  for (const auto& flat : chain_.flats) theirs += widths_.parameter * (flat.elements + flat.frozen);
  for (const auto& flat : chain_.flats) {
    auto held = states({flat}, choice_, widths_);
    held[static_cast<std::size_t>(Account::communication)] = 0;
    made += total(held);
    const auto copy =
        choice_.ranks > 1 ? widths_.parameter * whole(flat.elements, shard_ranks(choice_)) : 0;
    highest = std::max(highest, theirs + made + copy);
    theirs -= widths_.parameter * (flat.elements + flat.frozen);
  }
  return highest;
}

namespace {

Accounts at(const Moments& moments, const Moments::Bytes& bytes) {
  auto accounts = moments.held();
  accounts[static_cast<std::size_t>(Account::activations)] += bytes.activations;
  accounts[static_cast<std::size_t>(Account::gathered)] += bytes.gathered;
  accounts[static_cast<std::size_t>(Account::communication)] += bytes.communication;
  return accounts;
}

// `look(what, link, bytes)` for every moment in its order, past the last link for the end.
template <class Look>
void walk(const Moments& moments, Look&& look) {
  std::int64_t kept = 0;
  for (std::size_t i = 0; i < moments.size(); ++i) {
    look("forward of ", i, moments.forward(i, moments.mode(i), kept));
    kept += moments.saved(i, moments.mode(i));
  }
  for (std::size_t i = moments.size(); i-- > 0;) {
    kept -= moments.saved(i, moments.mode(i));
    look("backward of ", i, moments.backward(i, moments.mode(i), kept));
  }
  if (const auto end = moments.end(); end.communication > 0) {
    look("end of the backward", moments.size(), end);
  }
}

std::string name_of(const char* pass, const Chain& chain, std::size_t link) {
  return link < chain.links.size() ? pass + chain.links[link].name : pass;
}

}  // namespace

Memory memory(const Chain& chain, const Choice& choice, const Widths& widths) {
  const Moments all(chain, choice, widths);
  Memory memory;
  memory.held = all.held();
  const auto held = total(memory.held);
  const char* what = "";
  std::size_t link = 0;
  Moments::Bytes highest;
  walk(all, [&](const char* pass, std::size_t i, const Moments::Bytes& bytes) {
    if (held + bytes.all() <= memory.peak) return;
    memory.peak = held + bytes.all();
    highest = bytes;
    what = pass;
    link = i;
  });
  memory.at_peak = at(all, highest);
  memory.moment = name_of(what, chain, link);
  memory.build = all.build();
  return memory;
}

std::vector<Moment> moments(const Chain& chain, const Choice& choice, const Widths& widths) {
  const Moments all(chain, choice, widths);
  std::vector<Moment> found;
  walk(all, [&](const char* pass, std::size_t i, const Moments::Bytes& bytes) {
    found.push_back({name_of(pass, chain, i), at(all, bytes)});
  });
  return found;
}

}  // namespace poise::plan

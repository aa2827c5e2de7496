// Stop 2's other half: which ranks run a micro-batch, and which follow them.
#include <algorithm>

#include "engine/impl.h"

namespace poise {

std::vector<double> Engine::Impl::micro_batch_counts(std::size_t mine) {
  const std::vector<double> row{static_cast<double>(mine)};
  if (!shards.reduces_every_micro_batch() && !units) return row;
  return engine::gather_rows(*group, row, "number of micro-batches");
}

void Engine::Impl::run_micro_batch(std::size_t index, std::size_t count,
                                   const std::vector<double>& counts, const LossFn& loss) {
  const auto runs = [index](double of_rank) { return of_rank > static_cast<double>(index); };
  const auto leader = std::find_if(counts.begin(), counts.end(), runs) - counts.begin();
  const bool all_run = std::all_of(counts.begin(), counts.end(), runs);
  following.set_leader(units && !all_run ? std::optional(static_cast<int>(leader)) : std::nullopt);
  // What is joined once per window is joined in the last micro-batch of any rank at stage 3, whose
  // ranks move together, and in each rank's own last one otherwise.
  const auto most =
      units ? *std::max_element(counts.begin(), counts.end()) : static_cast<double>(count);
  const auto position = static_cast<double>(index + 1) == most || (!units && index >= count)
                            ? zero::MicroBatch::last
                            : zero::MicroBatch::inner;
  if (index < count) {
    backward(forward([&] { return loss(index); }), position);
    following.say(zero::Following::Operation::end);
  } else {
    follow(position);
  }
  following.set_leader({});
}

void Engine::Impl::follow(zero::MicroBatch position) {
  if (!units) {
    loss_weights.agree_without_micro_batch();
    gradients.follow_micro_batch(position);
    measure_small(position);
    return;
  }
  using Operation = zero::Following::Operation;
  units->begin_recording();
  gradients.begin_following(position);
  for (auto said = following.listen(); said.operation != Operation::end;
       said = following.listen()) {
    if (said.operation == Operation::gather) units->follow_gather(said.index);
    if (said.operation == Operation::join) gradients.join_flat(said.index);
    if (said.operation == Operation::agree) loss_weights.agree_without_micro_batch();
  }
  gradients.end_micro_batch();
  units->end_micro_batch();
  measure_small(position);
}

}  // namespace poise

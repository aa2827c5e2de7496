// Stop 13: what a rank brings to a save. Of every flat it writes the elements that would be its own
// at any stage, so that each is written once and all ranks write.
#include <ATen/core/grad_mode.h>

#include "engine/impl.h"
#include "state/random.h"
#include "state/safetensors.h"

namespace poise {
namespace {

state::SavedParameter described(const ParamTable::Entry& entry, const at::Tensor& parameter) {
  return {entry.name,
          entry.aliases,
          entry.sizes,
          state::order_of(parameter.sizes(), parameter.strides()),
          state::dtype_name(entry.dtype),
          entry.trainable};
}

at::Tensor flat_of(const at::Tensor& tensor) { return tensor.detach().contiguous().reshape({-1}); }

}  // namespace

state::Contents Engine::Impl::contents() {
  state::Contents made;
  auto& m = made.manifest;
  m.config = config.to_json();
  m.table_hash = table.hash();
  m.stage = config.zero.stage;
  m.optimizer = optimizer->name();
  m.moments = optimizer->num_moments();
  m.learning_rate = learning_rate();
  const auto scale = scaler.state();
  m.progress = {updates, skipped, scale.scale, scale.clean_updates, scale.overflows_in_row, {}};
  if (loss_weights.knows_q()) m.progress.loss_weight_exponent = loss_weights.q();
  for (std::size_t i = 0; i < table.entries().size(); ++i) {
    m.parameters.push_back(described(table.entries()[i], store.parameters()[i]));
  }
  for (const auto& [name, tensor] : buffers) {
    m.buffers.push_back({name, tensor.sizes().vec(), state::dtype_name(tensor.scalar_type())});
    made.buffers.push_back({state::kBuffer, name, 0, flat_of(tensor)});
  }
  made.pieces = state::random_states(device);
  if (ranks.replica->rank() == 0) add_pieces(made.pieces);
  return made;
}

void Engine::Impl::add_pieces(std::vector<state::Piece>& pieces) {
  // What lies in a file passes through memory of the host, outside the device's budget.
  const auto in_memory = [&](offload::Span& span) {
    if (const auto here = span.tensor(); here.defined()) return here;
    const auto copy = offloading.memory().allocate(span.numel(), span.dtype());
    span.read(0, copy);
    return copy;
  };
  // Elements of a flat that `values` begins with -> this rank's part of each entry in it.
  const auto add = [&](const std::string& kind, int flat, const at::Tensor& values,
                       std::int64_t first) {
    for (const int e : table.flats()[static_cast<std::size_t>(flat)].entries) {
      const auto& entry = table.entries()[static_cast<std::size_t>(e)];
      const auto part =
          zero::overlap({entry.offset, entry.offset + entry.numel}, shards.mine(flat));
      if (part.size() == 0) continue;
      pieces.push_back({kind, entry.name, part.begin - entry.offset,
                        values.narrow(0, part.begin - first, part.size())});
    }
  };
  for (int flat = 0; flat < static_cast<int>(table.flats().size()); ++flat) {
    if (table.flats()[static_cast<std::size_t>(flat)].trainable) continue;
    const auto& tensors = store.flat(flat);
    const bool split = shards.splits_parameters(flat);
    add(state::kValue, flat, split ? in_memory(*tensors.shard) : tensors.values,
        split ? shards.mine(flat).begin : 0);
  }
  for (const auto& kept : optimizer_states.states) {
    const auto first = shards.optimized(kept.flat).begin;
    add(state::kMaster, kept.flat, in_memory(*kept.master), first);
    for (std::size_t n = 0; n < kept.moments.size(); ++n) {
      add(state::moment(static_cast<std::int64_t>(n)), kept.flat, in_memory(*kept.moments[n]),
          first);
    }
  }
}

std::string Engine::Impl::save(const std::string& directory, const state::SaveOptions& options) {
  check_between_windows("save()");
  at::NoGradGuard no_grad;
  memory::AccountScope scope(ledger, memory::Account::staging);
  store.notice_edits();
  const auto mode =
      config.state.asynchronous ? state::Saver::Mode::in_background : state::Saver::Mode::wait;
  return saver.save(directory, contents(), options, mode);
}

void Engine::Impl::check_between_windows(const char* call) const {
  if (state != engine::WindowState::closed) {
    fail("engine", call, " came in an open window of ", micro_batches,
         " micro-batches; close it with step(Last::yes) or discard_window() first");
  }
  if (units && gathered_scopes > 0) {
    fail("engine", call, " came inside gathered(); close it first");
  }
  if (std::string(call) == "load()") return;  // replaces all values
  refuse_half_an_update();
  if (half_loaded) {
    fail("engine", call, " came after a load that failed midway; load a whole save first");
  }
}

}  // namespace poise

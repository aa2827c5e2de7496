// Stop 13: what a rank brings to a save. Of every flat it writes the elements that would be its own
// at any stage, so that each is written once and all ranks write.
#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>

#include "engine/impl.h"
#include "state/random.h"
#include "state/safetensors.h"

namespace poise {
namespace {

state::SavedParameter described(const ParamTable::Entry& entry, const at::Tensor& parameter,
                                std::int64_t missed) {
  return {entry.name,
          entry.aliases,
          entry.sizes,
          state::order_of(parameter.sizes(), parameter.strides()),
          state::dtype_name(entry.dtype),
          entry.trainable,
          missed};
}

at::Tensor flat_of(const at::Tensor& tensor) { return tensor.detach().contiguous().reshape({-1}); }

}  // namespace

std::vector<state::SavedMoment> engine::saved_moments(const optim::Optimizer& optimizer) {
  std::vector<state::SavedMoment> saved;
  for (const auto& moment : optimizer.moments()) {
    saved.push_back({state::dtype_name(moment.dtype), moment.block, moment.factored});
  }
  return saved;
}

state::Contents Engine::Impl::contents() {
  state::Contents made;
  auto& m = made.manifest;
  m.config = config.to_json();
  m.table_hash = table.hash();
  m.stage = config.zero.stage;
  m.optimizer = optimizer->name();
  m.moments = engine::saved_moments(*optimizer);
  m.learning_rate = learning_rate();
  const auto scale = scaler.state();
  m.progress = {updates, skipped, scale.scale, scale.clean_updates, scale.overflows_in_row, {}, {}};
  if (const auto kept = noise.state()) m.progress.noise = {kept->variance, kept->signal};
  if (scales_loss() && loss_weights.knows_q()) m.progress.loss_weight_exponent = loss_weights.q();
  for (std::size_t i = 0; i < table.entries().size(); ++i) {
    m.parameters.push_back(
        described(table.entries()[i], store.parameters()[i], freezing.missed(static_cast<int>(i))));
  }
  for (const auto& [name, tensor] : buffers) {
    m.buffers.push_back({name, tensor.sizes().vec(), state::dtype_name(tensor.scalar_type())});
    made.buffers.push_back({state::kBuffer, name, 0, flat_of(tensor)});
  }
  made.pieces = state::random_states(device);
  if (ranks.replica->rank() == 0) add_pieces(made.pieces);
  return made;
}

// Every rank has them whole: each parameter's are brought by one.
void Engine::Impl::add_factors(std::vector<state::Piece>& pieces,
                               const engine::OptimizerState& kept, std::size_t moment) {
  const auto values = kept.moments[moment]->tensor();
  const auto& entries = table.flats()[static_cast<std::size_t>(kept.flat)].entries;
  std::int64_t begin = 0;
  for (std::size_t i = 0; i < entries.size(); ++i) {
    const auto count = optim::factored_numel(kept.parameters[i]);
    if (entries[i] % shards.size() == shards.rank() && count > 0) {
      const auto& entry = table.entries()[static_cast<std::size_t>(entries[i])];
      pieces.push_back({state::moment(static_cast<std::int64_t>(moment)), entry.name, 0,
                        values.narrow(0, begin, count)});
    }
    begin += count;
  }
}

void Engine::Impl::add_pieces(std::vector<state::Piece>& pieces) {
  // Elements of a flat that the span, or `values`, begins with, one for a block of them -> this
  // rank's part of each entry.
  enum class Changes { by_anyone, by_engine };
  const auto add = [&](const std::string& kind, int flat, const offload::SpanPtr& span,
                       at::Tensor values, std::int64_t first, Changes changes,
                       std::int64_t block = 1) {
    if (span) values = span->tensor();
    // The thread that reads behind the training knows nothing of its CUDA streams.
    const bool behind =
        changes == Changes::by_engine && (!values.defined() || values.device().is_cpu());
    for (const int e : table.flats()[static_cast<std::size_t>(flat)].entries) {
      const auto& entry = table.entries()[static_cast<std::size_t>(e)];
      const auto part =
          zero::overlap({entry.offset, entry.offset + entry.numel}, shards.mine(flat));
      if (part.size() == 0) continue;
      const auto at = (part.begin - first) / block, count = (part.size() + block - 1) / block;
      const auto here = values.defined() ? values.narrow(0, at, count) : at::Tensor();
      pieces.push_back(
          {kind, entry.name, (part.begin - entry.offset) / block, here, span, at, count, behind});
    }
  };
  for (int flat = 0; flat < static_cast<int>(table.flats().size()); ++flat) {
    if (table.flats()[static_cast<std::size_t>(flat)].trainable) continue;
    const auto& tensors = store.flat(flat);
    const bool split = shards.splits_parameters(flat);
    add(state::kValue, flat, split ? tensors.shard : nullptr, tensors.values,
        split ? shards.mine(flat).begin : 0, Changes::by_anyone);
  }
  for (const auto& kept : optimizer_states.states) {
    const auto first = shards.optimized(kept.flat).begin;
    const bool own = store.flat(kept.flat).own_master;  // else they are the parameters themselves
    add(state::kMaster, kept.flat, kept.master, {}, first,
        own ? Changes::by_engine : Changes::by_anyone);
    for (std::size_t n = 0; n < kept.moments.size(); ++n) {
      if (kept.blocks[n] == 0) {
        add_factors(pieces, kept, n);
        continue;
      }
      add(state::moment(static_cast<std::int64_t>(n)), kept.flat, kept.moments[n], {}, first,
          Changes::by_engine, kept.blocks[n]);
    }
  }
}

std::string Engine::Impl::save(const std::string& directory, const state::SaveOptions& options) {
  RECORD_USER_SCOPE("poise::save");
  check_between_windows("save()");
  at::NoGradGuard no_grad;
  memory::AccountScope scope(ledger, memory::Account::staging);
  const auto mode =
      config.state.asynchronous ? state::Saver::Mode::in_background : state::Saver::Mode::wait;
  return saver.save(directory, current_contents(), options, mode);
}

state::Rehearsal Engine::Impl::rehearse_save(const std::string& directory) {
  check_between_windows("rehearse_save()");
  at::NoGradGuard no_grad;
  memory::AccountScope scope(ledger, memory::Account::staging);
  return saver.rehearse(directory, current_contents());
}

state::Contents Engine::Impl::current_contents() {
  notice_edits();
  return contents();
}

void Engine::Impl::notice_edits() {
  if (store.has_edits()) saver.finish_reading();
  store.notice_edits();
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

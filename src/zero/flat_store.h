// Where parameters live: for each flat of the ParamTable the values that forward reads, the fp32
// masters that the optimizer writes, and the accumulators that gradients are summed into. Over
// several ranks masters, accumulators and values are whole or this rank's shard, as the stage says.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "poise/comm.h"
#include "poise/config.h"
#include "poise/core.h"
#include "poise/memory.h"
#include "poise/offload.h"
#include "zero/accumulators.h"
#include "zero/shards.h"

namespace poise::zero {

// Tensors of one ParamTable::Flat, all 1-D.
struct FlatTensors {
  at::Tensor values;        // [whole] what the parameters are views of; where they are sharded it
                            // has memory only while they are gathered
  offload::SpanPtr shard;   // [shard] this rank's part of the values, where they are sharded
  offload::SpanPtr master;  // [optimized] fp32; the values themselves where those are fp32; null
                            // if frozen
  bool own_master = false;  // the master is memory of its own: values are a 16-bit copy
};

// Throws Error where the parameter has a hook that would never run.
void refuse_hooks_that_cannot_run(const std::string& name, const at::Tensor& parameter);

// Stores of what does not lie on the device.
struct Places {
  std::vector<std::shared_ptr<offload::Store>> masters;  // by flat; null: the device
  std::shared_ptr<offload::Store> gradients, parameters;
  offload::HostMemory* memory = nullptr;  // for what is worked on of sums in a file
};

class FlatStore {
 public:
  // Casts and re-homes the model's parameters (tensor objects, names, ties, shapes and strides
  // stay). Masters are made from the values before the cast; all ranks take rank 0's values, which
  // `materialize(unit)`, where there is one, makes there just before they are needed.
  FlatStore(const ModelView& model, const ParamTable& table, const config::PrecisionPolicy& policy,
            const Shards& shards, const comm::Ranks& ranks, const memory::Ledger& ledger,
            const Places& places, const std::function<void(const std::string&)>& materialize = {});
  // Unless made() was called, the parameters are given back, as in give_back().
  ~FlatStore();
  FlatStore(const FlatStore&) = delete;
  FlatStore& operator=(const FlatStore&) = delete;
  void made() noexcept { is_made_ = true; }  // all of the engine is

  // The parameters as they were before, in type, place and value: rank 0's, and what was edited
  // since. One rank alone has no more than its shards: what others held is lost, which the
  // parameters say when they are touched. Says it where that happens.
  enum class Together { no, yes };  // whether all ranks call it
  void give_back(Together together) noexcept;
  // Values that a cast has lost are not held any longer: they would not be true after an update.
  void forget_given() noexcept;

  FlatTensors& flat(int index) { return flats_[static_cast<std::size_t>(index)]; }
  const FlatTensors& flat(int index) const { return flats_[static_cast<std::size_t>(index)]; }
  const std::vector<at::Tensor>& parameters() const {
    return parameters_;
  }  // by entry of the table

  // The entry's piece of a whole flat, shaped and strided like the parameter.
  at::Tensor view_of(int entry, const at::Tensor& flat) const;

  // Where gradients are summed: [whole] or [shard] of each flat, fp32 unless asked otherwise.
  Accumulators& accumulators() { return *accumulators_; }

  // What the optimizer updates of a flat: its piece of the values and of the summed gradients.
  offload::SpanPtr optimized_values(int flat);
  offload::SpanPtr optimized_gradient(int flat);
  // This rank's shard of the summed gradients; see Accumulators::get().
  at::Tensor gradient_shard(int flat, Accumulators::Use use);

  // The values that all ranks updated, each its shard, become whole on every rank: submitted at
  // once, to be waited for.
  Event gather_values(int flat);
  // Sharded parameters: a flat's values get memory; they are on their way; parameters are views of
  // them; parameters throw their name when touched and the memory is gone.
  void make_room(int flat);
  Event gather_parameters(int flat);
  void expose(int flat);
  void release(int flat);
  // The whole values of rank `writer` become everybody's; shards and masters follow.
  void share_values(int flat, int writer);

  // Says which gathered parameters were edited though nobody is their writer.
  void warn_of_lost_edits();

  // The same for the sums of gradients that each rank has of its shard.
  Event gather_gradient(int flat);
  // A whole copy of what every rank holds a shard of: masters or summed gradients. All ranks call.
  at::Tensor whole_master(int flat);
  at::Tensor whole_gradient(int flat);
  // The same of a moment of the optimizer, which is kept as its masters are.
  at::Tensor whole_moment(int flat, const at::Tensor& moment);

  // The entry's sum becomes `values` (shaped like the parameter), as far as it is kept here.
  void write_gradient(int entry, const at::Tensor& values);

  // The entry's value becomes `values` (shaped like the parameter), and its master, as far as they
  // are kept here.
  void write_master(int entry, const at::Tensor& values);

  bool has_edits() const;  // that notice_edits() would take over
  // Parameters that were edited in place since the last call (their version moved) refresh their
  // masters. Throws Error where one no longer lives in its flat, or has a hook or a requires_grad
  // that it had not.
  void notice_edits();

  // The master takes the parameter's present value.
  void refresh(int entry);

 private:
  // A parameter before the engine.
  struct Given {
    at::ScalarType dtype;
    c10::Device device;
    at::Tensor values;   // where the engine has not all of their bits, or it had no memory
    bool taken = false;  // it lives in its flat
  };

  FlatStore(const ModelView& model, const ParamTable& table, const Shards& shards,
            const comm::Ranks& ranks, const memory::Ledger& ledger);
  void note_given();
  void hold_what_is_lost(int flat, at::ScalarType kept);
  void give_back(int flat, Together together, bool& rounded);
  at::Tensor values_to_give(int flat, Together together, bool& rounded);
  void lose(int entry);
  void rehome(const config::PrecisionPolicy& policy, const Places& places, int flat,
              offload::SpanPtr& accumulator);
  void fill(offload::Span& span, int flat, const at::Tensor& original, Range range);
  const at::Tensor& given(int entry) const;
  void copy_parameters(int flat, const at::Tensor& target);
  at::Tensor original_values(int flat);
  at::Tensor on_device(const offload::SpanPtr& span, int flat);
  at::Tensor gathered(const at::Tensor& mine, int flat, const char* what);
  std::string label(int flat) const;

  const ParamTable& table_;
  const Shards& shards_;
  const comm::Ranks& ranks_;
  const memory::Ledger& ledger_;
  const c10::Device device_;
  std::vector<FlatTensors> flats_;
  std::optional<Accumulators> accumulators_;  // set once all flats are made
  std::vector<at::Tensor> parameters_;
  std::vector<Given> given_;  // by entry
  bool is_made_ = false;
  std::vector<at::Tensor> poisons_;  // by entry, where parameters are sharded
  std::vector<std::uint32_t> versions_;
  bool edit_noted_ = false;
};

}  // namespace poise::zero

// Where parameters live: for each flat of the ParamTable the values that forward reads, the fp32
// masters that the optimizer writes, and the accumulators that gradients are summed into.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "poise/config.h"
#include "poise/core.h"
#include "poise/memory.h"

namespace poise::zero {

// Tensors of one ParamTable::Flat, each 1-D of the flat's numel.
struct FlatTensors {
  at::Tensor values;       // what the parameters are views of
  at::Tensor master;       // fp32; `values` itself where those are fp32; undefined if frozen
  at::Tensor accumulator;  // fp32 unless asked otherwise; undefined if frozen
};

class FlatStore {
 public:
  // Casts and re-homes the model's parameters (tensor objects, names, ties, shapes and strides
  // stay). Masters are made from the values before the cast.
  FlatStore(const ModelView& model, const ParamTable& table, const config::PrecisionPolicy& policy,
            const memory::Ledger& ledger);

  FlatTensors& flat(int index) { return flats_[static_cast<std::size_t>(index)]; }
  const std::vector<at::Tensor>& parameters() const {
    return parameters_;
  }  // by entry of the table

  // The entry's piece of `flat`, shaped and strided like the parameter.
  at::Tensor view_of(int entry, const at::Tensor& flat) const;

  // Parameters that were edited in place since the last call (their version moved) refresh their
  // masters. Throws Error where one no longer lives in its flat.
  void notice_edits();

  // The master takes the parameter's present value.
  void refresh(int entry);

 private:
  void rehome(const ModelView& model, const config::PrecisionPolicy& policy, int flat,
              const memory::Ledger& ledger);

  const ParamTable& table_;
  std::vector<FlatTensors> flats_;
  std::vector<at::Tensor> parameters_;
  std::vector<std::uint32_t> versions_;
  bool edit_noted_ = false;
};

}  // namespace poise::zero

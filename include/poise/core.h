// Nouns shared by all rooms: what a model looks like to the engine, where each parameter lives, and
// what one update reports.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "poise/error.h"
#include "poise/export.h"
#include "poise/memory_accounts.h"

namespace poise {

struct NamedTensor {
  std::string name;
  at::Tensor tensor;
};

// Parameters that are kept together, normally one block.
struct UnitView {
  std::string name;
  std::vector<std::string> parameters;
};

struct ModelView {
  std::vector<NamedTensor> parameters;  // a tied parameter may come several times, under each name
  std::vector<NamedTensor> buffers;
  std::vector<UnitView> units;  // parameters in none of them form the unit "rest"
  // Where an engine keeps parameters and buffers. Unset: where they are. A model larger than a GPU
  // stays on the CPU until then: its units move there one after the other, as far as they stay.
  std::optional<c10::Device> device = {};

  c10::Device target() const { return device ? *device : parameters.front().tensor.device(); }
};

// Where every parameter lives. Canonical order: units in order of the view, inside a unit the order
// of the parameters. Parameters of one unit that share dtype and trainability share a flat (those
// below a threshold one of their own); each starts at a multiple of kAlignment elements.
class POISE_API ParamTable {
 public:
  static constexpr std::int64_t kAlignment = 256;

  struct Entry {
    std::string name;
    std::vector<std::string> aliases;  // other names of the same (tied) parameter
    std::vector<std::int64_t> sizes;
    at::ScalarType dtype;  // before poise casts it
    bool trainable = true;
    std::int64_t numel = 0;
    int unit = 0;
    int flat = 0;
    std::int64_t offset = 0;  // elements from the start of its flat
  };
  struct Flat {
    int unit = 0;
    at::ScalarType dtype;  // before the cast
    bool trainable = true;
    bool small = false;        // of parameters below the threshold
    std::int64_t numel = 0;    // padded
    std::vector<int> entries;  // in order of offset
  };

  // Throws Error on overlapping parameters, several devices, a unit that names an unknown
  // parameter.
  // `small_below`: elements of the first parameter that is not small.
  explicit ParamTable(const ModelView& model, std::int64_t small_below = 0);

  const std::vector<Entry>& entries() const { return entries_; }
  const std::vector<Flat>& flats() const { return flats_; }
  const std::vector<std::string>& units() const { return units_; }
  // The unit of the parameters that the view's units leave over, used before and after them; -1
  // where there is none.
  int rest_unit() const { return rest_unit_; }
  // The units whose parameters the view lists for this one, itself among them: a tied parameter
  // lives in the first unit that lists it, or in the rest where one of its names is in no unit.
  const std::vector<int>& needs(int unit) const { return needs_[static_cast<std::size_t>(unit)]; }
  // Index of the entry with this name or alias; throws Error naming the nearest known one.
  int find(const std::string& name) const;
  // FNV-1a over names, shapes, dtypes, units and offsets: equal tables, equal hash.
  std::uint64_t hash() const;

 private:
  std::vector<Entry> entries_;
  std::vector<Flat> flats_;
  std::vector<std::string> units_;
  std::vector<std::vector<int>> needs_;  // by unit, ascending
  int rest_unit_ = -1;
};

enum class Status {
  applied,
  overflow,            // fp16 gradients had an inf or NaN: nothing changed but the loss scale
  nonfinite_loss,      // nothing changed
  nonfinite_gradient,  // nothing changed
  empty,               // no counted token in the window: nothing changed
};
POISE_API const char* name_of(Status status);

// What one update did.
struct StepResult {
  Status status = Status::applied;
  double loss = 0;          // mean over the window's counted tokens, the same for any split
  double grad_norm = 0;     // global L2 norm of the mean gradient, before clipping
  double clipped_norm = 0;  // after
  double lr = 0;            // that this update used
  double loss_scale = 1;    // that the gradients were made with
  double tokens = 0;        // counted tokens (or samples) N
  double noise_scale = 0;  // engine.noise_scale: counted tokens of an update from which on a larger
                           // one stops to help; 0: not measured
  std::int64_t micro_batches = 0;
  std::int64_t updates = 0;  // applied so far, this one included
  std::int64_t skipped = 0;  // not applied so far
  double forward_seconds = 0;
  double backward_seconds = 0;
  double update_seconds = 0;  // stops 8 to 11
  double total_seconds = 0;
  std::int64_t peak_bytes = 0;  // highest total of the ledger during this window
  std::array<std::int64_t, memory::kAccounts> accounts{};  // by account at that peak
  std::int64_t host_bytes = 0;      // offloaded to host memory, with staging: highest so far
  std::int64_t file_bytes = 0;      // offloaded to files now
  std::string first_bad_parameter;  // where the status says non-finite gradient or overflow
};

}  // namespace poise

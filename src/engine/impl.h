// What an Engine is made of. build.cpp puts it together, train_step.cpp runs it.
#pragma once

#include <chrono>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <utility>

#include "engine/freezing.h"
#include "engine/loss_weights.h"
#include "engine/noise_scale.h"
#include "engine/offloading.h"
#include "engine/state_update.h"
#include "poise/checkpointing.h"
#include "poise/comm.h"
#include "poise/engine.h"
#include "poise/optim.h"
#include "poise/precision.h"
#include "state/saved.h"
#include "state/saver.h"
#include "zero/flat_store.h"
#include "zero/gathers.h"
#include "zero/gradients.h"
#include "zero/shards.h"
#include "zero/units.h"

namespace poise {

namespace engine {

// Multiplier and decay of one parameter group; the learning rate comes from the schedule.
struct Group {
  double lr_multiplier = 1;
  double weight_decay = 0;
};

// One state for each trainable flat, and the groups their segments refer to.
struct OptimizerStates {
  std::vector<OptimizerState> states;
  std::vector<Group> groups;
};
OptimizerStates make_states(const ParamTable& table, zero::FlatStore& store,
                            const zero::Shards& shards, const config::OptimizerPolicy& policy,
                            const optim::Optimizer& optimizer, const memory::Ledger& ledger,
                            const Offloading& offloading);
// This rank's segments of a flat; `group_of` gives the group of an entry.
std::vector<optim::Segment> segments_of(const ParamTable& table, const zero::Shards& shards,
                                        int flat, const std::function<int(int)>& group_of);

// The optimizer's moments as a manifest says them.
std::vector<state::SavedMoment> saved_moments(const optim::Optimizer& optimizer);

enum class WindowState {
  closed,  // no micro-batch since the last update
  open,    // gradients are being accumulated
  summed,  // begin_update() ran: sums are known, gradients may be read and written
};

// Stop 8's outcome.
struct Sums {
  LossWeights::Totals totals;
  double grad_norm = 0;  // of the mean gradient, before clipping
  Status status = Status::applied;
  std::string first_bad_parameter;
  // The first one that ran out of memory in this window, or else that dropped it; -1: none.
  int lost_rank = -1;
  bool dropped = false;  // by WindowDropped, and no rank ran out of memory
  std::string lost_why;
};

// Why this rank ended a window before its end.
struct Lost {
  bool dropped = false;  // by WindowDropped or drop_window(); else it ran out of memory
  std::string why;
};

// How far a rank that stopped running forwards has followed the others in this window.
enum class Followed { not_at_all, to_end, to_nobody };  // to_nobody: no rank runs any more

// Rank `rank`'s row of each group's numbers at [rank * row.size()]; blocks.
std::vector<double> gather_rows(comm::Group& group, const std::vector<double>& row,
                                const char* what);
// The same, waiting as `wait` does.
std::vector<double> gather_rows(comm::Group& group, const std::vector<double>& row,
                                const char* what, const std::function<void(const Event&)>& wait);

// What an exception says, for messages.
std::string message_of(const std::exception_ptr& reason);

// The reason ends the groups on every rank; does nothing in a world of one.
void end_group(const comm::Ranks& ranks, const std::exception_ptr& reason) noexcept;

// Throws Error on every rank, naming the first difference, unless all ranks have the same model and
// settings.
void check_ranks_agree(comm::Group& group, const ModelView& model, const ParamTable& table,
                       const Config& config);

// Pops what a failed backward left in this thread's autograd queue (its gradient buffers).
void drain_autograd_queue();

// Where the model's buffers were before the engine: they go back there where that is not made.
class BufferPlaces {
 public:
  explicit BufferPlaces(const std::vector<NamedTensor>& buffers);
  ~BufferPlaces();
  BufferPlaces(const BufferPlaces&) = delete;
  BufferPlaces& operator=(const BufferPlaces&) = delete;
  void made() noexcept { is_made_ = true; }
  void give_back();

 private:
  std::vector<std::pair<at::Tensor, at::Device>> places_;
  bool is_made_ = false;
};

using Clock = std::chrono::steady_clock;
// Adds the time it lives to a total.
class Stopwatch {
 public:
  explicit Stopwatch(double& total) : total_(total) {}
  ~Stopwatch() { total_ += std::chrono::duration<double>(Clock::now() - start_).count(); }
  Stopwatch(const Stopwatch&) = delete;
  Stopwatch& operator=(const Stopwatch&) = delete;

 private:
  double& total_;
  Clock::time_point start_ = Clock::now();
};

}  // namespace engine

struct Engine::Impl {
  Impl(const ModelView& model, const Config& config, comm::Ranks ranks,
       const Materialize& materialize);

  // The stops, in order; train_step.cpp.
  void open_window(const std::vector<double>& counts);
  Loss forward(const std::function<Loss()>& loss);
  at::Tensor weigh(const Loss& loss);
  void backward(const Loss& loss, zero::MicroBatch position);
  void sum_up();
  double factor_of(double clip) const;
  void next_loss_scale();
  StepResult close_window();
  void discard_window();

  // Runs `call`; where it throws, the window is discarded and the other ranks are told.
  template <class Call>
  auto guarded(Call&& call) {
    try {
      return call();
    } catch (...) {
      give_up_window(std::current_exception());
      throw;
    }
  }
  void give_up_window(const std::exception_ptr& reason) noexcept;
  // Numbers of micro-batches of all ranks, where ranks must know them; else just ours.
  std::vector<double> micro_batch_counts(std::size_t mine);
  // Runs micro-batch `index` of a window, or follows the ranks that do.
  void run_micro_batch(std::size_t index, std::size_t count, const std::vector<double>& counts,
                       const LossFn& loss);
  Loss loss_in_window(std::size_t index, const LossFn& loss);
  void agree_without_micro_batch();
  void run_or_lose(const std::function<void()>& micro_batch);
  void follow();
  void note_losses(const std::vector<double>& rows, std::size_t columns);
  void lose(const engine::Lost& given_up);
  void follow_to_end();
  void follow_lost(const engine::Lost& given_up);
  void lose_window(const std::string& why);
  void refuse_after_sums(const char* call) const;
  [[noreturn]] void drop_lost_window();
  void gather_gradients();
  void measure_small(zero::MicroBatch position);
  void measure_noise(const std::vector<double>& rows, std::size_t columns);
  void prepare_gathering(const char* call);
  int unit_index(const std::string& name) const;
  void unmake();
  std::shared_ptr<zero::Units> make_units();
  std::optional<checkpointing::ActivationOffload> make_activations(const ModelView& model);
  // While it lives, what forward saves goes where the config says.
  std::shared_ptr<void> saving_scope() const {
    const bool all = config.offload.activation_units.empty();
    return activations && all ? activations->scope() : nullptr;
  }

  // Between windows; saving.cpp and loading.cpp.
  std::string save(const std::string& directory, const state::SaveOptions& options);
  state::Rehearsal rehearse_save(const std::string& directory);
  state::Contents current_contents();
  void notice_edits();  // masters follow parameters that were edited, once no save reads them
  void check_between_windows(const char* call) const;
  state::Contents contents();
  void add_pieces(std::vector<state::Piece>& pieces);
  void add_factors(std::vector<state::Piece>& pieces, const engine::OptimizerState& kept,
                   std::size_t moment);
  void take_factors(const engine::OptimizerState& kept, std::size_t moment,
                    const state::Saved& saved);
  state::Loaded load(const std::string& path, const state::LoadOptions& options);
  std::string open_save(const std::string& path, const state::LoadOptions& options,
                        std::optional<state::Saved>& saved);
  void refuse_to_mend_in_part(const state::LoadOptions& options) const;
  void take(const state::Saved& saved, const state::LoadOptions& options);
  void take_flat(int flat, const state::Saved& saved, const state::LoadOptions& options);
  void take_buffers(const state::Saved& saved);
  void take_random_states(const state::Saved& saved);

  double clip_factor(double grad_norm) const;
  double unscale_factor(double tokens) const;
  void apply(double factor);
  void apply_or_say_why_not(double factor);
  void refuse_half_an_update() const;
  void warn_of_no_gradient();
  void take_edited_gradients();
  std::vector<optim::GroupSettings> group_settings() const;
  // The optimizer's state that a trainable parameter lives in, and its entry of the table.
  std::pair<std::size_t, int> state_of(const std::string& name) const;
  double learning_rate() const;
  std::int64_t accumulation() const {  // micro-batches of a full window
    return set_accumulation ? *set_accumulation
                            : config::accumulation_at(config.batch, group->size(), updates);
  }
  bool scales_loss() const { return config.precision.dtype == config::DType::fp16; }

  const Config config;
  engine::BufferPlaces buffer_places;
  const std::vector<NamedTensor> buffers;  // of the model
  const comm::Ranks ranks;
  const std::shared_ptr<comm::Group> group;      // all of them
  std::optional<std::int64_t> set_accumulation;  // instead of the config's
  const ParamTable table;
  const zero::Shards shards;
  memory::Ledger ledger;
  engine::Offloading offloading;
  zero::FlatStore store;
  const std::string run;  // a name of its own among those over this group
  zero::Following following;
  zero::Gradients gradients;
  zero::Gathers gathers;
  std::shared_ptr<zero::Units> units;  // null where parameters are not sharded
  std::optional<checkpointing::ActivationOffload> activations;  // where they leave the device
  std::unique_ptr<optim::Optimizer> optimizer;
  engine::OptimizerStates optimizer_states;
  engine::StateUpdate state_update;
  engine::Freezing freezing;
  std::vector<optim::GroupSettings> given_groups;  // instead of the config's; empty: not given
  precision::LossScaler scaler;
  engine::LossWeights loss_weights;
  engine::NoiseScale noise;
  at::Device device;

  engine::WindowState state = engine::WindowState::closed;
  int gathered_scopes = 0;  // open
  std::int64_t micro_batches = 0;
  std::int64_t updates = 0;
  std::int64_t skipped = 0;
  std::int64_t lost_windows = 0;
  config::SchedulePolicy schedule = config.schedule;
  std::int64_t schedule_from = 0;
  engine::Sums sums;
  std::optional<engine::Lost> lost;  // in this window
  engine::Followed followed = engine::Followed::not_at_all;
  std::optional<double> clip_at;  // of the open window, instead of the config's
  bool no_gradient_noted = false;
  std::string half_an_update;  // why an update ended in its middle; empty: none did
  // Handed out by gradient(): the entry's mean gradient, and a copy to see whether it was written.
  struct Lent {
    at::Tensor gradient;
    at::Tensor original;
  };
  // Of the window's first micro-batch: squares of the sums and counted tokens, where measured.
  std::optional<engine::NoiseScale::Small> small;
  std::map<int, Lent> lent;
  StepResult times;  // only its *_seconds
  engine::Clock::time_point window_start;
  // How a load was asked for that failed after it had begun to change things.
  std::optional<state::LoadOptions> half_loaded;
  state::Saver saver;  // the last member: what it still writes was copied
};

}  // namespace poise

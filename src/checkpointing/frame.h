// One recomputed region. In the first run every tensor that autograd saves becomes a Slot that
// holds no data; when backward asks for one, the region runs again and fills all slots that are
// still wanted.
//
// [Note: who keeps what alive] The graph's nodes own slots, slots own the frame, the frame knows
// its slots weakly: a frame goes when the last node that saved something has run, and a slot nobody
// wants any more is not filled (and the second run stops after the last wanted one).
#pragma once

#include <torch/csrc/autograd/saved_variable.h>

#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "checkpointing/replay.h"
#include "poise/checkpointing.h"

namespace poise::checkpointing {

using Forward = std::function<Tensors(const Tensors&)>;

class Frame;

struct Slot {
  std::shared_ptr<Frame> frame;
  std::vector<std::int64_t> sizes;
  at::ScalarType dtype;
  c10::Device device;
  at::Tensor value;  // between the second run and unpack

  // "" or how `tensor` differs from what the first run saved here.
  std::string difference_to(const at::Tensor& tensor) const;
};

class Frame : public std::enable_shared_from_this<Frame> {
 public:
  // Inputs are saved as autograd saves: an enclosing region recomputes them, a later in-place
  // change of one is an error.
  Frame(Forward forward, const Tensors& inputs, Options options);

  Tensors first_run(const Tensors& inputs);

  std::shared_ptr<Slot> add_slot(const at::Tensor& tensor);
  at::Tensor unpack(Slot& slot);

  const Options& options() const { return options_; }
  Tensors& kept() { return kept_; }

 private:
  void second_run();
  Tensors unpacked_inputs() const;
  std::vector<std::shared_ptr<Slot>> wanted_slots() const;

  Forward forward_;
  Options options_;
  std::vector<torch::autograd::SavedVariable> inputs_;
  std::optional<RandomState> random_;  // empty: the first run drew nothing
  AutocastState autocast_ = AutocastState::capture();
  std::vector<std::weak_ptr<Slot>> slots_;
  Tensors kept_;         // outputs of kept operations, in order
  int graph_task_ = -1;  // of the backward that the slots' values were made for
  // CPU and device threads of one backward may ask at once; one thread may ask again from inside.
  std::recursive_mutex mutex_;
};

// The run that the calling thread is in, innermost first.
struct Run {
  enum class Kind { first, second } kind;
  Frame* frame;
  size_t next_kept = 0;
  Run* enclosing = nullptr;

  static Run* current();
};

class RunScope {
 public:
  RunScope(Run::Kind kind, Frame* frame);
  ~RunScope();
  RunScope(const RunScope&) = delete;
  RunScope& operator=(const RunScope&) = delete;

 private:
  Run run_;
};

}  // namespace poise::checkpointing

// First run, second run, and the hooks each of them gives to autograd.
#include "checkpointing/frame.h"

#include <ATen/core/grad_mode.h>
#include <c10/util/ArrayRef.h>
#include <torch/csrc/autograd/graph_task.h>

#include <utility>

#include "checkpointing/hooks.h"
#include "poise/error.h"

namespace poise::checkpointing {
namespace {

thread_local Run* current_run = nullptr;

class FirstRunHooks : public SavedTensorHooks {
 public:
  explicit FirstRunHooks(std::shared_ptr<Frame> frame) : frame_(std::move(frame)) {}
  std::shared_ptr<void> pack(const at::Tensor& tensor) override { return frame_->add_slot(tensor); }
  at::Tensor unpack(const std::shared_ptr<void>& packed) override {
    return frame_->unpack(*static_cast<Slot*>(packed.get()));
  }

 private:
  std::shared_ptr<Frame> frame_;
};

// Fills slots in the order of the first run. Keeps each tensor for its own graph, too: `forward`
// may run a backward inside.
class SecondRunHooks : public SavedTensorHooks {
 public:
  explicit SecondRunHooks(std::vector<std::shared_ptr<Slot>> slots) : slots_(std::move(slots)) {}

  std::shared_ptr<void> pack(const at::Tensor& tensor) override {
    // Detached: a tensor that knows its node would keep the node that saved it alive for ever.
    auto value = std::make_shared<at::Tensor>(tensor.detach());
    if (left_early_ || next_ == slots_.size()) return value;
    if (auto& slot = slots_[next_]) {
      difference_ = slot->difference_to(tensor);
      slot->value = *value;
    }
    ++next_;
    if (next_ == slots_.size() || !difference_.empty()) {
      left_early_ = true;
      throw EverythingRecomputed();
    }
    return value;
  }
  at::Tensor unpack(const std::shared_ptr<void>& packed) override {
    return *static_cast<at::Tensor*>(packed.get());
  }

  bool left_early() const { return left_early_; }
  void check() const {
    if (!difference_.empty()) {
      fail("checkpointing", "recompute differs from forward at saved tensor ", next_, ": ",
           difference_,
           "; the region must do the same both times (shapes that depend on outside state?)");
    }
    if (next_ < slots_.size()) {
      fail("checkpointing", "recompute saved ", next_, " tensors, forward at least ", slots_.size(),
           "; the region must do the same both times (a branch that depends on outside state?)");
    }
  }

 private:
  std::vector<std::shared_ptr<Slot>> slots_;  // null: no longer wanted; ends with a wanted one
  size_t next_ = 0;
  bool left_early_ = false;
  std::string difference_;
};

// Runs under `hooks` to the point where everything is there. The exception that leaves `forward`
// early may come back as another type (Python turns it into its own), so the hooks' own memory
// decides. Where `forward` caught it and went on, what it left behind is dropped all the same.
void run_until_recomputed(const std::shared_ptr<SecondRunHooks>& hooks,
                          const std::function<void()>& forward) {
  HookScope scope(hooks);
  try {
    forward();
  } catch (...) {
    if (!hooks->left_early()) throw;
  }
  if (hooks->left_early()) scope.drop_error();
}

}  // namespace

std::string Slot::difference_to(const at::Tensor& tensor) const {
  if (tensor.sizes() == c10::IntArrayRef(sizes) && tensor.scalar_type() == dtype &&
      tensor.device() == device) {
    return "";
  }
  return join("was ", dtype, " ", c10::IntArrayRef(sizes), " on ", device, ", is ",
              tensor.scalar_type(), " ", tensor.sizes(), " on ", tensor.device());
}

Run* Run::current() { return current_run; }

RunScope::RunScope(Run::Kind kind, Frame* frame)
    : run_{.kind = kind, .frame = frame, .enclosing = current_run} {
  current_run = &run_;
}

RunScope::~RunScope() { current_run = run_.enclosing; }

Frame::Frame(Forward forward, const Tensors& inputs, Options options)
    : forward_(std::move(forward)), options_(std::move(options)) {
  inputs_.reserve(inputs.size());
  for (const auto& input : inputs) inputs_.emplace_back(input, /*is_output=*/false);
}

Tensors Frame::first_run(const Tensors& inputs) {
  auto before = RandomState::capture();
  Tensors outputs;
  {
    HookScope hooks(std::make_shared<FirstRunHooks>(shared_from_this()));
    RunScope run(Run::Kind::first, this);
    random_ = before;  // a backward inside `forward` may need it already
    outputs = forward_(inputs);
  }
  if (before == RandomState::capture()) random_.reset();
  return outputs;
}

std::shared_ptr<Slot> Frame::add_slot(const at::Tensor& tensor) {
  auto slot = std::make_shared<Slot>(Slot{.frame = shared_from_this(),
                                          .sizes = tensor.sizes().vec(),
                                          .dtype = tensor.scalar_type(),
                                          .device = tensor.device(),
                                          .value = {}});
  slots_.push_back(slot);
  return slot;
}

at::Tensor Frame::unpack(Slot& slot) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  // Values left by another backward may be stale: parameters can have changed since.
  const int task = torch::autograd::get_current_graph_task_id();
  if (!slot.value.defined() || task != graph_task_ || task == -1) second_run();
  graph_task_ = task;
  return std::exchange(slot.value, {});
}

void Frame::second_run() {
  auto wanted = wanted_slots();
  for (auto& slot : wanted) {
    if (slot) slot->value.reset();
  }
  auto hooks = std::make_shared<SecondRunHooks>(std::move(wanted));
  const auto inputs = unpacked_inputs();

  at::AutoGradMode grad_mode(true);
  AutocastScope autocast(autocast_);
  RandomScope random;
  BufferScope buffers(options_.buffers);
  if (random_) random_->restore();
  run_until_recomputed(hooks, [&] {
    RunScope run(Run::Kind::second, this);
    forward_(inputs);
  });
  hooks->check();
}

// Cut off from the graph before them, so that nothing the second run does (hooks, gradients)
// reaches it. Leaves go in as they are: `forward` may know them by identity.
Tensors Frame::unpacked_inputs() const {
  Tensors inputs;
  inputs.reserve(inputs_.size());
  for (const auto& saved : inputs_) {
    auto input = saved.unpack();
    if (input.defined() && input.grad_fn()) input = input.detach().requires_grad_(true);
    inputs.push_back(std::move(input));
  }
  return inputs;
}

// Up to the last slot that is still wanted, null for those before it that are not.
std::vector<std::shared_ptr<Slot>> Frame::wanted_slots() const {
  std::vector<std::shared_ptr<Slot>> wanted;
  wanted.reserve(slots_.size());
  for (const auto& slot : slots_) wanted.push_back(slot.lock());
  while (!wanted.empty() && !wanted.back()) wanted.pop_back();
  return wanted;
}

}  // namespace poise::checkpointing

// Two ways to autograd. A Python process registers a HookProvider. A process without Python gets an
// engine that differs from torch's in one thing: asked for default hooks, it answers with those of
// the calling thread (torch offers that question to subclasses only).
#include "checkpointing/hooks.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/saved_variable_hooks.h>

#include <atomic>
#include <utility>
#include <vector>

#include "poise/error.h"

namespace poise::checkpointing {
namespace {

using torch::autograd::Engine;

thread_local std::vector<std::shared_ptr<SavedTensorHooks>> thread_hooks;

// One saved tensor in autograd's graph.
class SavedTensor : public torch::autograd::SavedVariableHooks {
 public:
  explicit SavedTensor(std::shared_ptr<SavedTensorHooks> hooks) : hooks_(std::move(hooks)) {}
  void call_pack_hook(const at::Tensor& tensor) override { packed_ = hooks_->pack(tensor); }
  at::Tensor call_unpack_hook() override { return hooks_->unpack(packed_); }

 private:
  std::shared_ptr<SavedTensorHooks> hooks_;
  std::shared_ptr<void> packed_;
};

class HookedEngine : public Engine {
 public:
  static Engine& get() {
    static auto* engine =
        new HookedEngine;  // never destroyed, as torch's own: threads may outlive main
    return *engine;
  }
  std::unique_ptr<torch::autograd::SavedVariableHooks> get_default_saved_variable_hooks() override {
    if (thread_hooks.empty() || !thread_hooks.back()) return nullptr;
    return std::make_unique<SavedTensor>(thread_hooks.back());
  }
};

class EngineProvider : public HookProvider {
 public:
  EngineProvider() {
    if (&Engine::get_default_engine() != &Engine::get_base_engine()) {
      fail("checkpointing",
           "another autograd engine is installed, as in a Python process; import poise "
           "there, or call set_hook_provider() before the first recompute()");
    }
    torch::autograd::set_default_engine_stub(HookedEngine::get);
  }
  void push(std::shared_ptr<SavedTensorHooks> hooks) override {
    thread_hooks.push_back(std::move(hooks));
  }
  void pop() override { thread_hooks.pop_back(); }
};

// Process-wide because autograd's engine is.
std::atomic<HookProvider*> registered{nullptr};

HookProvider& current_provider() {
  if (auto* provider = registered.load()) return *provider;
  static EngineProvider engine_provider;
  return engine_provider;
}

}  // namespace

void set_hook_provider(HookProvider* provider) { registered = provider; }

HookScope::HookScope(std::shared_ptr<SavedTensorHooks> hooks) : provider_(current_provider()) {
  provider_.push(std::move(hooks));
}

HookScope::~HookScope() { provider_.pop(); }

}  // namespace poise::checkpointing

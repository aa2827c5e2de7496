// Recompute for Python callables, and how saved-tensor hooks reach autograd in a Python process: as
// Python callables on torch's own stack of default hooks, beside those of torch.utils.checkpoint.
#include "poise/checkpointing.h"

#include <ATen/SavedTensorHooks.h>
#include <pybind11/functional.h>
#include <pybind11/stl.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <utility>

namespace py = pybind11;

namespace poise::python {
namespace {

using checkpointing::SavedTensorHooks;
using checkpointing::Tensors;

// What a saved tensor became; autograd keeps it as a Python object.
struct Packed {
  std::shared_ptr<void> value;
};

c10::SafePyObject on_torchs_stack(py::cpp_function function) {
  return c10::SafePyObject(function.release().ptr(), getPyInterpreter());
}

class PythonHookProvider : public checkpointing::HookProvider {
 public:
  void push(std::shared_ptr<SavedTensorHooks> hooks) override {
    py::gil_scoped_acquire gil;
    at::SavedTensorDefaultHooks::lazy_initialize();
    // Without the GIL: pack waits for tensors on their way out, which threads that log may hold up,
    // and unpack for another thread that may be recomputing the same region.
    py::cpp_function pack([hooks](const at::Tensor& tensor) {
      py::gil_scoped_release release;
      return Packed{hooks->pack(tensor)};
    });
    py::cpp_function unpack([hooks](const Packed& packed) {
      py::gil_scoped_release release;
      return hooks->unpack(packed.value);
    });
    at::SavedTensorDefaultHooks::push_hooks(on_torchs_stack(std::move(pack)),
                                            on_torchs_stack(std::move(unpack)));
  }
  void pop() override {
    py::gil_scoped_acquire gil;
    py::error_scope pending;  // one that is on its way out must not meet the hooks' destructors
    at::SavedTensorDefaultHooks::pop_hooks();
  }
  // torch throws a failed hook's error as its python_error and leaves it set in the thread: C++
  // that catches the exception does not clear it, and the next Python call would fail over it.
  void drop_error() override {
    py::gil_scoped_acquire gil;
    PyErr_Clear();
  }
};

// A Python callable that autograd's threads may drop, with or without the GIL.
std::shared_ptr<py::function> held(py::function function) {
  return {new py::function(std::move(function)), [](py::function* owned) {
            if (!Py_IsInitialized()) return;  // leaked with the interpreter
            py::gil_scoped_acquire gil;
            delete owned;
          }};
}

// The first run calls `first` and gives its result; later runs call `again` with the inputs.
py::object recompute(const py::function& first, py::function again, const Tensors& inputs,
                     Tensors buffers) {
  py::object result;
  auto pending = std::make_shared<const py::function*>(&first);
  auto forward = [&result, pending,
                  again = held(std::move(again))](const Tensors& tensors) -> Tensors {
    py::gil_scoped_acquire gil;
    if (const auto* call = std::exchange(*pending, nullptr)) {
      result = (*call)();
    } else {
      (*again)(tensors);
    }
    return {};
  };
  checkpointing::recompute(std::move(forward), inputs, {.buffers = std::move(buffers)});
  return result;
}

// Derived from BaseException, so that `except Exception` in user code lets it pass.
void register_early_exit(py::module_& module) {
  static py::handle type = py::exception<checkpointing::EverythingRecomputed>(
                               module, "EverythingRecomputed", PyExc_BaseException)
                               .release();
  py::register_exception_translator([](std::exception_ptr thrown) {
    try {
      if (thrown) std::rethrow_exception(thrown);
    } catch (const checkpointing::EverythingRecomputed&) {
      PyErr_SetString(type.ptr(), "the second run of a region has all it needs");
    }
  });
}

std::vector<bool> recomputed_units(const std::string& policy, std::int64_t n,
                                   const std::vector<std::string>& patterns,
                                   const std::vector<std::string>& units) {
  return checkpointing::recomputed_units({.policy = policy, .n = n, .units = patterns}, units);
}

std::pair<at::Tensor, at::Tensor> chunked_cross_entropy(
    const at::Tensor& hidden, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
    const at::Tensor& targets, std::int64_t chunk_tokens, std::int64_t ignore_index) {
  auto result = checkpointing::chunked_cross_entropy(hidden, weight, bias.value_or(at::Tensor()),
                                                     targets, chunk_tokens, ignore_index);
  return {result.loss_sum, result.counted};
}

}  // namespace

void bind_checkpointing(py::module_& module) {
  py::class_<Packed>(module, "_Packed");
  register_early_exit(module);
  static PythonHookProvider provider;  // autograd may ask until the process ends
  checkpointing::set_hook_provider(&provider);

  module.def("recompute", &recompute, py::arg("first"), py::arg("again"), py::arg("inputs"),
             py::arg("buffers"),
             "Calls first() now and again(inputs) in backward; poise.checkpointing.recompute is "
             "the door.");
  module.def("recomputing", &checkpointing::recomputing,
             "Whether this thread is inside the second run of a region.");
  module.def("recomputed_units", &recomputed_units, py::arg("policy"), py::arg("n"),
             py::arg("patterns"), py::arg("units"),
             "One flag for each unit: whether the policy recomputes it.");
  module.def(
      "chunked_cross_entropy", &chunked_cross_entropy, py::call_guard<py::gil_scoped_release>(),
      py::arg("hidden"), py::arg("weight"), py::arg("bias"), py::arg("targets"),
      py::arg("chunk_tokens"), py::arg("ignore_index"),
      "(sum of losses, counted rows) of two-dimensional hidden; see poise.chunked_cross_entropy.");
}

}  // namespace poise::python

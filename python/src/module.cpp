// The extension module poise._C: a list of rooms, nothing else. A new room adds its file to
// python/CMakeLists.txt and two lines here.
#include <torch/csrc/utils/pybind.h>

namespace py = pybind11;

namespace poise::python {
void bind_cli(py::module_& module);
void bind_core(py::module_& module);
void bind_kernels(py::module_& module);
void bind_data(py::module_& module);
void bind_memory(py::module_& module);
void bind_offload(py::module_& module);
void bind_comm(py::module_& module);
void bind_checkpointing(py::module_& module);
void bind_config(py::module_& module);
void bind_engine(py::module_& module);
void bind_state(py::module_& module);
void bind_plan(py::module_& module);
}  // namespace poise::python

PYBIND11_MODULE(_C, module) {
  using namespace poise::python;
  module.doc() =
      "The C++ core of poise. Use the package poise; this module follows it without notice.";
  bind_core(module);  // first: the others throw its exceptions
  bind_cli(module);
  bind_kernels(module);
  bind_data(module);
  bind_memory(module);
  bind_offload(module);
  bind_comm(module);
  bind_checkpointing(module);
  bind_config(module);
  bind_state(module);
  bind_plan(module);
  bind_engine(module);
}

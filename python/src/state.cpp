// Saved states in Python: what a load brings back, and where saves are. Engine.save and Engine.load
// are in engine.cpp.
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "poise/best_save.h"
#include "poise/error.h"
#include "poise/state.h"

namespace py = pybind11;

namespace poise::python {

void bind_state(py::module_& module) {
  using NoGil = py::call_guard<py::gil_scoped_release>;
  py::class_<state::Loaded>(module, "LoadedState",
                            "What a load brings back besides the engine's own state.")
      .def_readonly("path", &state::Loaded::path)
      .def_readonly("ranks", &state::Loaded::ranks)
      .def_readonly("cursor", &state::Loaded::cursor)
      .def_readonly("user", &state::Loaded::user)
      .def_readonly("own", &state::Loaded::own)
      .def("__repr__", [](const state::Loaded& loaded) {
        return join("LoadedState(path=", loaded.path, ", ranks=", loaded.ranks, ")");
      });
  py::class_<state::Rehearsal>(module, "Rehearsal", "What a save would take.")
      .def_readonly("bytes", &state::Rehearsal::bytes)
      .def_readonly("seconds", &state::Rehearsal::seconds)
      .def_readonly("free_bytes", &state::Rehearsal::free_bytes);
  module.def("find_save", &state::find, py::arg("path"), NoGil(),
             "The save itself, or the latest whole one of a directory; empty: there is none.");
  module.def("list_saves", &state::list, py::arg("directory"), NoGil(),
             "Whole saves in a directory, oldest first.");
  module.def("verify_save", &state::verify, py::arg("save"), NoGil(),
             "Reads every byte of a save; an Error names what is damaged.");
  module.def("save_differences", &state::differences, py::arg("save"), py::arg("other"), NoGil(),
             "A line for each thing in which two saves differ.");
  module.def(
      "mark_best_save", &state::mark_best, py::arg("save"), py::arg("user"), py::arg("total_limit"),
      py::arg("keep_every"), NoGil(),
      "The directory's link `best` leads to the save, which keeps these texts besides its own.");
  module.def("export_save", &state::export_model, py::arg("save"), py::arg("file"), NoGil(),
             "The model of a save as one plain safetensors file.");
  module.def(
      "read_model",
      [](const std::string& save, bool frozen) {
        using state::Frozen;
        return state::read_model(save, frozen ? Frozen::included : Frozen::left_out);
      },
      py::arg("save"), py::arg("frozen") = true, NoGil(),
      "The model of a save by name, on the CPU and in fp32.");
}

}  // namespace poise::python

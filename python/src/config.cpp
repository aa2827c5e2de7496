// The configuration as Python sees it: read from JSON text, written back as JSON text. Dictionaries
// and paths are the Python side's (poise/config.py).
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <string>
#include <vector>

#include "poise/config.h"

namespace py = pybind11;

namespace poise::python {

void bind_config(py::module_& module) {
  py::class_<Config>(module, "Config", "The settings of a run, checked once and read-only.")
      .def_static(
          "from_json", &Config::from_json, py::arg("text"),
          py::arg("overrides") = std::vector<std::string>{}, py::arg("place") = "",
          "Reads JSON; comments are allowed. Overrides are \"key=value\" each, applied after it; "
          "messages name the place of the text. Raises poise.Error on what it does not know.")
      .def_static("from_json_file", &Config::from_json_file, py::arg("path"),
                  py::arg("overrides") = std::vector<std::string>{})
      .def("to_json", &Config::to_json, "Every key with its value.")
      .def("__eq__", [](const Config& a, const Config& b) { return a.to_json() == b.to_json(); })
      .def("__repr__",
           [](const Config& config) { return "poise.Config(" + config.to_json() + ")"; });
}

}  // namespace poise::python

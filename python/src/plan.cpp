// Planning: tables of published runs, known devices.
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <string>

#include "poise/plan.h"

namespace py = pybind11;

namespace poise::python {
namespace {

py::list known_devices() {
  py::list all;
  for (const auto& device : plan::known_devices()) {
    py::dict entry;
    entry["name"] = device.name;
    entry["memory"] = device.memory;
    entry["half_flops"] = device.half_flops;
    entry["float_flops"] = device.float_flops;
    all.append(entry);
  }
  return all;
}

}  // namespace

void bind_plan(py::module_& module) {
  py::class_<plan::RunPrediction>(
      module, "RunPrediction",
      "What a published run of another framework holds and how fast it is, predicted.")
      .def_readonly("id", &plan::RunPrediction::id)
      .def_readonly("predicted", &plan::RunPrediction::predicted,
                    "Whether its row gives enough to predict from.")
      .def_readonly("peak_gib", &plan::RunPrediction::peak_gib,
                    "Of each device, as the run's meter reads it.")
      .def_readonly("tokens_per_second", &plan::RunPrediction::tokens_per_second, "Of each device.")
      .def_readonly("meter_offset_gib", &plan::RunPrediction::meter_offset_gib,
                    "In peak_gib: what the meter counts beside the allocator.")
      .def_readonly("device_constant", &plan::RunPrediction::device_constant,
                    "In tokens_per_second.");
  module.def("predict_runs", &plan::predict_runs, py::arg("table"),
             "Predictions for the rows of a comma-separated table (docs/planner_scores.md).");
  module.def("known_devices", &known_devices,
             "Name, memory (bytes) and peak FLOP/s, in 16 bits and in fp32, of the devices that "
             "`poise plan` knows.");
}

}  // namespace poise::python

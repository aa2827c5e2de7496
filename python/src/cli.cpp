// The command line as Python sees it: what the console script `poise` calls.
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <iostream>
#include <string>
#include <vector>

#include "poise/cli.h"

namespace py = pybind11;

namespace poise::python {

void bind_cli(py::module_& module) {
  module.def(
      "cli_run",
      [](const std::vector<std::string>& arguments) {
        std::vector<const char*> argv;
        for (const auto& argument : arguments) argv.push_back(argument.c_str());
        const int code = cli::run(static_cast<int>(argv.size()), argv.data());
        std::cout.flush();  // Python prints through a buffer of its own
        return code;
      },
      py::arg("arguments"), py::call_guard<py::gil_scoped_release>(),
      "Runs `poise <arguments>` (the first is the program's name) and returns the exit code.");
}

}  // namespace poise::python

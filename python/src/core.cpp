// Errors as Python exceptions, and log lines handed to Python's logging (logger "poise").
#include <pybind11/functional.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <string>

#include "poise/error.h"
#include "poise/interrupt.h"
#include "poise/log.h"

namespace py = pybind11;

namespace poise::python {
namespace {

// Python's logging counts in tens: DEBUG 10, INFO 20, WARNING 30, ERROR 40.
int logging_level(log::Level level) { return 10 * (static_cast<int>(level) + 1); }

void log_to_python(log::Level level, const std::string& line) {
  py::gil_scoped_acquire gil;
  try {
    py::module_::import("logging").attr("getLogger")("poise").attr("log")(logging_level(level),
                                                                          "%s", line);
  } catch (py::error_already_set& error) {
    // A handler that fails must not end a training step.
    error.discard_as_unraisable("poise log sink");
  }
}

template <class CppError>
void add_exception(py::module_& module, const char* name, PyObject* base, const char* doc) {
  auto& type = py::register_exception<CppError>(module, name, base);
  type.attr("__module__") = "poise";
  type.attr("__doc__") = doc;
}

// Long waits of the runtime look here for Ctrl-C. Signals are only handled on Python's main thread;
// on others this does nothing.
void check_python_signals() {
  py::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) throw py::error_already_set();
}

void set_log_level(const std::string& name) {
  if (name == "debug") return log::set_level(log::Level::debug);
  if (name == "info") return log::set_level(log::Level::info);
  if (name == "warning") return log::set_level(log::Level::warning);
  if (name == "error") return log::set_level(log::Level::error);
  fail("log", "unknown level: ", name, "; use debug, info, warning or error");
}

}  // namespace

void bind_core(py::module_& module) {
  add_exception<Error>(
      module, "Error", PyExc_RuntimeError,
      "Bad input, a missing file, an impossible setting: the message says what to do.");
  add_exception<Bug>(module, "Bug", PyExc_RuntimeError,
                     "A broken promise inside poise; please report it.");

  log::set_sink(log_to_python);
  set_interrupt_check(check_python_signals);
  // Threads may outlive the interpreter: from then on lines go to standard error again, and nobody
  // asks for signals.
  py::module_::import("atexit").attr("register")(py::cpp_function([] {
    log::set_sink({});
    set_interrupt_check(nullptr);
  }));

  module.def(
      "log_write",
      [](int level, const std::string& line) {
        if (level < 0 || level > 3) fail("log", "level out of range: ", level, "; use 0 to 3");
        py::gil_scoped_release release;
        log::write(static_cast<log::Level>(level), line);
      },
      py::arg("level"), py::arg("line"),
      "Writes one line to the runtime's log (0 debug, 1 info, 2 warning, 3 error).");
  module.def("set_log_level", &set_log_level, py::arg("level"),
             "Drops log lines below level: debug, info, warning or error.");
}

}  // namespace poise::python

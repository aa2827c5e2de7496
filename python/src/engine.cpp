// The engine as Python sees it. Every call that may take long gives up the GIL for its whole length
// and takes it back only around the user's loss function; the Python side (poise/engine.py) turns
// what that function returns into the tuple that to_loss() reads.
#include <ATen/ops/empty.h>
#include <c10/core/StorageImpl.h>
#include <pybind11/stl.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "poise/engine.h"
#include "poise/out_of_memory.h"
#include "poise/window_dropped.h"

namespace py = pybind11;

namespace poise::python {
namespace {

using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;
using Units = std::vector<std::pair<std::string, std::vector<std::string>>>;

// An engine waits for its threads when it goes; they may need the GIL to finish.
struct DeleteWithoutGil {
  void operator()(Engine* engine) const {
    py::gil_scoped_release release;
    delete engine;
  }
};
using EnginePtr = std::unique_ptr<Engine, DeleteWithoutGil>;

std::vector<NamedTensor> named(NamedTensors tensors) {
  std::vector<NamedTensor> out;
  out.reserve(tensors.size());
  for (auto& [name, tensor] : tensors) out.push_back({std::move(name), std::move(tensor)});
  return out;
}

EnginePtr make_engine(NamedTensors parameters, NamedTensors buffers, Units units,
                      const Config& config, std::shared_ptr<comm::Group> all,
                      std::shared_ptr<comm::Group> shard, std::shared_ptr<comm::Group> replica,
                      const std::optional<py::function>& materialize,
                      const std::optional<at::Device>& device) {
  ModelView view{named(std::move(parameters)), named(std::move(buffers)), {}, device};
  for (auto& [name, names] : units) view.units.push_back({std::move(name), std::move(names)});
  Engine::Materialize make;  // refers to the caller's object: the engine keeps nothing of it
  if (materialize) {
    make = [&materialize](const std::string& unit) {
      py::gil_scoped_acquire gil;
      (*materialize)(unit);
    };
  }
  py::gil_scoped_release release;
  return EnginePtr(new Engine(view, config, comm::Ranks{all, shard, replica}, make));
}

// The storage says that it is empty, by which the engine sees that nobody has filled it.
at::Tensor without_memory(const at::Tensor& like, const at::Device& device,
                          const std::string& message) {
  auto tensor = zero::without_memory(like, device, message);
  tensor.storage().unsafeGetStorageImpl()->set_nbytes(0);
  return tensor;
}

Loss::Kind to_kind(const std::string& kind) {
  if (kind == "mean") return Loss::Kind::mean;
  if (kind == "sum") return Loss::Kind::sum;
  if (kind == "per_token") return Loss::Kind::per_token;
  fail("engine", "unknown kind of loss: ", kind, "; use mean, sum or per_token");
}

// None, a number or a tensor. Numbers go the way of Loss::mean(value, double): the same bits.
at::Tensor to_count(const at::Tensor& value, const py::handle& count) {
  if (count.is_none()) return {};
  if (THPVariable_Check(count.ptr())) return count.cast<at::Tensor>();
  return Loss::mean(value, count.cast<double>()).count;
}

// (value, kind, count, [(value, kind, count, weight), ...])
Loss to_loss(const py::handle& object) {
  const auto parts = py::cast<py::tuple>(object);
  Loss loss(parts[0].cast<at::Tensor>());
  loss.kind = to_kind(parts[1].cast<std::string>());
  loss.count = to_count(loss.value, parts[2]);
  for (const py::handle entry : parts[3]) {
    const auto term = py::cast<py::tuple>(entry);
    const auto value = term[0].cast<at::Tensor>();
    loss.terms.push_back({value, to_kind(term[1].cast<std::string>()), to_count(value, term[2]),
                          term[3].cast<double>()});
  }
  return loss;
}

// poise.WindowDropped of Python: no Exception, so that handlers of errors let it pass.
PyObject* window_dropped = nullptr;

void add_window_dropped(py::module_& module) {
  window_dropped = PyErr_NewExceptionWithDoc(
      "poise.WindowDropped",
      "Raised by a loss function on some ranks: all ranks drop the open window, and their step\n"
      "raises it. Nothing has changed then, and engine and group stay usable.",
      PyExc_BaseException, nullptr);
  if (!window_dropped) throw py::error_already_set();
  module.attr("WindowDropped") = py::handle(window_dropped);
  py::register_exception_translator([](std::exception_ptr thrown) {
    try {
      if (thrown) std::rethrow_exception(thrown);
    } catch (const WindowDropped&) {
      PyErr_SetString(window_dropped, "the open window was dropped");
    }
  });
}

// The callback lives in the caller's frame, so that the engine never destroys a Python object.
StepResult step_window(Engine& engine, std::size_t count, const py::function& callback,
                       const std::vector<double>& counts) {
  const auto loss = [&callback](std::size_t micro_batch) {
    py::gil_scoped_acquire gil;
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();  // Ctrl-C between micro-batches
    try {
      return to_loss(callback(micro_batch));
    } catch (const py::error_already_set& error) {
      if (error.matches(window_dropped)) throw WindowDropped();
      throw;
    }
  };
  py::gil_scoped_release release;
  return engine.step(count, loss, counts);
}

// Groups as pairs of a learning rate and a weight decay.
void set_hyperparameters(Engine& engine, const std::vector<std::pair<double, double>>& groups,
                         double beta1, double beta2, double eps, double momentum) {
  std::vector<optim::GroupSettings> settings;
  for (const auto& [lr, weight_decay] : groups) settings.push_back({lr, weight_decay});
  engine.set_hyperparameters(settings, {beta1, beta2, eps, momentum});
}

// Python's `with` around what a unit's forward saves.
class ActivationGuard {
 public:
  explicit ActivationGuard(checkpointing::ActivationOffload offload)
      : offload_(std::move(offload)) {}
  void enter() { scopes_.push_back(offload_.scope()); }
  void exit() { scopes_.pop_back(); }

 private:
  const checkpointing::ActivationOffload offload_;
  std::vector<std::shared_ptr<void>> scopes_;  // a unit inside another one
};

std::string text(const py::object& value) { return py::str(value).cast<std::string>(); }

bool is_out_of_memory_type(PyObject* type) {
  const py::error_scope put_aside;
  const auto known = py::module_::import("torch").attr("OutOfMemoryError");
  return PyErr_GivenExceptionMatches(type, known.ptr()) != 0;
}

// What Python code ran into, in the loss function or in a backward of its own. Torch also leaves
// the latter as the thread's current exception, which must not outlive it.
bool is_python_out_of_memory(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const py::error_already_set& raised) {
    const py::gil_scoped_acquire gil;
    return is_out_of_memory_type(raised.type().ptr());
  } catch (const python_error& raised) {
    const py::gil_scoped_acquire gil;
    const bool found =
        is_out_of_memory_type(raised.type != nullptr ? raised.type : PyErr_Occurred());
    if (found) PyErr_Clear();
    return found;
  } catch (...) {
    return false;
  }
}

// Python's `with` around ForwardScope.
class ForwardGuard {
 public:
  explicit ForwardGuard(Engine& engine) : engine_(engine) {}
  void enter() { scope_.emplace(engine_.forward_scope()); }
  void fail(const std::string& why) {
    if (scope_) scope_->fail(why);
  }
  void lose(const std::string& why) {
    if (scope_) scope_->lose(why);
  }
  void exit() { scope_.reset(); }

 private:
  Engine& engine_;
  std::optional<Engine::ForwardScope> scope_;
};

template <class Values>
py::dict by_account(const Values& values) {
  py::dict out;
  for (int i = 0; i < memory::kAccounts; ++i) {
    out[memory::name_of(static_cast<memory::Account>(i))] = values[i];
  }
  return out;
}

py::dict memory_of(const Engine& engine) {
  const memory::Snapshot now = engine.ledger().snapshot();
  py::dict out;
  out["current_bytes"] = now.current_bytes;
  out["peak_bytes"] = now.peak_bytes;
  out["budget_bytes"] = engine.ledger().budget();
  out["current"] = by_account(now.current);
  out["at_peak"] = by_account(now.at_peak);
  out["own_peak"] = by_account(now.own_peak);
  return out;
}

// `extra` lives in the caller's frame, as the loss function does.
std::string save(Engine& engine, const std::string& directory, const std::string& name,
                 std::optional<std::int64_t> cursor, const std::map<std::string, std::string>& user,
                 const std::map<std::string, std::string>& own, std::int64_t total_limit,
                 std::int64_t keep_every, bool best, const std::optional<py::function>& extra) {
  state::SaveOptions options{name, cursor, user, own, total_limit, keep_every, best, {}};
  if (extra) {
    options.extra = [&extra](const std::string& folder) {
      py::gil_scoped_acquire gil;
      (*extra)(folder);
    };
  }
  py::gil_scoped_release release;
  return engine.save(directory, options);
}

// Of the parameters that live in a unit.
std::vector<std::string> names_in(const Engine& engine, const std::string& unit) {
  std::vector<std::string> names;
  for (const auto& entry : engine.table().entries()) {
    if (engine.table().units()[static_cast<std::size_t>(entry.unit)] == unit) {
      names.push_back(entry.name);
    }
  }
  return names;
}

void bind_result(py::module_& module) {
  py::class_<StepResult>(module, "StepResult", "What one update did.")
      .def_property_readonly(
          "status",
          [](const StepResult& result) {
            return py::module_::import("poise.status").attr("Status")(name_of(result.status));
          })
      .def_property_readonly(
          "applied", [](const StepResult& result) { return result.status == Status::applied; })
      .def_readonly("loss", &StepResult::loss)
      .def_readonly("grad_norm", &StepResult::grad_norm)
      .def_readonly("noise_scale", &StepResult::noise_scale)
      .def_readonly("clipped_norm", &StepResult::clipped_norm)
      .def_readonly("lr", &StepResult::lr)
      .def_readonly("loss_scale", &StepResult::loss_scale)
      .def_readonly("tokens", &StepResult::tokens)
      .def_readonly("micro_batches", &StepResult::micro_batches)
      .def_readonly("updates", &StepResult::updates)
      .def_readonly("skipped", &StepResult::skipped)
      .def_readonly("forward_seconds", &StepResult::forward_seconds)
      .def_readonly("backward_seconds", &StepResult::backward_seconds)
      .def_readonly("update_seconds", &StepResult::update_seconds)
      .def_readonly("total_seconds", &StepResult::total_seconds)
      .def_readonly("peak_bytes", &StepResult::peak_bytes)
      .def_property_readonly("accounts",
                             [](const StepResult& result) { return by_account(result.accounts); })
      .def_readonly("host_bytes", &StepResult::host_bytes)
      .def_readonly("file_bytes", &StepResult::file_bytes)
      .def_readonly("first_bad_parameter", &StepResult::first_bad_parameter)
      .def("__repr__", [](const StepResult& result) {
        return join("StepResult(status=", name_of(result.status), ", loss=", result.loss,
                    ", grad_norm=", result.grad_norm, ", lr=", result.lr,
                    ", tokens=", result.tokens, ", updates=", result.updates, ")");
      });
}

}  // namespace

void bind_engine(py::module_& module) {
  using NoGil = py::call_guard<py::gil_scoped_release>;
  bind_result(module);
  add_window_dropped(module);
  set_out_of_memory_check(is_python_out_of_memory);

  py::class_<ForwardGuard>(module, "ForwardScope", "A `with` block that a forward runs in.")
      .def("__enter__", &ForwardGuard::enter, NoGil())
      .def("__exit__", [](ForwardGuard& guard, const py::object& type, const py::object& value,
                          const py::object& /*traceback*/) {
        std::string why;
        bool out_of_memory = false;
        if (!type.is_none()) {
          why = join(type.attr("__name__").cast<std::string>(), ": ", text(value));
          out_of_memory = is_out_of_memory_type(type.ptr());
        }
        py::gil_scoped_release release;
        if (!why.empty()) out_of_memory ? guard.lose(why) : guard.fail(why);
        guard.exit();
      });

  py::class_<ActivationGuard>(module, "ActivationScope",
                              "A `with` block whose saved tensors wait away from the device.")
      .def("__enter__", &ActivationGuard::enter)
      .def("__exit__", [](ActivationGuard& guard, const py::args&) { guard.exit(); });

  py::class_<zero::Unit>(module, "Unit", "Runs a block while its parameters are whole.")
      .def("enter", &zero::Unit::enter, py::arg("inputs"), NoGil())
      .def("leave", &zero::Unit::leave, py::arg("outputs"), NoGil())
      .def("abandon", &zero::Unit::abandon, NoGil());

  py::class_<Engine::Gathered>(module, "GatheredScope", "All parameters are whole until close().")
      .def("close", &Engine::Gathered::close, NoGil());

  module.def(
      "schedule_multiplier",
      [](const Config& config, std::int64_t applied) {
        return optim::schedule_multiplier(config.schedule, applied);
      },
      py::arg("config"), py::arg("applied"),
      "Part of the peak learning rate for the update that follows so many applied ones.");

  module.def("without_memory", &without_memory, py::arg("like"), py::arg("device"),
             py::arg("message"), "A tensor like another one, with an empty storage.");

  py::class_<Engine, EnginePtr>(module, "Engine", "The C++ engine; use poise.Engine.")
      .def(py::init(&make_engine), py::arg("parameters"), py::arg("buffers"), py::arg("units"),
           py::arg("config"), py::arg("all") = nullptr, py::arg("shard") = nullptr,
           py::arg("replica") = nullptr, py::arg("materialize") = py::none(),
           py::arg("device") = py::none())
      .def("step_window", &step_window, py::arg("count"), py::arg("loss"),
           py::arg("counts") = std::vector<double>{})
      .def(
          "forward_scope", [](Engine& engine) { return std::make_unique<ForwardGuard>(engine); },
          py::keep_alive<0, 1>())
      .def("begin_window", &Engine::begin_window, py::arg("counts"), NoGil())
      .def(
          "backward",
          [](Engine& engine, const py::tuple& parts) {
            const Loss loss = to_loss(parts);
            py::gil_scoped_release release;
            engine.backward(loss);
          },
          py::arg("loss"))
      .def("is_boundary", &Engine::is_boundary)
      .def(
          "step",
          [](Engine& engine, bool last) { return engine.step(last ? Last::yes : Last::no); },
          py::arg("last") = false, NoGil())
      .def("discard_window", &Engine::discard_window, NoGil())
      .def("lose_window", &Engine::lose_window, py::arg("why"), NoGil())
      .def("drop_window", &Engine::drop_window, NoGil())
      .def_property_readonly("lost_windows", &Engine::lost_windows)
      .def("begin_update", &Engine::begin_update, NoGil())
      .def("clip_grad_norm", &Engine::clip_grad_norm, py::arg("max_norm"), NoGil())
      .def_property_readonly("accumulation", &Engine::accumulation)
      .def("set_accumulation", &Engine::set_accumulation, py::arg("micro_batches"), NoGil())
      .def("group_parameters", &Engine::group_parameters, py::arg("groups"), NoGil())
      .def("set_hyperparameters", &set_hyperparameters, py::arg("groups"), py::arg("beta1"),
           py::arg("beta2"), py::arg("eps"), py::arg("momentum"), NoGil())
      .def("moments", &Engine::moments, py::arg("name"), NoGil())
      .def("set_master", &Engine::set_master, py::arg("name"), py::arg("values"), NoGil())
      .def("set_moments", &Engine::set_moments, py::arg("name"), py::arg("values"), NoGil())
      .def("set_updates", &Engine::set_updates, py::arg("updates"), NoGil())
      .def("missed_updates", &Engine::missed_updates, py::arg("name"), NoGil())
      .def("set_missed_updates", &Engine::set_missed_updates, py::arg("name"), py::arg("updates"),
           NoGil())
      .def(
          "set_schedule",
          [](Engine& engine, const Config& config, std::int64_t from) {
            engine.set_schedule(config.schedule, from);
          },
          py::arg("config"), py::arg("from_update"), NoGil())
      .def("gradient", &Engine::gradient, py::arg("name"), NoGil())
      .def("refresh", &Engine::refresh, py::arg("name"), NoGil())
      .def("master", &Engine::master, py::arg("name"), NoGil())
      .def("unit", &Engine::unit, py::arg("name"))
      .def("activation_scope",
           [](const Engine& engine) -> std::unique_ptr<ActivationGuard> {
             auto offload = engine.activation_offload();
             if (!offload) return nullptr;
             return std::make_unique<ActivationGuard>(*std::move(offload));
           })
      .def(
          "gathered",
          [](Engine& engine, std::optional<int> writer) {
            return std::make_unique<Engine::Gathered>(engine.gathered(writer));
          },
          py::arg("writer"), py::keep_alive<0, 1>(), NoGil())
      .def(
          "gathered_unit",
          [](Engine& engine, const std::string& unit) {
            return std::make_unique<Engine::Gathered>(engine.gathered_unit(unit));
          },
          py::arg("unit"), py::keep_alive<0, 1>(), NoGil())
      .def("unmake", &Engine::unmake, NoGil())
      .def("names_in", &names_in, py::arg("unit"))
      .def("save", &save, py::arg("directory"), py::kw_only(), py::arg("name") = "",
           py::arg("cursor") = py::none(), py::arg("user") = std::map<std::string, std::string>{},
           py::arg("own") = std::map<std::string, std::string>{}, py::arg("total_limit") = 0,
           py::arg("keep_every") = 0, py::arg("best") = false, py::arg("extra") = py::none())
      .def("rehearse_save", &Engine::rehearse_save, py::arg("directory"), NoGil())
      .def("finish_save", &Engine::finish_save, NoGil())
      .def(
          "load",
          [](Engine& engine, const std::string& path, bool weights_only,
             const std::vector<std::string>& only) {
            return engine.load(path, {weights_only, only});
          },
          py::arg("path"), py::kw_only(), py::arg("weights_only") = false,
          py::arg("only") = std::vector<std::string>{}, NoGil())
      .def("memory", &memory_of)
      .def("restart_peak", &Engine::restart_peak)
      .def_property_readonly("config", [](const Engine& engine) { return engine.config(); })
      .def_property_readonly("units", [](const Engine& engine) { return engine.table().units(); })
      .def_property_readonly("learning_rate", &Engine::learning_rate)
      .def_property_readonly("loss_scale", &Engine::loss_scale)
      .def_property_readonly("updates", &Engine::updates)
      .def_property_readonly("skipped_updates", &Engine::skipped_updates)
      .def_property_readonly("micro_batches", &Engine::micro_batches);
}

}  // namespace poise::python

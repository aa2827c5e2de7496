// The ledger in Python: with-blocks that count, budgets, and figures as plain dicts.
#include <c10/util/Exception.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <array>
#include <exception>
#include <iterator>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <variant>
#include <vector>

#include "poise/error.h"
#include "poise/memory.h"

namespace py = pybind11;

namespace poise::python {
namespace {

using memory::Account;
using memory::AccountScope;
using memory::Ledger;
using memory::Snapshot;
using Budget = std::optional<std::variant<std::int64_t, std::string>>;

std::int64_t budget_bytes(const Budget& budget) {
  if (!budget) return 0;
  if (const auto* bytes = std::get_if<std::int64_t>(&*budget)) return *bytes;
  return memory::parse_bytes(std::get<std::string>(*budget));
}

Account account_of(const std::string& name) {
  std::string known;
  for (int i = 0; i < memory::kAccounts; ++i) {
    const auto account = static_cast<Account>(i);
    if (name == memory::name_of(account)) return account;
    known += join(i == 0 ? "" : ", ", memory::name_of(account));
  }
  fail("memory", "unknown account: ", name, "; use one of ", known);
}

std::map<std::string, std::int64_t> by_name(
    const std::array<std::int64_t, memory::kAccounts>& accounts) {
  std::map<std::string, std::int64_t> named;
  for (int i = 0; i < memory::kAccounts; ++i) {
    named[memory::name_of(static_cast<Account>(i))] = accounts[static_cast<std::size_t>(i)];
  }
  return named;
}

std::string describe(const Snapshot& snapshot) {
  return join("Snapshot(current ", memory::format_bytes(snapshot.current_bytes), ", peak ",
              memory::format_bytes(snapshot.peak_bytes), ')');
}

// A with-block around AccountScope. Scopes are a thread's own: a block is left by the thread that
// entered it. It may be entered again inside itself and by several threads (all under the GIL).
class ScopeBlock {
 public:
  ScopeBlock(std::shared_ptr<Ledger> ledger, Account account)
      : ledger_(std::move(ledger)), account_(account) {}

  void enter() {
    open_.emplace_back(std::this_thread::get_id(),
                       std::make_unique<AccountScope>(*ledger_, account_));
  }

  void exit() {
    for (auto entry = open_.rbegin(); entry != open_.rend(); ++entry) {
      if (entry->first != std::this_thread::get_id()) continue;
      open_.erase(std::next(entry).base());
      return;
    }
    fail("memory", "a with-block of account ", memory::name_of(account_),
         " is left by a thread that did not enter it; enter and leave it on the same thread");
  }

 private:
  std::shared_ptr<Ledger> ledger_;
  Account account_;
  std::vector<std::pair<std::thread::id, std::unique_ptr<AccountScope>>> open_;
};

// Ledger of Python: the books and the with-block of `other` around a stretch of a script.
struct PythonLedger {
  std::shared_ptr<Ledger> ledger = std::make_shared<Ledger>();
  ScopeBlock block{ledger, Account::other};
};

// pybind11 would make a RuntimeError of it; torch's own calls raise this type.
void translate_out_of_memory(std::exception_ptr error) {
  try {
    if (error) std::rethrow_exception(error);
  } catch (const c10::OutOfMemoryError& known) {
    PyErr_SetString(py::module_::import("torch").attr("OutOfMemoryError").ptr(),
                    known.what_without_backtrace());
  }
}

void bind_snapshot(py::module_& module) {
  py::class_<Snapshot>(module, "Snapshot",
                       "Bytes held now and at the peak, in total and by account.")
      .def_readonly("current_bytes", &Snapshot::current_bytes, "Bytes held now.")
      .def_readonly("peak_bytes", &Snapshot::peak_bytes, "Highest total since reset_peak().")
      .def_property_readonly(
          "current", [](const Snapshot& s) { return by_name(s.current); }, "By account, now.")
      .def_property_readonly(
          "at_peak", [](const Snapshot& s) { return by_name(s.at_peak); },
          "By account at the total peak; sums to peak_bytes.")
      .def_property_readonly(
          "own_peak", [](const Snapshot& s) { return by_name(s.own_peak); },
          "Each account's own highest.")
      .def("__repr__", &describe);
}

void bind_ledger(py::module_& module) {
  py::class_<ScopeBlock, std::shared_ptr<ScopeBlock>>(
      module, "AccountBlock", "A with-block whose allocations go to one account of a ledger.")
      .def("__enter__",
           [](py::object self) {
             self.cast<ScopeBlock&>().enter();
             return self;
           })
      .def("__exit__", [](ScopeBlock& block, const py::args&) { block.exit(); });

  py::class_<PythonLedger>(
      module, "Ledger",
      "Counts the CPU tensors that this thread makes inside `with ledger:`.\n\n"
      "budget: bytes, or a text such as \"64MiB\"; None means no limit. Above it\n"
      "an allocation raises torch.OutOfMemoryError and the process goes on.")
      .def(py::init([](const Budget& budget) {
             auto made = std::make_unique<PythonLedger>();
             made->ledger->set_budget(budget_bytes(budget));
             return made;
           }),
           py::arg("budget") = py::none())
      .def("__enter__",
           [](py::object self) {
             self.cast<PythonLedger&>().block.enter();
             return self;
           })
      .def("__exit__", [](PythonLedger& self, const py::args&) { self.block.exit(); })
      .def(
          "account",
          [](PythonLedger& self, const std::string& name) {
            return std::make_shared<ScopeBlock>(self.ledger, account_of(name));
          },
          py::arg("name"), "A with-block whose allocations go to this account.")
      .def(
          "snapshot", [](const PythonLedger& self) { return self.ledger->snapshot(); },
          "The figures of this moment.")
      .def(
          "reset_peak", [](PythonLedger& self) { self.ledger->reset_peak(); },
          "Peaks start anew from what is held.")
      .def(
          "make_default", [](PythonLedger& self) { self.ledger->make_default(); },
          "Threads outside any with-block count here too, under \"other\".")
      .def_property(
          "budget", [](const PythonLedger& self) { return self.ledger->budget(); },
          [](PythonLedger& self, const Budget& budget) {
            self.ledger->set_budget(budget_bytes(budget));
          },
          "Bytes, 0 for no limit; a text such as \"64MiB\" may be assigned.");
}

}  // namespace

void bind_memory(py::module_& module) {
  py::register_local_exception_translator(&translate_out_of_memory);
  bind_snapshot(module);
  bind_ledger(module);
  module.def("parse_bytes", &memory::parse_bytes, py::arg("text"),
             "\"20GiB\", \"1.5GB\" or \"1048576\" as a number of bytes.");
  module.def("format_bytes", &memory::format_bytes, py::arg("bytes"),
             "A number of bytes for people: \"1.50 GiB\".");
  module.def("cuda_snapshot", &memory::cuda_snapshot, py::arg("device") = 0,
             "A GPU's figures from torch's caching allocator, all under \"other\".");
  module.def("reset_cuda_peak", &memory::reset_cuda_peak, py::arg("device") = 0,
             "The GPU's peak starts anew.");
}

}  // namespace poise::python

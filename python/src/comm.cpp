// Groups of ranks in Python. Everything that waits for other ranks does so without the GIL.
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <chrono>
#include <cmath>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "poise/comm.h"
#include "poise/error.h"

namespace py = pybind11;

namespace poise::python {
namespace {

using comm::Group;
using GroupPtr = std::shared_ptr<Group>;
using WithoutGil = py::call_guard<py::gil_scoped_release>;

// A group waits for its threads when it goes, and the last to hold it may be Python or an engine.
GroupPtr dropped_without_gil(GroupPtr group) {
  Group* raw = group.get();
  return GroupPtr(raw, [group = std::move(group)](Group*) mutable {
    if (PyGILState_Check()) {
      const py::gil_scoped_release release;
      group.reset();
    } else {
      group.reset();
    }
  });
}

comm::Options options_of(double timeout) {
  if (!(timeout > 0) || timeout > 1e9) {
    fail("comm", "a timeout of ", timeout, " s; use a number of seconds above 0");
  }
  return {.timeout = std::chrono::milliseconds(std::llround(std::ceil(timeout * 1000)))};
}

GroupPtr from_process_group(c10::intrusive_ptr<::c10d::ProcessGroup> group,
                            const c10::Device& device, double timeout, std::vector<int> names,
                            bool owned) {
  auto options = options_of(timeout);
  options.names = std::move(names);
  options.owns_process_group = owned;
  return dropped_without_gil(
      comm::from_process_group(std::move(group), device, std::move(options)));
}

GroupPtr from_environment(double timeout) {
  return dropped_without_gil(comm::from_environment(options_of(timeout)));
}

// All ranks, the shard group, the replicas; null where there are none.
std::tuple<GroupPtr, GroupPtr, GroupPtr> ranks_from_environment(int shard_size, double timeout) {
  auto ranks = comm::ranks_from_environment(shard_size, options_of(timeout));
  const auto held = [](GroupPtr group) {
    return group ? dropped_without_gil(std::move(group)) : group;
  };
  return {held(std::move(ranks.all)), held(std::move(ranks.shard)), held(std::move(ranks.replica))};
}

std::vector<py::bytes> all_gather_bytes(Group& group, const py::bytes& data,
                                        const std::string& what) {
  const std::string mine = data;
  std::vector<std::string> all;
  {
    const py::gil_scoped_release release;
    all = group.all_gather_text(mine, what);
  }
  return {all.begin(), all.end()};
}

std::map<std::string, std::map<std::string, std::int64_t>> traffic_of(const Group& group) {
  const comm::Traffic traffic = group.traffic();
  std::map<std::string, std::map<std::string, std::int64_t>> named;
  for (int i = 0; i < comm::kKinds; ++i) {
    const auto kind = static_cast<std::size_t>(i);
    named[comm::name_of(static_cast<comm::Kind>(i))] = {{"calls", traffic.calls[kind]},
                                                        {"bytes", traffic.bytes[kind]}};
  }
  return named;
}

}  // namespace

void bind_comm(py::module_& module) {
  py::module_::import("torch.distributed");  // knows ProcessGroup

  py::class_<Group, GroupPtr>(
      module, "Group",
      "This rank's end of a group of ranks.\n\n"
      "A failure of any rank ends the group: what waits, and every later call,\n"
      "raises poise.Error with its message.")
      .def_property_readonly("rank", &Group::rank, "Of this process, from 0.")
      .def_property_readonly("size", &Group::size, "Number of ranks.")
      .def_property_readonly("device", &Group::device, "Where its tensors live.")
      .def_property_readonly("backend", &Group::backend,
                             "\"one rank\", \"gloo\", \"nccl\" or \"fake\".")
      .def("barrier", &Group::barrier, py::arg("what") = "barrier", WithoutGil(),
           "Returns when every rank has called it. `what` names it in errors.")
      .def("all_gather_text", &Group::all_gather_text, py::arg("text"), py::arg("what") = "text",
           WithoutGil(), "Each rank's text, by rank.")
      .def("all_gather_bytes", &all_gather_bytes, py::arg("data"), py::arg("what") = "bytes",
           "Each rank's bytes, by rank.")
      .def("leave_note", &Group::leave_note, py::arg("key"), py::arg("text"), WithoutGil(),
           "A short text for the other ranks, beside the collectives, at any time.")
      .def("note", &Group::note, py::arg("key"), WithoutGil(),
           "What a rank left under this key last; None: nothing yet.")
      .def("traffic", &traffic_of,
           "Calls and bytes sent in theory since the last reset_traffic(), by kind\n"
           "of collective.")
      .def("reset_traffic", &Group::reset_traffic, "Counts from zero.")
      .def("check", &Group::check, "Raises the group's failure, if there is one.")
      .def("abort", &Group::abort, py::arg("message"), WithoutGil(),
           "Ends the group on every rank with this message.");

  py::class_<comm::Place>(module, "Place", "What a launcher said of this process.")
      .def_readonly("rank", &comm::Place::rank)
      .def_readonly("size", &comm::Place::size)
      .def_readonly("local_rank", &comm::Place::local_rank)
      .def_readonly("address", &comm::Place::address)
      .def_readonly("port", &comm::Place::port)
      .def_readonly("store_runs", &comm::Place::store_runs);
  module.def("place_from_environment", &comm::place_from_environment,
             "What torchrun, Slurm or mpirun said; None: started by hand.");

  module.def("one_rank", &comm::one_rank, py::arg("device"), "A group of this process alone.");
  module.def("from_process_group", &from_process_group, py::arg("group"), py::arg("device"),
             py::arg("timeout"), py::arg("names") = std::vector<int>(), py::arg("owned") = false,
             WithoutGil(), "Around a process group of torch.distributed.");
  module.def("from_environment", &from_environment, py::arg("timeout"), WithoutGil(),
             "The group that torchrun, Slurm or mpirun started this process for.");
  module.def("ranks_from_environment", &ranks_from_environment, py::arg("shard_size"),
             py::arg("timeout"), WithoutGil(),
             "All of them, those that this one shards with, and its equals in the other groups.");
  module.def("fake_group", &comm::fake, py::arg("rank"), py::arg("size"), py::arg("device"),
             "A rank of a world that is not there.");
}

}  // namespace poise::python

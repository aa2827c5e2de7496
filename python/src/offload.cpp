// Stores of the offload room for Python: what `poise bench` measures, and tests reach.
#include "poise/offload.h"

#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <string>

#include "poise/error.h"

namespace py = pybind11;

namespace poise::python {
namespace {

using offload::Span;
using offload::SpanPtr;

// A file store with the memory of its buffers.
struct FileStore {
  std::shared_ptr<offload::HostMemory> memory;
  std::shared_ptr<offload::Store> store;

  FileStore(const std::string& directory, std::int64_t queue_depth, std::int64_t block_bytes,
            bool threads)
      : memory(std::make_shared<offload::HostMemory>(c10::Device(c10::kCPU), 0)) {
    config::OffloadPolicy policy;
    policy.directory = directory;
    policy.queue_depth = queue_depth;
    policy.block_bytes = block_bytes;
    policy.io = threads ? config::OffloadIo::threads : config::OffloadIo::automatic;
    store = offload::file_store(policy, memory);
  }
};

void check(const Span& span, std::int64_t begin, const at::Tensor& tensor) {
  if (!tensor.is_contiguous() || tensor.scalar_type() != span.dtype() || !tensor.is_cpu() ||
      begin < 0 || begin + tensor.numel() > span.numel()) {
    fail("offload", "elements from ", begin, " on of a span of ", span.numel(), " ", span.dtype(),
         " go by contiguous CPU tensors of that type that end inside it; this one is ",
         tensor.sizes(), " ", tensor.scalar_type());
  }
}

}  // namespace

void bind_offload(py::module_& module) {
  const py::call_guard<py::gil_scoped_release> without_gil;
  py::class_<Event>(module, "OffloadTransfer", "A put or fetch on its way.")
      .def("wait", &Event::synchronize, without_gil, "Raises what failed.");
  py::class_<Span, SpanPtr>(module, "OffloadSpan", "Elements in a store, one-dimensional.")
      .def(
          "fetch",
          [](Span& span, std::int64_t begin, const at::Tensor& to) {
            check(span, begin, to);
            return span.fetch(begin, to);
          },
          py::arg("begin"), py::arg("to"), without_gil,
          "Elements from `begin` on, on their way into a tensor that nobody touches meanwhile.")
      .def(
          "put",
          [](Span& span, std::int64_t begin, const at::Tensor& from) {
            check(span, begin, from);
            return span.put(begin, from);
          },
          py::arg("begin"), py::arg("values"), without_gil, "The other way.");
  py::class_<FileStore>(module, "FileStore", "Spans in a file without a name.")
      .def(py::init<const std::string&, std::int64_t, std::int64_t, bool>(), py::arg("directory"),
           py::arg("queue_depth") = 8, py::arg("block_bytes") = 1 << 20, py::arg("threads") = false)
      .def(
          "reserve",
          [](FileStore& self, std::int64_t numel, at::ScalarType dtype) {
            if (numel < 0) fail("offload", "a span of ", numel, " elements; give 0 or more");
            return self.store->reserve(numel, dtype);
          },
          py::arg("numel"), py::arg("dtype"), without_gil)
      .def_property_readonly("file_bytes",
                             [](const FileStore& self) { return self.store->file_bytes(); })
      .def_property_readonly("host_bytes",
                             [](const FileStore& self) { return self.memory->bytes(); });
}

}  // namespace poise::python

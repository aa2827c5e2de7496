// The data room in Python: permutation, sampler, byte corpus and window loader. poise/data.py makes
// torch Samplers and Datasets of them.
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "poise/data.h"

namespace py = pybind11;

namespace poise::python {
namespace {

using ReleaseGil = py::call_guard<py::gil_scoped_release>;

data::Element element_of(const std::string& name) {
  if (name == "byte") return data::Element::byte;
  if (name == "uint16") return data::Element::uint16;
  if (name == "uint32") return data::Element::uint32;
  fail("data", "unknown element type: ", name, "; use byte, uint16 or uint32");
}

data::SamplerOptions sampler_options(std::uint64_t seed, bool shuffle, bool run_on,
                                     std::int64_t ranks, std::int64_t rank) {
  return {.seed = seed,
          .order = shuffle ? data::Order::shuffled : data::Order::sequential,
          .tail = run_on ? data::Tail::next_epoch : data::Tail::short_window,
          .ranks = ranks,
          .rank = rank};
}

void bind_order(py::module_& module) {
  py::class_<data::Permutation>(module, "Permutation",
                                "Pseudo-random permutation of range(n), any position read alone.")
      .def(py::init<std::int64_t, std::uint64_t, std::uint64_t>(), py::arg("n"), py::arg("seed"),
           py::arg("epoch") = 0)
      .def("__len__", &data::Permutation::size)
      .def("__call__", &data::Permutation::operator(), py::arg("position"));

  py::class_<data::Sampler>(module, "Sampler",
                            "Sample indices of a rank for the window at a global sample index.")
      .def(py::init([](std::int64_t n, std::uint64_t seed, bool shuffle, bool run_on,
                       std::int64_t ranks, std::int64_t rank) {
             return data::Sampler(n, sampler_options(seed, shuffle, run_on, ranks, rank));
           }),
           py::arg("n"), py::kw_only(), py::arg("seed") = 42, py::arg("shuffle") = true,
           py::arg("run_on") = false, py::arg("ranks") = 1, py::arg("rank") = 0)
      .def("indices", &data::Sampler::indices, py::arg("cursor"), py::arg("count"), ReleaseGil())
      .def("advance", &data::Sampler::advance, py::arg("cursor"), py::arg("count"))
      .def("__len__", &data::Sampler::size);
}

using TensorPair = std::pair<at::Tensor, at::Tensor>;

void bind_corpus(py::module_& module) {
  using Corpus = data::ByteCorpus;
  py::class_<Corpus, std::shared_ptr<Corpus>>(module, "ByteCorpus",
                                              "Files read as one row of bytes or tokens, mapped.")
      .def(py::init([](std::vector<std::string> paths, std::int64_t sequence_length,
                       std::string suffix, const std::string& element) {
             const data::CorpusOptions options{.paths = std::move(paths),
                                               .suffix = std::move(suffix),
                                               .sequence_length = sequence_length,
                                               .element = element_of(element)};
             py::gil_scoped_release unlocked;
             return std::make_shared<Corpus>(options);
           }),
           py::arg("paths"), py::arg("sequence_length"), py::arg("suffix") = "",
           py::arg("element") = "byte")
      .def("__len__", &Corpus::size)
      .def_property_readonly("elements", &Corpus::elements)
      .def_property_readonly("files", &Corpus::files)
      .def_property_readonly("sequence_length", &Corpus::sequence_length)
      .def(
          "sample",
          [](const Corpus& self, std::int64_t i) {
            auto sample = self.sample(i);
            return TensorPair(std::move(sample.input), std::move(sample.target));
          },
          py::arg("index"), ReleaseGil())
      .def(
          "batch",
          [](const Corpus& self, const std::vector<std::int64_t>& indices) {
            auto batch = self.batch(indices);
            return TensorPair(std::move(batch.inputs), std::move(batch.targets));
          },
          py::arg("indices"), ReleaseGil())
      .def(
          "split",
          [](const Corpus& self, double fraction) {
            auto parts = self.split(fraction);
            return std::pair(std::make_shared<Corpus>(std::move(parts.train)),
                             std::make_shared<Corpus>(std::move(parts.validation)));
          },
          py::arg("fraction"));
}

void bind_loader(py::module_& module) {
  using Loader = data::WindowLoader;
  py::class_<Loader>(module, "WindowLoader", "Windows of a corpus, read ahead on a C++ thread.")
      .def(py::init([](std::shared_ptr<data::ByteCorpus> corpus, std::int64_t micro_batch_size,
                       std::int64_t accumulation, std::uint64_t seed, bool shuffle, bool run_on,
                       std::int64_t epochs, std::int64_t prefetch, std::int64_t ranks,
                       std::int64_t rank) {
             return std::make_unique<Loader>(
                 std::move(corpus), sampler_options(seed, shuffle, run_on, ranks, rank),
                 data::WindowOptions{.micro_batch_size = micro_batch_size,
                                     .accumulation = accumulation,
                                     .prefetch = prefetch,
                                     .epochs = epochs});
           }),
           py::arg("corpus"), py::arg("micro_batch_size"), py::arg("accumulation") = 1,
           py::kw_only(), py::arg("seed") = 42, py::arg("shuffle") = true,
           py::arg("run_on") = false, py::arg("epochs") = 0, py::arg("prefetch") = 2,
           py::arg("ranks") = 1, py::arg("rank") = 0)
      .def("__iter__", [](py::object self) { return self; })
      .def("__next__",
           [](Loader& self) {
             std::optional<std::vector<data::Batch>> window;
             {
               py::gil_scoped_release unlocked;
               window = self.next();
             }
             if (!window) throw py::stop_iteration();
             std::vector<TensorPair> pairs;
             for (auto& batch : *window) pairs.emplace_back(batch.inputs, batch.targets);
             return pairs;
           })
      .def_property_readonly("cursor", &Loader::cursor)
      .def_property_readonly("window_samples", &Loader::window_samples)
      .def("set_accumulation", &Loader::set_accumulation, py::arg("micro_batches"), ReleaseGil())
      .def("seek", &Loader::seek, py::arg("cursor"), ReleaseGil());
}

}  // namespace

void bind_data(py::module_& module) {
  bind_order(module);
  bind_corpus(module);
  bind_loader(module);
}

}  // namespace poise::python

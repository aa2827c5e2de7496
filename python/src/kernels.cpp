// The optimizer stage as the engine runs it, and its yardstick, on plain tensors: for poise.bench.
#include <ATen/core/Tensor.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <string>
#include <vector>

#include "kernels/adamw.h"
#include "kernels/isa.h"
#include "kernels/norm.h"
#include "kernels/stream.h"
#include "poise/error.h"
#include "src/core/launch.h"

namespace py = pybind11;

namespace poise::python {
namespace {

struct Settings {
  double lr, beta1, beta2, eps, weight_decay, max_norm;
};

// Fp32 flats on the CPU, of one length; the low-precision copy is optional.
struct Flats {
  at::Tensor master, gradient, moment1, moment2;
  std::optional<at::Tensor> low;

  kernels::AdamArrays arrays() const {
    for (const at::Tensor& tensor : {master, gradient, moment1, moment2}) {
      if (!tensor.is_cpu() || tensor.scalar_type() != at::kFloat || !tensor.is_contiguous() ||
          tensor.numel() != master.numel()) {
        fail("kernels", "flats of the benchmark are contiguous float32 CPU tensors of one length");
      }
    }
    kernels::AdamArrays arrays;
    arrays.master = master.data_ptr<float>();
    arrays.gradient = gradient.const_data_ptr<float>();
    arrays.moment1 = moment1.data_ptr<float>();
    arrays.moment2 = moment2.data_ptr<float>();
    if (low && low->numel() != master.numel()) fail("kernels", "low is of another length");
    if (low) arrays.low = low->data_ptr();
    if (low) arrays.low_dtype = kernel_dtype(low->scalar_type());
    return arrays;
  }
};

std::vector<kernels::AdamSegment> segments_of(const at::Tensor& ranges, const Settings& settings) {
  std::vector<kernels::AdamSegment> segments;
  const auto* data = ranges.const_data_ptr<std::int64_t>();
  for (std::int64_t i = 0; i < ranges.numel(); i += 2) {
    segments.push_back({data[i], data[i + 1], settings.lr, settings.weight_decay});
  }
  return segments;
}

// Stops 8 to 10 of one update; returns the norm. Nothing is written where it is not finite.
double optimizer_stage(const Flats& flats, const at::Tensor& ranges, const Settings& settings,
                       double scale, std::int64_t step) {
  const kernels::AdamArrays arrays = flats.arrays();
  const kernels::Launch launch = launch_for(flats.master.device());
  const kernels::Piece whole{0, flats.master.numel()};
  double sum = 0;
  kernels::squared_norms(launch, kernels::DType::f32, arrays.gradient, &whole, 1, &sum);
  const double norm = std::sqrt(sum) / scale;
  if (!std::isfinite(norm)) return norm;
  kernels::AdamSettings adam;
  adam.beta1 = settings.beta1;
  adam.beta2 = settings.beta2;
  adam.eps = settings.eps;
  adam.step = step;
  adam.factor = std::min(1.0, settings.max_norm / (norm + 1e-6)) / scale;
  const auto segments = segments_of(ranges, settings);
  kernels::adamw(launch, arrays, segments.data(), static_cast<std::int64_t>(segments.size()), adam);
  return norm;
}

// The same reads and writes without the arithmetic.
std::uint32_t stream_pass(const Flats& flats) {
  if (!flats.low) fail("kernels", "the stream pass writes a low-precision copy: give one");
  const kernels::AdamArrays arrays = flats.arrays();
  const kernels::Launch launch = launch_for(flats.master.device());
  const std::uint32_t bits =
      kernels::stream_read(launch, flats.gradient.const_data_ptr<float>(), flats.master.numel());
  kernels::stream_update(launch, arrays, flats.master.numel());
  return bits;
}

}  // namespace

void bind_kernels(py::module_& module) {
  py::class_<Flats>(module, "OptimizerFlats")
      .def(py::init([](at::Tensor master, at::Tensor gradient, at::Tensor moment1,
                       at::Tensor moment2, std::optional<at::Tensor> low) {
             return Flats{master, gradient, moment1, moment2, low};
           }),
           py::arg("master"), py::arg("gradient"), py::arg("moment1"), py::arg("moment2"),
           py::arg("low") = py::none());
  module.def(
      "optimizer_stage",
      [](const Flats& flats, const at::Tensor& ranges, std::int64_t step, double lr, double beta1,
         double beta2, double eps, double weight_decay, double max_norm, double scale) {
        return optimizer_stage(flats, ranges, {lr, beta1, beta2, eps, weight_decay, max_norm},
                               scale, step);
      },
      py::arg("flats"), py::arg("ranges"), py::arg("step"), py::arg("lr"), py::arg("beta1"),
      py::arg("beta2"), py::arg("eps"), py::arg("weight_decay"), py::arg("max_norm"),
      py::arg("scale") = 1.0, py::call_guard<py::gil_scoped_release>(),
      "Norm, finite check, clip and AdamW over the segments [begin, end) in the rows of `ranges` "
      "(int64, n x 2); returns the norm.");
  module.def("stream_pass", &stream_pass, py::arg("flats"),
             py::call_guard<py::gil_scoped_release>(),
             "The memory traffic of optimizer_stage without its arithmetic.");
  module.def(
      "cpu_isa", [] { return std::string(kernels::name_of(kernels::active_isa())); },
      "Instruction set of the CPU kernels (POISE_CPU_ISA forces one).");
}

}  // namespace poise::python

// Stands in for kernels/cuda/ in the variant of libpoise that runs on the pretend GPU: each kernel
// is queued on its stream and then runs the loop of the CPU, over memory of the device.
//
// Everything here is what a GPU is told at a launch: settings and segments by value, arrays as
// addresses, which must be those of the stream's device or of pinned memory.
#include <cuda_runtime_api.h>

#include <initializer_list>
#include <vector>

#include "kernels/backends.h"
#include "poise/error.h"
#include "pretend_gpu.h"

namespace poise::kernels::cuda {
namespace {

void check_address(const void* address) {
  const int device = pretend_gpu::device_of(address);
  if (address == nullptr || device == pretend_gpu::current_device()) return;
  if (device == pretend_gpu::kHost && pretend_gpu::is_pinned(address)) return;
  fail("pretend GPU", "a kernel on device ", pretend_gpu::current_device(), " was given memory of ",
       device == pretend_gpu::kHost ? "the host" : "another device");
}

// kernel(how to launch the CPU's one), in stream order.
template <class Kernel>
void launch_on(const Launch& launch, std::initializer_list<const void*> addresses, Kernel kernel) {
  for (const void* address : addresses) check_address(address);
  const auto status = pretend_gpu::launch(static_cast<cudaStream_t>(launch.stream),
                                          [kernel = std::move(kernel)] { kernel(Launch{}); });
  if (status != cudaSuccess) fail("pretend GPU", "a launch on a stream of another device");
}

template <class Segment>
std::vector<Segment> copied(const Segment* segments, std::int64_t count) {
  return {segments, segments + count};
}
template <class Segment>
std::int64_t count_of(const std::vector<Segment>& segments) {
  return static_cast<std::int64_t>(segments.size());
}

}  // namespace

DeviceScope::DeviceScope(int device) {
  cudaGetDevice(&previous_);
  cudaSetDevice(device);
}
DeviceScope::~DeviceScope() { cudaSetDevice(previous_); }

void squared_norms(const Launch& launch, DType dtype, const void* base, const Piece* pieces,
                   std::int64_t num_pieces, double* out) {
  launch_on(launch, {base, out}, [=, held = copied(pieces, num_pieces)](const Launch& on_cpu) {
    cpu::squared_norms(on_cpu, dtype, base, held.data(), count_of(held), out);
  });
}

void accumulate(const Launch& launch, Accumulate mode, float* accumulator, DType gradient_dtype,
                const void* gradient, std::int64_t numel, float weight, double* sum_of_squares) {
  launch_on(launch, {accumulator, gradient, sum_of_squares}, [=](const Launch& on_cpu) {
    cpu::accumulate(on_cpu, mode, accumulator, gradient_dtype, gradient, numel, weight,
                    sum_of_squares);
  });
}

void adamw(const Launch& launch, const AdamArrays& arrays, const AdamSegment* segments,
           std::int64_t num_segments, const AdamSettings& settings) {
  launch_on(launch, {arrays.master, arrays.low, arrays.gradient, arrays.moment1, arrays.moment2},
            [=, held = copied(segments, num_segments)](const Launch& on_cpu) {
              cpu::adamw(on_cpu, arrays, held.data(), count_of(held), settings);
            });
}

void adamw_bf16(const Launch& launch, const AdamBf16Arrays& arrays, const RoundedSegment* segments,
                std::int64_t num_segments, const AdamSettings& settings) {
  launch_on(launch, {arrays.master, arrays.low, arrays.gradient, arrays.moment1, arrays.moment2},
            [=, held = copied(segments, num_segments)](const Launch& on_cpu) {
              cpu::adamw_bf16(on_cpu, arrays, held.data(), count_of(held), settings);
            });
}

void adamw_8bit(const Launch& launch, const Adam8BitArrays& arrays, const RoundedSegment* segments,
                std::int64_t num_segments, const AdamSettings& settings) {
  launch_on(launch,
            {arrays.master, arrays.low, arrays.gradient, arrays.code1, arrays.scale1, arrays.code2,
             arrays.scale2},
            [=, held = copied(segments, num_segments)](const Launch& on_cpu) {
              cpu::adamw_8bit(on_cpu, arrays, held.data(), count_of(held), settings);
            });
}

void factor_sums(const Launch& launch, const FactoredArrays& arrays,
                 const FactoredSegment* segments, std::int64_t num_segments, double factor,
                 double* sums) {
  launch_on(launch, {arrays.gradient, sums},
            [=, held = copied(segments, num_segments)](const Launch& on_cpu) {
              cpu::factor_sums(on_cpu, arrays, held.data(), count_of(held), factor, sums);
            });
}

void factored_squares(const Launch& launch, const FactoredArrays& arrays,
                      const FactoredSegment* segments, std::int64_t num_segments, double factor,
                      double* squares) {
  launch_on(launch, {arrays.gradient, arrays.factors, squares},
            [=, held = copied(segments, num_segments)](const Launch& on_cpu) {
              cpu::factored_squares(on_cpu, arrays, held.data(), count_of(held), factor, squares);
            });
}

void adafactor(const Launch& launch, const FactoredArrays& arrays, const FactoredSegment* segments,
               std::int64_t num_segments, double factor) {
  launch_on(launch, {arrays.master, arrays.low, arrays.gradient, arrays.factors},
            [=, held = copied(segments, num_segments)](const Launch& on_cpu) {
              cpu::adafactor(on_cpu, arrays, held.data(), count_of(held), factor);
            });
}

void lamb_squares(const Launch& launch, const AdamArrays& arrays, const LambSegment* segments,
                  std::int64_t num_segments, const AdamSettings& settings, double* squares) {
  launch_on(launch,
            {arrays.master, arrays.low, arrays.gradient, arrays.moment1, arrays.moment2, squares},
            [=, held = copied(segments, num_segments)](const Launch& on_cpu) {
              cpu::lamb_squares(on_cpu, arrays, held.data(), count_of(held), settings, squares);
            });
}

void lamb(const Launch& launch, const AdamArrays& arrays, const LambSegment* segments,
          std::int64_t num_segments, const AdamSettings& settings) {
  launch_on(launch, {arrays.master, arrays.low, arrays.gradient, arrays.moment1, arrays.moment2},
            [=, held = copied(segments, num_segments)](const Launch& on_cpu) {
              cpu::lamb(on_cpu, arrays, held.data(), count_of(held), settings);
            });
}

void lars(const Launch& launch, const LarsArrays& arrays, const LarsSegment* segments,
          std::int64_t num_segments, const LarsSettings& settings) {
  launch_on(launch, {arrays.master, arrays.low, arrays.gradient, arrays.momentum},
            [=, held = copied(segments, num_segments)](const Launch& on_cpu) {
              cpu::lars(on_cpu, arrays, held.data(), count_of(held), settings);
            });
}

void lion(const Launch& launch, const LionArrays& arrays, const LionSegment* segments,
          std::int64_t num_segments, const LionSettings& settings) {
  launch_on(launch, {arrays.master, arrays.low, arrays.gradient, arrays.momentum},
            [=, held = copied(segments, num_segments)](const Launch& on_cpu) {
              cpu::lion(on_cpu, arrays, held.data(), count_of(held), settings);
            });
}

void lion_8bit(const Launch& launch, const Lion8BitArrays& arrays, const RoundedSegment* segments,
               std::int64_t num_segments, const LionSettings& settings) {
  launch_on(launch, {arrays.master, arrays.low, arrays.gradient, arrays.code, arrays.scale},
            [=, held = copied(segments, num_segments)](const Launch& on_cpu) {
              cpu::lion_8bit(on_cpu, arrays, held.data(), count_of(held), settings);
            });
}

void sgd(const Launch& launch, const SgdArrays& arrays, const SgdSegment* segments,
         std::int64_t num_segments, const SgdSettings& settings) {
  launch_on(launch, {arrays.master, arrays.low, arrays.gradient, arrays.momentum},
            [=, held = copied(segments, num_segments)](const Launch& on_cpu) {
              cpu::sgd(on_cpu, arrays, held.data(), count_of(held), settings);
            });
}

void pack(const Launch& launch, DType source_dtype, DType target_dtype, const PackPiece* pieces,
          std::int64_t num_pieces, float scale) {
  for (std::int64_t p = 0; p < num_pieces; ++p) {
    check_address(pieces[p].source);
    check_address(pieces[p].target);
  }
  launch_on(launch, {}, [=, held = copied(pieces, num_pieces)](const Launch& on_cpu) {
    cpu::pack(on_cpu, source_dtype, target_dtype, held.data(), count_of(held), scale);
  });
}

}  // namespace poise::kernels::cuda

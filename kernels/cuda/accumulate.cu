// Weighted accumulation on the GPU.
#include "kernels/cuda/launch.h"

namespace poise::kernels::cuda {
namespace {

// Returns the new value, for the folded norm.
template <class Element>
struct AddWeighted {
  float* accumulator;
  const Element* gradient;
  float weight;
  bool add;
  __device__ float operator()(std::int64_t, std::int64_t index) const {
    const float old = add ? accumulator[index] : 0.0f;
    const float next = accumulate_body(old, to_float(gradient[index]), weight);
    accumulator[index] = next;
    return next;
  }
};

}  // namespace

void accumulate(const Launch& launch, Accumulate mode, float* accumulator, DType gradient_dtype,
                const void* gradient, std::int64_t numel, float weight, double* sum_of_squares) {
  const ChunkMap chunks(1, [&](std::int64_t) { return numel; });
  const DeviceMap<> map(launch, chunks);
  with_element(gradient_dtype, [&](auto element) {
    using Element = decltype(element);
    const AddWeighted<Element> body{accumulator, static_cast<const Element*>(gradient), weight,
                                    mode == Accumulate::add};
    if (sum_of_squares != nullptr) {
      run_each_lane(launch, map.spans(), body, sum_of_squares, "accumulate");
    } else {
      run_each_element(launch, map.spans(), body, "accumulate");
    }
  });
}

}  // namespace poise::kernels::cuda

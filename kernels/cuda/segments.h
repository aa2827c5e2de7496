// How an optimizer walks its segments on the GPU: settings rounded on the host, so that both sides
// use the same bits, one thread for each element of each segment.
#pragma once

#include "kernels/cuda/launch.h"

namespace poise::kernels::cuda {

// A segment of a flat as a kernel sees it.
template <class Constants>
struct Prepared {
  std::int64_t begin;
  Constants constants;
};

// A body's way to its element and settings.
template <class Constants>
struct Segments {
  const Prepared<Constants>* data;

  __device__ std::int64_t element(std::int64_t segment, std::int64_t offset) const {
    return data[segment].begin + offset;
  }
  __device__ const Constants& constants(std::int64_t segment) const {
    return data[segment].constants;
  }
};

// The segments on the device, in stream order, with the chunks they are walked in.
// constants_of(segment) gives the settings of one.
template <class Constants>
class DeviceSegments {
 public:
  template <class Segment, class ConstantsOf>
  DeviceSegments(const Launch& launch, const Segment* segments, std::int64_t num_segments,
                 ConstantsOf constants_of)
      : launch_(launch),
        map_(launch,
             ChunkMap(num_segments,
                      [&](std::int64_t s) { return segments[s].end - segments[s].begin; }),
             prepare(segments, num_segments, constants_of).data()) {}

  // body(segment, offset) once for every element of every segment.
  template <class Body>
  void run(Body body, const char* name) const {
    run_each_element(launch_, map_.spans(), body, name);
  }
  // out[s] = the square sum of what body(segment, offset) returns for the elements of segment s.
  template <class Body>
  void sum(Body body, double* out, const char* name) const {
    run_each_lane(launch_, map_.spans(), body, out, name);
  }
  const Spans& spans() const { return map_.spans(); }
  Segments<Constants> view() const { return {map_.rows()}; }

 private:
  template <class Segment, class ConstantsOf>
  static std::vector<Prepared<Constants>> prepare(const Segment* segments,
                                                  std::int64_t num_segments,
                                                  ConstantsOf constants_of) {
    std::vector<Prepared<Constants>> prepared;
    prepared.reserve(static_cast<std::size_t>(num_segments));
    for (std::int64_t s = 0; s < num_segments; ++s) {
      prepared.push_back({segments[s].begin, constants_of(segments[s])});
    }
    return prepared;
  }

  const Launch& launch_;
  DeviceMap<Prepared<Constants>> map_;
};

}  // namespace poise::kernels::cuda

// The generators of torch that a training draws from: the CPU's and, on a GPU, that device's.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <vector>

#include "state/contents.h"

namespace poise::state {

// Where they are now: pieces of kind kRandom, named by their device.
std::vector<Piece> random_states(c10::Device device);
void set_random_state(c10::Device device, const at::Tensor& values);

// The devices that have one, and what they are called.
std::vector<c10::Device> generators_of(c10::Device device);
std::string generator_name(c10::Device device);

// What runs while it lives draws as it likes: the generators go back to where they were.
class RandomUntouched {
 public:
  explicit RandomUntouched(c10::Device device) : device_(device), states_(random_states(device)) {}
  ~RandomUntouched();
  RandomUntouched(const RandomUntouched&) = delete;
  RandomUntouched& operator=(const RandomUntouched&) = delete;

 private:
  const c10::Device device_;
  const std::vector<Piece> states_;
};

// Begins anew, where another number of ranks saved: nobody goes on where a rank was, and nobody
// draws again what was drawn.
void seed_anew(c10::Device device, std::uint64_t seed, int rank, std::int64_t updates);

}  // namespace poise::state

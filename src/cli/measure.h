// What `poise doctor` measures: bandwidths, and how slow 16-bit matrices are here.
#pragma once

#include <c10/core/ScalarType.h>

#include <string>

#include "poise/comm.h"

namespace poise::cli {

// Gigabytes per second that a copy reads and writes, on so many threads of torch.
double copy_rate(int threads);

// Seconds of a product of two 512 x 512 matrices.
double product_seconds(c10::ScalarType dtype);

// Gigabytes per second of gradient or parameter that a collective of 16 MiB gets through, the same
// on all ranks of the group. All ranks.
struct GroupRates {
  double reduce_scatter = 0;
  double all_gather = 0;
};
GroupRates group_rates(comm::Group& group);

// Whether the kernel lets this process make an io_uring; else why not.
std::string io_uring();

}  // namespace poise::cli

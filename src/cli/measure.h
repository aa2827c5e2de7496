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

// What training on the CPU reaches here, from forward and backward of a small transformer at four
// micro-batches: seconds = links x overhead + FLOPs / rate.
struct CpuRates {
  double float_flops = 0, half_flops = 0;  // a second; half: by the ratio of bf16 matrix products
  double memory_rate = 0;                  // bytes a second
  double overhead = 0;                     // seconds of an embedding, block or head
};
CpuRates measure_cpu();

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

// What `poise doctor` and `poise plan --calibrate` measure: bandwidths, and what matrices reach.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <string>

#include "poise/comm.h"

namespace poise::cli {

// Gigabytes per second that a copy reads and writes, on so many threads of torch.
double copy_rate(int threads);

// Seconds of a product of two 512 x 512 matrices.
double product_seconds(c10::ScalarType dtype);

// What training reaches on a device, from forward and backward of a small transformer at four
// micro-batches: seconds = links x overhead + FLOPs / rate.
struct DeviceRates {
  double float_flops = 0, half_flops = 0;  // a second
  double memory_rate = 0;                  // bytes a second that a copy reads and writes
  double overhead = 0;                     // seconds of an embedding, block or head
};
DeviceRates measure_cpu();  // half_flops by the ratio of bf16 matrix products
// The first GPU, in fp16 and fp32; throws Error where torch sees none.
DeviceRates measure_gpu();
// Bytes a second that a copy in memory of the first GPU reads and writes.
double gpu_copy_rate();
// Bytes a second from pinned memory of the host to the first GPU, and from it to the second; the
// latter 0 where there is one.
double host_rate();
double peer_rate();
// Of the first GPU, with what other processes hold.
std::int64_t gpu_memory();

// Bytes a second that a file store in `folder` writes, and reads; throws Error where it has no
// room.
double file_rate(const std::string& folder);

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

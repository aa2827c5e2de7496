// Flat tensors as collectives see them: copied and compared by address, without touching version
// counters (what poise writes is no edit by the user).
#pragma once

#include <ATen/core/Tensor.h>

namespace poise::comm {

enum class Overlap { none, same, partly };
Overlap overlap_of(const at::Tensor& a, const at::Tensor& b);

// Piece `rank` of `size` equal ones.
at::Tensor piece_of(const at::Tensor& whole, int rank, int size);

// Segment `rank` of `size`, as equal as they can be.
at::Tensor segment_of(const at::Tensor& whole, int rank, int size);

// All of it, as kByte.
at::Tensor bytes_of(const at::Tensor& flat);

// Equal bytes, or the same memory (then nothing happens). On CUDA on the current stream.
void copy_flat(const at::Tensor& target, const at::Tensor& source);

// The same with a cast between fp32, bf16 and fp16.
void cast_flat(const at::Tensor& target, const at::Tensor& source);

}  // namespace poise::comm

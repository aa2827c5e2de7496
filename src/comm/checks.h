// What every collective asks of its tensors; throws Error naming what it got.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "comm/backend.h"

namespace poise::comm {

// Contiguous, 1-D, on `device`. `role` is the tensor's name in errors.
void check_flat(const Call& call, const char* role, const at::Tensor& tensor, c10::Device device);

// `whole` is `size` pieces of the length of `mine`; where the two share memory, `mine` is piece
// `rank`.
void check_pieces(const Call& call, const at::Tensor& whole, const at::Tensor& mine, int rank,
                  int size);

void check_reducible(const Call& call, const at::Tensor& mine, const at::Tensor& whole);
void check_summable(const Call& call, const at::Tensor& values);
void check_exchange(const Call& call, const at::Tensor& received, const at::Tensor& sent, int size);

}  // namespace poise::comm

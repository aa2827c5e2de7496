// Norms of whole parameters, for optimizers that scale a parameter's step by them.
#pragma once

#include <functional>
#include <vector>

#include "poise/optim.h"

namespace poise::optim {

// Square sums of the pieces of a span, as sums of a round: `count` numbers for each parameter.
// fill[k](out): the k-th of each segment, doubles on the span's device.
at::Tensor squares_of(const Span& span, const std::vector<std::function<void(double* out)>>& fill);

// The k-th norm of each parameter, from the sums that squares_of() gave with `count` fills.
std::vector<double> norms_of(const at::Tensor& sums, std::size_t k, std::size_t count);

// Square sums of the masters of each segment, and of its gradients as they are.
void weight_squares(const Span& span, double* out);
void gradient_squares(const Span& span, double* out);

}  // namespace poise::optim

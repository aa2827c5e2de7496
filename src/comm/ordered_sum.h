// The sum over ranks, in the order of ranks: what makes reductions on the CPU the same bits in
// every kind of group, on every run.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <vector>

namespace poise::comm {

// target[i] = ((float(rows[0][i]) + float(rows[1][i])) + ...), each addition rounded to fp32.
// dtype: fp32, bf16 or fp16. target may be one of the rows. Runs on the calling thread, allocates
// no memory that grows with numel.
void ordered_sum(float* target, c10::ScalarType dtype, const std::vector<const void*>& rows,
                 std::int64_t numel);

// The same in fp64.
void ordered_sum(double* target, const std::vector<const void*>& rows, std::int64_t numel);

// The same into a flat tensor; rows of fp64 where `dtype` and `target` are.
void sum_rows(const at::Tensor& target, c10::ScalarType dtype,
              const std::vector<const void*>& rows);

}  // namespace poise::comm

// Adafactor over one chunk: by runs of elements that lie side by side in memory.
#include "kernels/adafactor.h"

#include "kernels/chunks.h"
#include "kernels/cpu/copy_low.h"

namespace poise::kernels::cpu::POISE_ISA {
namespace {

// use(element of the chunk, elements of the run, run) for the runs of a chunk.
template <class Use>
POISE_BODY void each_run(const FactorLayout& layout, std::int64_t place, std::int64_t count,
                         Use use) {
  for (std::int64_t done = 0; done < count;) {
    const FactorRun run = run_at(layout, place + done);
    const std::int64_t left = count - done, length = run.left < left ? run.left : left;
    use(done, length, run);
    done += length;
  }
}

template <class Gradient>
void step_run(float* __restrict step, const Gradient* __restrict gradient,
              const float* __restrict factors, std::int64_t count, FactorRun run,
              FactoredConstants constants) {
  if (!constants.has_columns) {
    for (std::int64_t i = 0; i < count; ++i) {
      step[i] = factored_step(to_float(gradient[i]), factors[run.row + i * run.row_step], 1.0f,
                              constants);
    }
  } else if (run.row_step == 0 && run.column_step == 1) {  // rows lie in memory one by one
    const float row = factors[run.row];
    const float* __restrict columns = factors + run.column;
    for (std::int64_t i = 0; i < count; ++i) {
      step[i] = factored_step(to_float(gradient[i]), row, columns[i], constants);
    }
  } else {
    for (std::int64_t i = 0; i < count; ++i) {
      step[i] = factored_step(to_float(gradient[i]), factors[run.row + i * run.row_step],
                              factors[run.column + i * run.column_step], constants);
    }
  }
}

// The steps of a chunk of at most kChunk elements.
template <class Gradient>
void steps_of(float* step, const Gradient* gradient, const float* factors,
              const FactorLayout& layout, std::int64_t place, std::int64_t count,
              const FactoredConstants& constants) {
  each_run(layout, place, count, [&](std::int64_t at, std::int64_t length, const FactorRun& run) {
    step_run(step + at, gradient + at, factors, length, run, constants);
  });
}

template <class Gradient>
void sum_run(double* rows, double* columns, const Gradient* __restrict gradient, std::int64_t count,
             FactorRun run, float factor, bool has_columns) {
  for (std::int64_t i = 0; i < count; ++i) {
    const double square = square_body(to_float(gradient[i]) * factor);
    rows[i * run.row_step] += square;
    if (has_columns) columns[i * run.column_step] += square;
  }
}

}  // namespace

void factor_sum(const FactoredArrays& arrays, const FactorLayout& layout, std::int64_t begin,
                std::int64_t place, std::int64_t count, const FactoredConstants& constants,
                double* rows, double* columns) {
  with_element(arrays.gradient_dtype, [&](auto element) {
    using Gradient = decltype(element);
    const auto* gradient = static_cast<const Gradient*>(arrays.gradient) + begin;
    each_run(layout, place, count, [&](std::int64_t at, std::int64_t length, const FactorRun& run) {
      sum_run(rows + (run.row - layout.rows),
              constants.has_columns ? columns + (run.column - layout.columns) : nullptr,
              gradient + at, length, run, constants.factor, constants.has_columns);
    });
  });
}

double factored_square(const FactoredArrays& arrays, const FactorLayout& layout, std::int64_t begin,
                       std::int64_t place, std::int64_t count, const FactoredConstants& constants) {
  float step[kChunk];
  with_element(arrays.gradient_dtype, [&](auto element) {
    using Gradient = decltype(element);
    steps_of(step, static_cast<const Gradient*>(arrays.gradient) + begin, arrays.factors, layout,
             place, count, constants);
  });
  double lanes[kLanes] = {};
  std::int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) lanes[lane] += square_body(step[i + lane]);
  }
  for (int lane = 0; i < count; ++i, ++lane) lanes[lane] += square_body(step[i]);
  return join_lanes(lanes);
}

void adafactor(const FactoredArrays& arrays, const FactorLayout& layout, std::int64_t begin,
               std::int64_t place, std::int64_t count, const FactoredConstants& constants) {
  float step[kChunk];
  with_element(arrays.gradient_dtype, [&](auto element) {
    using Gradient = decltype(element);
    steps_of(step, static_cast<const Gradient*>(arrays.gradient) + begin, arrays.factors, layout,
             place, count, constants);
  });
  float* __restrict master = arrays.master + begin;
  for (std::int64_t i = 0; i < count; ++i)
    master[i] = adafactor_body(master[i], step[i], constants);
  copy_low(arrays.low, arrays.low_dtype, arrays.master, begin, count);
}

}  // namespace poise::kernels::cpu::POISE_ISA

// A C++ model for the planner: what forward and backward of it hold and how long they take, from
// one small real run of each size under the counting allocator.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "poise/config.h"
#include "poise/core.h"
#include "poise/engine.h"
#include "poise/export.h"
#include "poise/plan.h"

namespace poise {

// The loss of a sample batch: so many samples, as large as the data's longest.
using SampleLoss = std::function<Loss(std::int64_t samples)>;

// Runs the model at each of `micro_batches` samples (rising), in the precision that is given. A
// unit is a link of its own where units run one after the other, each once, and save a parameter of
// theirs for backward; else the model is one link. Links have the seconds they took as FLOPs
// (measured_device()); units recompute nothing. Parameters, buffers, their gradients and the CPU's
// random state stay.
POISE_API plan::Traced trace(const ModelView& model, const SampleLoss& loss,
                             const config::PrecisionPolicy& precision,
                             const std::vector<std::int64_t>& micro_batches = {1, 2});

// Takes as long as links of trace() say; bytes move as on the device of that name.
POISE_API plan::Device measured_device(const plan::Device& like);

// What operators of this process take: with as many threads as torch has now; inside a product what
// one was seen to take.
POISE_API plan::CpuOperators cpu_operators();

// The job of plan::search for a run of the model: `config` says the precision, the optimizer, the
// global batch (in samples), the budget, and a stage or a micro-batch where those are fixed. Run
// are one sample, two, and as many as these say fit well into the budget (64 without one), since
// peaks bend between small and large batches.
//
//   auto job = poise::plan_job(poise::view(*model), loss_of, config);
//   auto answer = poise::plan::search(job);  // answer.best.choice.micro_batch, ...
POISE_API plan::Job plan_job(const ModelView& model, const SampleLoss& loss, const Config& config,
                             int ranks = 1);

}  // namespace poise

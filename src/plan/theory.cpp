// The formulas as their papers print them.
#include "plan/theory.h"

namespace poise::plan::theory {

double activation_bytes(const Layer& l) {
  const double sbh = l.sequence * l.micro_batch * l.width;
  const double t = l.tensor_parallel;
  const double ffn = l.ffn > 0 ? l.ffn : 4 * l.width;
  if (l.kept == Layer::Kept::input) return 2 * sbh;
  // Norms' inputs and outputs and dropout masks of the residual: 10; attention 8; MLP 4 f / h.
  const double outside = 10, inside = 8 + 4 * ffn / l.width;
  const double scores = l.kept == Layer::Kept::all ? 5 * l.heads * l.sequence / l.width : 0;
  return sbh * ((l.sequence_parallel ? outside / t : outside) + (inside + scores) / t);
}

double layers_in_flight(double layers, double stages, double interleave) {
  const double extra = interleave > 1 ? (stages - 1) / (stages * interleave) : 0;
  return layers * (1 + extra);
}

double bubble(double stages, double micro_batches, double interleave) {
  return (stages - 1) / (micro_batches * interleave);
}

double deepspeed_bytes(const DeepSpeed& r) {
  if (r.stage == 2) {
    return r.offload_optimizer ? 2 * r.parameters : 4 * r.parameters + 16 * r.parameters / r.gpus;
  }
  const double layer = 4 * r.largest_layer;
  if (r.offload_parameters) return layer;
  return layer + (r.offload_optimizer ? 2 : 18) * r.parameters / r.gpus;
}

double loss_bytes(double logits, bool fused) { return (fused ? 4 : 20) * logits; }

double buffered_bytes(const BufferedGpt& m, double tokens) {
  // Of a block: norm, qkv, attention, both residuals, norm, first half of the MLP.
  const double block = (1 + 3 + 1 + 1 + 1 + 4 + 1) * m.width;
  // Shared by all: embedding, last norm, GELU's output and scratch of one and of four widths;
  // logits.
  const double shared = (1 + 1 + 4 + 1 + 4) * m.width + m.vocabulary;
  // In fp32: attention's sums, means and deviations of all norms, losses.
  const double statistics = m.layers * (m.heads + 4) + 2 + 1;
  return tokens * (2 * (m.layers * block + shared) + 4 * statistics);
}

double selective_flops(double model_flops, double batch, double layers, double sequence,
                       double width) {
  return model_flops + 12 * batch * layers * sequence * sequence * width;
}

double training_days(double tokens, double parameters, double gpus, double flops_of_each) {
  return 8 * tokens * parameters / (gpus * flops_of_each) / 86400;
}

}  // namespace poise::plan::theory

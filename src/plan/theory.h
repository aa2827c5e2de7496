// Published formulas of other systems: what the planner's own figures are checked against where
// theirs can be written down, and how runs of other frameworks are predicted (docs/planner.md).
#pragma once

#include <cstdint>

namespace poise::plan::theory {

// One transformer layer's activations in 16 bits with dropout and a GELU MLP of 4 x width
// (Korthikanti et al. 2022, arXiv:2205.05198, equations 1 to 6).
struct Layer {
  double sequence, micro_batch, width, heads;
  double ffn = 0;  // 0: 4 x width
  double tensor_parallel = 1;
  enum class Kept { all, no_scores, input } kept = Kept::all;  // no_scores: selective, or fused
  bool sequence_parallel = false;
};
double activation_bytes(const Layer& layer);
// Layers' worth of activations that the first stage of a pipeline holds.
double layers_in_flight(double layers, double stages, double interleave);
// Idle over ideal time of a pipeline (Narayanan et al. 2021, arXiv:2104.04473).
double bubble(double stages, double micro_batches, double interleave);

// DeepSpeed's estimate per GPU, as its documentation prints it.
struct DeepSpeed {
  double parameters, largest_layer, gpus;
  int stage;
  bool offload_optimizer, offload_parameters;
};
double deepspeed_bytes(const DeepSpeed& run);

// Peak of cross-entropy on fp32 logits: five copies, or in place.
double loss_bytes(double logits, bool fused);

// Activations of a GPT that llm.c trains: every buffer it allocates, GELU made again in backward.
struct BufferedGpt {
  double layers, width, heads, vocabulary;
};
double buffered_bytes(const BufferedGpt& model, double tokens);

// Model FLOPs plus attention's that selective recomputation runs again, as its authors count them.
double selective_flops(double model_flops, double batch, double layers, double sequence,
                       double width);
double training_days(double tokens, double parameters, double gpus, double flops_of_each);

}  // namespace poise::plan::theory

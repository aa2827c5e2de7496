// The planner's figures, and the formulas it quotes, against published ones.
#include <gtest/gtest.h>

#include "cases.h"
#include "plan/theory.h"
#include "poise/plan.h"

namespace poise::plan {
namespace {

constexpr double kGib = 1024.0 * 1024 * 1024;

Choice choice_of(int stage, int ranks) {
  Choice choice;
  choice.stage = stage;
  choice.ranks = ranks;
  choice.reduces_every = stage >= 2;
  return choice;
}

// The paper's recipe: 16-bit parameters and gradients, 12 bytes of masters and moments.
constexpr Widths kPaper{.parameter = 2, .master = 4, .moments = 8, .accumulator = 2, .wire = 2};

double state_bytes(double parameters, int stage, int ranks) {
  auto held =
      states({{"model", static_cast<std::int64_t>(parameters)}}, choice_of(stage, ranks), kPaper);
  held[static_cast<std::size_t>(memory::Account::communication)] = 0;
  return static_cast<double>(total(held));
}

TEST(KnownAnswers, StatesOfZero) {
  for (const auto& c : cases("zero_states")) {
    const auto gigabytes = state_bytes(c.number("parameters"), static_cast<int>(c.count("stage")),
                                       static_cast<int>(c.count("ranks"))) /
                           1e9;
    // Shards are multiples of 256 elements, of 16 bytes each in all.
    EXPECT_GE(gigabytes, c.number("gigabytes") * (1 - 1e-12)) << c.text("case");
    EXPECT_LE(gigabytes, c.number("gigabytes") + 256 * 16e-9 * c.number("ranks")) << c.text("case");
    if (c.has("printed")) {
      EXPECT_NEAR(gigabytes, c.number("printed"), last_digit(c.text("printed"))) << c.text("case");
    }
  }
}

TEST(KnownAnswers, LargestModelsOfZero) {
  for (const auto& c : cases("zero_largest_models")) {
    double low = 0, high = 1e12;
    while (high - low > 1e3) {
      const double middle = (low + high) / 2;
      const bool fits =
          state_bytes(middle, static_cast<int>(c.count("stage")),
                      static_cast<int>(c.count("ranks"))) <= c.number("gigabytes") * 1e9;
      (fits ? low : high) = middle;
    }
    const double billions = low * c.number("model_parallel") / 1e9;
    EXPECT_NEAR(billions, c.number("billions"), 1e-3) << c.text("case");
    EXPECT_NEAR(billions, c.number("printed"), 0.01 * c.number("printed")) << c.text("case");
  }
}

TEST(KnownAnswers, EstimatesOfDeepSpeed) {
  for (const auto& c : cases("deepspeed_estimates")) {
    const double gib =
        theory::deepspeed_bytes({.parameters = c.number("parameters"),
                                 .largest_layer = c.number("largest_layer"),
                                 .gpus = c.number("gpus"),
                                 .stage = static_cast<int>(c.count("stage")),
                                 .offload_optimizer = c.count("offload_optimizer") != 0,
                                 .offload_parameters = c.count("offload_parameters") != 0}) /
        kGib;
    EXPECT_NEAR(gib, c.number("gib"), 1e-4) << c.text("case");
    EXPECT_NEAR(gib, c.number("printed"), 0.01) << c.text("case");
  }
}

theory::Layer layer_of(const Case& c) {
  return {.sequence = c.number("sequence"),
          .micro_batch = c.number("micro_batch"),
          .width = c.number("width"),
          .heads = c.number("heads")};
}

TEST(KnownAnswers, Activations) {
  using Kept = theory::Layer::Kept;
  for (const auto& c : cases("activations")) {
    auto layer = layer_of(c);
    layer.tensor_parallel = c.number("tensor_parallel");
    layer.sequence_parallel = c.count("sequence_parallel") != 0;
    const auto& kept = c.text("kept");
    layer.kept = kept == "all" ? Kept::all : kept == "no_scores" ? Kept::no_scores : Kept::input;
    const double bytes = theory::activation_bytes(layer);
    EXPECT_NEAR(bytes, c.number("bytes_per_layer"), 1e-9 * bytes) << c.text("case");
    const double interleave = c.number("interleave"), stages = c.number("pipeline");
    const double gib =
        bytes * theory::layers_in_flight(c.number("layers"), stages, interleave) / kGib;
    EXPECT_NEAR(gib, c.number("first_stage_gib"), 0.002 * gib) << c.text("case");
    if (c.has("printed_gib")) {
      EXPECT_NEAR(gib, c.number("printed_gib"), 0.002 * gib);
    }
    auto baseline = layer;
    baseline.kept = Kept::all;
    baseline.sequence_parallel = false;
    baseline.tensor_parallel = 8;
    const double percent = 100 * bytes / theory::activation_bytes(baseline);
    EXPECT_NEAR(percent, c.number("percent_of_tensor_parallel"), 1e-3) << c.text("case");
    if (c.has("printed_percent")) {
      EXPECT_NEAR(percent, c.number("printed_percent"), 0.15);
    }
  }
}

TEST(KnownAnswers, ActivationsOfAnyFfn) {
  for (const auto& c : cases("activations_any_ffn")) {
    auto layer = layer_of(c);
    layer.ffn = c.number("ffn");
    layer.kept = theory::Layer::Kept::no_scores;
    EXPECT_NEAR(theory::activation_bytes(layer), c.number("bytes_per_layer"), 0.5)
        << c.text("case");
  }
}

Transformer classic(double layers, double width, double vocabulary, double positions = 0) {
  return {.name = "classic",
          .layers = static_cast<std::int64_t>(layers),
          .width = static_cast<std::int64_t>(width),
          .heads = 1,
          .ffn = 4 * static_cast<std::int64_t>(width),
          .vocabulary = static_cast<std::int64_t>(vocabulary),
          .mlp = Mlp::gelu,
          .tied = true,
          .biases = true,
          .positions = static_cast<std::int64_t>(positions)};
}

TEST(KnownAnswers, StatesOfPipelineStages) {
  for (const auto& c : cases("pipeline_states")) {
    auto bare = classic(c.number("layers"), c.number("width"), 1);
    bare.biases = bare.head_norm = false;
    // Matrices only: no embedding and no norms.
    const auto matrices = parameters(bare) - bare.width - bare.layers * 2 * bare.width;
    const double gib = 18.0 * static_cast<double>(matrices) /
                       (c.number("tensor_parallel") * c.number("pipeline")) / kGib;
    EXPECT_NEAR(gib, c.number("gib"), 1e-9) << c.text("case");
    EXPECT_NEAR(gib, c.number("printed"), 1e-9) << c.text("case");
  }
}

double flops_of(const Case& c) {
  const auto model = classic(c.number("layers"), c.number("width"), c.number("vocabulary"));
  const auto sequence = c.count("sequence");
  const double batch = c.number("batch");
  const double trained = 3 * batch * forward_flops(model, sequence);
  if (c.text("kind") == "model") return trained;
  if (c.text("kind") == "selective") {
    return theory::selective_flops(trained, batch, c.number("layers"), c.number("sequence"),
                                   c.number("width"));
  }
  const auto made = chain(model, {.micro_batch = c.count("batch"), .sequence = sequence},
                          {.dtype = config::DType::bf16}, Place::gpu);
  double flops = 0;
  for (const auto& link : made.links) {
    flops += 3 * link.flops + link.passes[static_cast<std::size_t>(Recompute::whole)].again_flops;
  }
  return flops;
}

TEST(KnownAnswers, Flops) {
  for (const auto& c : cases("flops")) {
    EXPECT_NEAR(flops_of(c), c.number("flops"), 1e-12 * c.number("flops")) << c.text("case");
  }
}

TEST(KnownAnswers, Utilisation) {
  std::map<std::string, double> flops;
  for (const auto& c : cases("flops")) flops[c.text("case")] = flops_of(c);
  for (const auto& c : cases("utilisation")) {
    const double peak = c.number("gpus") * known_device("A100-80GB").half_flops;
    const double percent = 100 * flops.at(c.text("flops_case")) / (c.number("seconds") * peak);
    EXPECT_NEAR(percent, c.number("percent"), 1e-9) << c.text("case");
    EXPECT_NEAR(percent, c.number("printed"), c.number("points")) << c.text("case");
  }
}

TEST(KnownAnswers, FlopsOfASequence) {
  for (const auto& c : cases("sequence_flops")) {
    const Transformer model{.name = c.text("case"),
                            .layers = c.count("layers"),
                            .width = c.count("width"),
                            .heads = c.count("heads"),
                            .kv_heads = c.count("kv_heads"),
                            .ffn = c.count("ffn"),
                            .vocabulary = c.count("vocabulary"),
                            .mlp = c.text("mlp") == "gated" ? Mlp::gated : Mlp::gelu};
    const double flops = 3 * forward_flops(model, c.count("sequence"));
    EXPECT_NEAR(flops, c.number("flops"), 1e-12 * flops) << c.text("case");
    EXPECT_NEAR(flops, c.number("printed"), c.number("percent") / 100 * flops) << c.text("case");
  }
}

TEST(KnownAnswers, Parameters) {
  for (const auto& c : cases("parameters")) {
    const Transformer model{.name = c.text("model"),
                            .layers = c.count("layers"),
                            .width = c.count("width"),
                            .heads = c.count("heads"),
                            .kv_heads = c.count("kv_heads"),
                            .head_width = c.count("head_width"),
                            .ffn = c.count("ffn"),
                            .vocabulary = c.count("vocabulary"),
                            .mlp = c.text("mlp") == "gated" ? Mlp::gated : Mlp::gelu,
                            .tied = c.count("tied") != 0,
                            .biases = c.count("biases") != 0,
                            .positions = c.count("positions")};
    EXPECT_EQ(parameters(model), c.count("parameters")) << c.text("model");
  }
}

TEST(KnownAnswers, ParametersByFormula) {
  for (const auto& c : cases("parameters_formula")) {
    auto model = classic(c.number("layers"), c.number("width"), c.number("vocabulary"),
                         c.number("sequence"));
    model.head_norm = false;
    const double billions = static_cast<double>(parameters(model)) / 1e9;
    EXPECT_NEAR(billions, c.number("billions"), 1e-9) << c.text("case");
    EXPECT_NEAR(billions, c.number("printed"),
                std::max(0.5 * last_digit(c.text("printed")), 0.002 * billions));
  }
}

TEST(KnownAnswers, DaysOfTraining) {
  for (const auto& c : cases("training_days")) {
    const double days = theory::training_days(c.number("tokens"), c.number("parameters"),
                                              c.number("gpus"), c.number("flops_of_each"));
    EXPECT_NEAR(days, c.number("days"), 1e-9 * days) << c.text("case");
    EXPECT_NEAR(days, c.number("printed"), 1) << c.text("case");
  }
}

TEST(KnownAnswers, SixFlopsPerParameterAndToken) {
  for (const auto& c : cases("six_flops")) {
    // What the field takes for a model's training; the planner counts matrices and scores.
    const double flops = 6 * c.number("parameters") * c.number("tokens");
    EXPECT_NEAR(flops, c.number("flops"), 1e-9 * flops) << c.text("case");
    const double tolerance = c.text("case") == "6nd-67B" ? 0.05 : 0.01;  // rounded tokens
    EXPECT_NEAR(flops, c.number("printed"), tolerance * flops) << c.text("case");
  }
}

TEST(KnownAnswers, BubbleOfAPipeline) {
  for (const auto& c : cases("pipeline_bubble")) {
    const double idle =
        theory::bubble(c.number("stages"), c.number("micro_batches"), c.number("interleave"));
    EXPECT_NEAR(idle, c.number("over_ideal"), 1e-12) << c.text("case");
    EXPECT_NEAR(idle / (1 + idle), c.number("over_total"), 1e-12) << c.text("case");
  }
}

TEST(KnownAnswers, Traffic) {
  for (const auto& c : cases("traffic")) {
    auto choice = choice_of(static_cast<int>(c.count("stage")), static_cast<int>(c.count("ranks")));
    choice.accumulation = c.count("accumulation");
    double windows = 1;
    const auto& scheme = c.text("scheme");
    if (scheme == "ddp_sync_every_micro-step" ||
        scheme == "zero3_parameters_kept_forward_to_backward") {
      // As many windows of one micro-batch, parameters kept in each.
      windows = c.number("accumulation");
      choice.accumulation = 1;
      choice.keep_gathered = choice.stage == 3;
    }
    const auto moved = traffic(c.count("parameters"), choice, kPaper);
    const double bytes = windows * (moved.gathers + moved.reduces);
    EXPECT_NEAR(bytes, c.number("bytes"), 1e-9 * bytes) << c.text("case");
    const double ring = (choice.ranks - 1.0) / choice.ranks;
    EXPECT_NEAR(bytes / 2 / ring, c.number("elements"), 1e-9 * c.number("elements"));
  }
}

TEST(KnownAnswers, ComponentsOfARun) {
  for (const auto& c : cases("components")) {
    const auto gpt2 = known_transformer("gpt2");
    auto padded = gpt2;
    padded.vocabulary = 50304;
    EXPECT_EQ(parameters(padded), c.count("parameters"));
    const double mib = c.number("parameters") * c.number("bytes_per_parameter") / (1 << 20);
    EXPECT_NEAR(mib, c.number("mib"), 1e-9) << c.text("component");
    EXPECT_EQ(std::floor(mib), c.number("printed")) << c.text("component");
  }
}

// The same run's activations: the log prints whole MiB, of a micro-batch of 56 and of one sequence.
TEST(KnownAnswers, ActivationsOfARun) {
  const theory::BufferedGpt gpt2{.layers = 12, .width = 768, .heads = 12, .vocabulary = 50304};
  EXPECT_EQ(std::floor(theory::buffered_bytes(gpt2, 56 * 1024) / (1 << 20)), 18564);
  EXPECT_EQ(std::floor(theory::buffered_bytes(gpt2, 1024) / (1 << 20)), 331);
}

TEST(KnownAnswers, PeaksOfLosses) {
  for (const auto& c : cases("loss_peaks")) {
    const double logits = c.number("tokens") * c.number("vocabulary");
    const double mib = theory::loss_bytes(logits, c.count("fused") != 0) / (1 << 20);
    EXPECT_NEAR(mib, c.number("expected_mib"), 1e-9);
    EXPECT_NEAR(mib, c.number("measured_mib"), 1);
  }
}

}  // namespace
}  // namespace poise::plan

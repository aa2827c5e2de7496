// The lines before the first update.
#include "cli/banner.h"

#include <algorithm>

#include "cli/attention.h"
#include "poise/memory.h"
#include "poise/precision.h"

namespace poise::cli {
namespace {

const char* name(config::DType dtype) {
  return dtype == config::DType::fp32 ? "fp32" : dtype == config::DType::bf16 ? "bf16" : "fp16";
}

// 1234567 -> "1,234,567"
std::string grouped(std::int64_t number) {
  const std::string digits = std::to_string(number);
  std::string text;
  for (std::size_t i = 0; i < digits.size(); ++i) {
    if (i > 0 && (digits.size() - i) % 3 == 0) text += ',';
    text += digits[i];
  }
  return text;
}

std::string arithmetic(const Config& config, int ranks) {
  const auto& batch = config.batch;
  const auto accumulation = config::accumulation(batch, ranks);
  const auto micro_batch = config::micro_batch_size(batch);
  const auto global = micro_batch * accumulation * ranks;
  return join("  micro-batch ", micro_batch, " x accumulation ", accumulation, " x ranks ", ranks,
              " = global batch ", global, ", ", grouped(global * config.model.sequence_length),
              " tokens an update");
}

std::string parameters(const ModelView& model) {
  std::int64_t all = 0, trained = 0;
  for (const auto& [name, tensor] : model.parameters) {
    all += tensor.numel();
    trained += tensor.requires_grad() ? tensor.numel() : 0;
  }
  return grouped(trained) + " of " + grouped(all) + " parameters are trained";
}

std::string types(const config::PrecisionPolicy& precision) {
  const bool autocast = precision::autocast_dtype(precision).has_value();
  return join("kept in ", name(precision.parameters), ", masters fp32, forward ",
              name(precision.dtype), autocast ? " (autocast)" : "");
}

std::string attention(const Config& config, c10::Device device) {
  const auto& model = config.model;
  return attention_kernel({1, model.heads, model.sequence_length, model.width / model.heads},
                          precision::scalar_type(config.precision.dtype), device, model.dropout);
}

std::string length(const Config& config, const data::ByteCorpus& corpus, int ranks) {
  const auto window =
      config::micro_batch_size(config.batch) * config::accumulation(config.batch, ranks) * ranks;
  const double epochs = static_cast<double>(config.train.max_updates) *
                        static_cast<double>(window) /
                        static_cast<double>(std::max<std::int64_t>(1, corpus.size()));
  char text[32];
  std::snprintf(text, sizeof text, "%.2f", epochs);
  return join("  ", grouped(corpus.size()), " samples of ", config.model.sequence_length,
              " bytes in ", corpus.files(), " files; ", grouped(config.train.max_updates),
              " updates are ", text, " epochs");
}

// One line for several ranks, none for one.
std::vector<std::string> sharding(const Config& config, const comm::Group& group) {
  if (group.size() == 1) return {};
  const char* split[] = {"nothing is sharded", "optimizer states are sharded",
                         "optimizer states and gradients are sharded",
                         "optimizer states, gradients and parameters are sharded"};
  return {join("  ", group.size(), " ranks over ", group.backend(), ", ZeRO stage ",
               config.zero.stage, ": ", split[config.zero.stage],
               config.zero.shard_group_size > 0
                   ? join(" in groups of ", config.zero.shard_group_size)
                   : std::string())};
}

// One line for what lives away from the device, none where nothing does.
std::vector<std::string> offloading(const config::OffloadPolicy& offload) {
  const auto share = join(100 * offload.optimizer_fraction, "% of the optimizer states");
  const std::pair<std::string, config::Offload> kinds[] = {{share, offload.optimizer},
                                                           {"gradients", offload.gradients},
                                                           {"parameters", offload.parameters},
                                                           {"activations", offload.activations}};
  std::string text;
  for (const auto& [what, where] : kinds) {
    if (where == config::Offload::none) continue;
    text += join(text.empty() ? "  offloaded: " : ", ", what,
                 where == config::Offload::host ? " to memory of the host"
                                                : " to a file in " + offload.directory);
  }
  if (text.empty()) return {};
  return {text};
}

}  // namespace

std::vector<std::string> banner(const Config& config, const ModelView& model,
                                const data::ByteCorpus& corpus, const std::vector<bool>& recomputed,
                                const comm::Group& group) {
  const auto device = group.device();
  const auto count = std::count(recomputed.begin(), recomputed.end(), true);
  const auto budget = config.memory.budget_bytes;
  std::vector<std::string> lines{
      join("poise trains ", config.model.builtin, " on ", device.str()),
      arithmetic(config, group.size()),
      length(config, corpus, group.size()),
      join("  ", parameters(model), "; ", types(config.precision)),
      join("  ", config.optimizer.type, ", learning rate ", config.optimizer.lr, ", ",
           config.schedule.type, ", warmup ", config.schedule.warmup_updates,
           "; attention by torch's ", attention(config, device), " kernel"),
      join("  recomputed blocks: ", count, " of ", recomputed.size(), " (",
           config.checkpointing.policy,
           "); memory budget: ", budget == 0 ? "none" : memory::format_bytes(budget)),
  };
  for (auto& line : sharding(config, group)) lines.push_back(std::move(line));
  for (auto& line : offloading(config.offload)) lines.push_back(std::move(line));
  return lines;
}

}  // namespace poise::cli

// Arguments to a job of the planner.
#include "cli/plan.h"

#include <algorithm>
#include <fstream>
#include <nlohmann/json.hpp>

#include "cli/plan_html.h"
#include "cli/plan_machine.h"
#include "cli/plan_page.h"
#include "cli/run_plan.h"
#include "poise/error.h"
#include "poise/memory.h"
#include "poise/module_plan.h"
#include "poise/plan.h"

namespace poise::cli {
namespace {

using Json = nlohmann::ordered_json;

void read_size(const Json& value, const std::string& key, std::int64_t& out) {
  if (!value.is_number_integer() || value.get<std::int64_t>() < 0) {
    fail("plan", key, " is ", value.dump(), "; allowed: a whole number");
  }
  out = value.get<std::int64_t>();
}

void read_flag(const Json& value, const std::string& key, bool& out) {
  if (!value.is_boolean()) fail("plan", key, " is ", value.dump(), "; allowed: true or false");
  out = value.get<bool>();
}

void read_key(plan::Transformer& model, const std::string& key, const Json& value) {
  const std::pair<const char*, std::int64_t*> sizes[] = {
      {"layers", &model.layers},         {"width", &model.width},           {"heads", &model.heads},
      {"kv_heads", &model.kv_heads},     {"head_width", &model.head_width}, {"ffn", &model.ffn},
      {"vocabulary", &model.vocabulary}, {"positions", &model.positions}};
  for (const auto& [name, place] : sizes) {
    if (key == name) return read_size(value, key, *place);
  }
  if (key == "tied") return read_flag(value, key, model.tied);
  if (key == "biases") return read_flag(value, key, model.biases);
  if (key == "name" && value.is_string()) {
    model.name = value.get<std::string>();
    return;
  }
  if (key == "mlp" && (value == "gelu" || value == "gated")) {
    model.mlp = value == "gelu" ? plan::Mlp::gelu : plan::Mlp::gated;
    return;
  }
  fail("plan", "\"", key, "\": ", value.dump(),
       " is no part of a model; the keys are name, layers, width, heads, kv_heads, head_width, "
       "ffn, vocabulary, positions (whole numbers), tied, biases (true or false) and mlp (\"gelu\" "
       "or \"gated\")");
}

plan::Transformer described(const std::string& path, std::ifstream& file) {
  const auto document = Json::parse(file, nullptr, /*allow_exceptions=*/false, true);
  if (!document.is_object()) {
    fail("plan", path,
         " holds no JSON object; describe a model as {\"layers\": 32, \"width\": "
         "4096, \"heads\": 32, \"ffn\": 14336, \"vocabulary\": 128256}");
  }
  plan::Transformer model;
  model.name = path;
  for (const auto& [key, value] : document.items()) read_key(model, key, value);
  plan::check(model);
  return model;
}

plan::Transformer model_of(const std::string& name) {
  if (name.find('.') != std::string::npos || name.find('/') != std::string::npos) {
    std::ifstream file(name);
    if (file) return described(name, file);
  }
  return plan::known_transformer(name);
}

config::PrecisionPolicy precision_of(const std::string& name) {
  config::PrecisionPolicy precision;
  if (name == "fp32") return precision;
  precision.dtype = config::DType::bf16;
  if (name != "bf16-autocast") precision.parameters = config::DType::bf16;
  return precision;
}

std::int64_t bytes_of(const std::string& text) {
  return text.empty() ? 0 : memory::parse_bytes(text);
}

// Nothing, the optimizer's states, gradients too, parameters too; each with and without
// activations.
std::vector<config::OffloadPolicy> offloads(const std::string& where) {
  const auto place = where == "file" ? config::Offload::file : config::Offload::host;
  std::vector<config::OffloadPolicy> all(8);
  for (std::size_t i = 0; i < all.size(); ++i) {
    const auto states = i / 2;
    if (states >= 1) all[i].optimizer = place;
    if (states >= 2) all[i].gradients = config::Offload::host;  // they are never in files
    if (states == 3) all[i].parameters = place;
    if (i % 2 == 1) all[i].activations = place;
  }
  return all;
}

plan::Price price_of(const PlanArguments& a) {
  return {.gpu_hour = a.price, .utilisation = a.utilisation};
}

void write_html(const std::string& path, const Page& page) {
  std::ofstream file(path);
  file << page_html(page);
  file.flush();
  if (!file) fail("plan", "cannot write ", path, "; give another file with --html");
}

void print(std::ostream& out, const PlanArguments& a, Page page) {
  const bool misfit = page.answer != nullptr && !page.answer->fits;
  if (a.levers || misfit || (page.answer != nullptr && !a.html.empty())) {
    page.levers = plan::levers(page.job);
  }
  if (!a.html.empty()) write_html(a.html, page);
  if (a.json) {
    out << page_json(page) << '\n';
  } else {
    print_page(out, page);
  }
}

plan::Job described_job(const PlanArguments& a) {
  if (a.devices.gpus.empty() || a.sequence == 0 || a.global_batch == 0) {
    fail("plan",
         "--model also needs --gpus, --seq and --global-batch, for example: poise plan "
         "--model llama-3-8b --gpus 8xH100-80GB --seq 8192 --global-batch 512");
  }
  plan::Job job;
  job.model = model_of(a.model);
  job.machine = machine_of(a.devices);
  job.sequence = a.sequence;
  job.global_batch = a.global_batch;
  job.micro_batch = a.micro_batch;
  job.precision = precision_of(a.precision);
  job.cpu = cpu_operators();
  job.budget = bytes_of(a.memory);
  if (!a.offload.empty()) job.offloads = offloads(a.offload);
  if (a.shard_ranks > 0) job.shard_ranks = {static_cast<int>(a.shard_ranks)};
  return job;
}

int plan_file(const PlanArguments& a, std::ostream& out) {
  const auto config = Config::from_json_file(a.file);
  auto job = job_of(config, machine_of(a.devices));
  if (!a.memory.empty()) job.budget = bytes_of(a.memory);
  if (a.micro_batch > 0) job.micro_batch = a.micro_batch;
  if (a.shard_ranks > 0) job.shard_ranks = {static_cast<int>(a.shard_ranks)};
  const auto written = as_written(config, job);
  const bool searched = job.budget > 0;
  const auto answer = searched ? plan::search(job) : plan::Answer{};
  const bool fits = !searched || written.memory.highest() <= job.budget;
  print(out, a, {job, searched ? &answer : nullptr, &written, {}, price_of(a), {}});
  return fits ? 0 : 1;
}

}  // namespace

namespace {

int predict(const std::vector<std::string>& tables, std::ostream& out) {
  out << "case_id,predicted_peak_gib,predicted_tokens_per_s_per_gpu\n";
  for (const auto& table : tables) {
    for (const auto& p : plan::predict_runs(table)) {
      out << p.id << ',';
      if (p.predicted) out << p.peak_gib;
      out << ',';
      if (p.predicted) out << p.tokens_per_second;
      out << '\n';
    }
  }
  return 0;
}

}  // namespace

int plan(const PlanArguments& a, std::ostream& out) {
  if (!a.runs.empty()) return predict(a.runs, out);
  if (a.calibrate) {
    calibrate(a.devices.machine, out);
    return 0;
  }
  if (!a.file.empty()) return plan_file(a, out);
  const auto job = described_job(a);
  const auto answer = plan::search(job);
  print(out, a, {job, &answer, nullptr, {}, price_of(a), {}});
  return answer.fits ? 0 : 1;
}

}  // namespace poise::cli

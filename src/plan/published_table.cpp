// Rows of comma-separated tables with quotes, columns by name.
#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <fstream>
#include <map>
#include <sstream>

#include "plan/published.h"
#include "poise/error.h"

namespace poise::plan::published {
namespace {

using Cells = std::map<std::string, std::string>;

std::vector<std::string> split(const std::string& line) {
  std::vector<std::string> cells(1);
  bool quoted = false;
  for (std::size_t i = 0; i < line.size(); ++i) {
    const char c = line[i];
    if (c == '"' && quoted && i + 1 < line.size() && line[i + 1] == '"') {
      cells.back() += line[++i];
    } else if (c == '"') {
      quoted = !quoted;
    } else if (c == ',' && !quoted) {
      cells.emplace_back();
    } else if (c != '\r') {
      cells.back() += c;
    }
  }
  return cells;
}

class Reader {
 public:
  explicit Reader(const Cells& cells) : cells_(cells) {}
  const std::string& text(const std::string& column) const {
    static const std::string none;
    const auto found = cells_.find(column);
    return found == cells_.end() ? none : found->second;
  }
  double number(const std::string& column, double otherwise) const {
    const auto& cell = text(column);
    char* end = nullptr;
    const double value = std::strtod(cell.c_str(), &end);
    return end == cell.c_str() ? otherwise : value;
  }
  bool holds(const std::string& column, const char* part) const {
    return text(column).find(part) != std::string::npos;
  }

 private:
  const Cells& cells_;
};

Transformer model_of(const Reader& c) {
  Transformer m;
  m.name = c.text("model_name");
  m.width = static_cast<std::int64_t>(c.number("hidden", 0));
  m.layers = static_cast<std::int64_t>(c.number("layers", 0));
  m.heads = static_cast<std::int64_t>(c.number("heads", 0));
  m.kv_heads = static_cast<std::int64_t>(c.number("kv_heads", 0));
  m.ffn = static_cast<std::int64_t>(c.number("ffn", 0));
  m.vocabulary = static_cast<std::int64_t>(c.number("vocab", 0));
  const auto& kind = c.text("ffn_kind");
  m.mlp = kind == "swiglu" || kind == "geglu" ? Mlp::gated : Mlp::gelu;
  m.biases = m.mlp == Mlp::gelu;
  m.tied = c.text("tied_embeddings") == "yes";
  if (m.name.find("gemma") != std::string::npos) m.head_width = 256;
  if (m.mlp == Mlp::gelu && c.text("model_family").find("bloom") == std::string::npos) {
    m.positions = static_cast<std::int64_t>(c.number("seq_len", 0));
  }
  return m;
}

constexpr double kFourBits = 0.55;  // with the scales of their blocks

double width_of(const std::string& dtype, double otherwise) {
  if (dtype.empty()) return otherwise;
  if (dtype == "none") return 0;
  if (dtype.rfind("fp32", 0) == 0) return 4;
  if (dtype.rfind("nf4", 0) == 0 || dtype.rfind("4-bit", 0) == 0) return kFourBits;
  return 2;
}

double moments_of(const Reader& c) {
  const auto& dtype = c.text("dtype_optim");
  if (dtype == "bf16") return 4;
  if (dtype == "8-bit") return 2;
  if (dtype == "factored fp32") return 0.1;
  return 8;
}

Kept kept_of(const Reader& c) {
  const auto& ac = c.text("ac");
  if (ac == "full") return Kept::input;
  if (ac == "selective:op") return Kept::operators;
  if (ac == "selective:every-2-layers") return Kept::other_blocks;
  if (ac == "selective:gelu recompute") return Kept::no_gelu;
  if (ac.rfind("selective", 0) == 0) return Kept::no_scores;
  // What a framework's recipes do where the table does not say.
  const bool usual = c.holds("notes", "block checkpointing") || c.holds("source_repo", "torchtune");
  if (ac.empty() && usual) return Kept::input;
  return Kept::all;
}

Sharding sharding_of(const Reader& c) {
  const auto& mode = c.text("shard_mode");
  if (mode.rfind("deepspeed", 0) == 0 || mode == "zero2") return Sharding::deepspeed;
  if (mode.find("fsdp") != std::string::npos) return Sharding::fsdp;
  if (c.number("tp", 1) > 1 || c.number("pp", 1) > 1 ||
      mode.find("distributed optimizer") != std::string::npos) {
    return Sharding::megatron;
  }
  return Sharding::replicas;
}

Meter meter_of(const Reader& c) {
  const auto& meter = c.text("peak_meter");
  if (meter.rfind("nvidia-smi", 0) == 0 || meter.rfind("cudaMem", 0) == 0) return Meter::device;
  if (meter == "reserved") return Meter::reserved;
  if (meter == "active") return Meter::active;
  if (meter == "unknown") return Meter::device;
  if (meter.empty()) return Meter::fits;
  return Meter::allocated;
}

std::string plain(std::string name) {
  std::erase(name, '-');
  for (char& c : name) c = static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
  return name;
}

// "A100-80" is A100-80GB, "A6000-48" RTX-A6000-48GB, "H200" the H200 there is; an A100 without a
// memory stays one.
bool find_device(const std::string& name, Device& device) {
  if (name.empty()) return false;
  for (const auto& known : known_devices()) {
    const auto ours = plain(known.name), theirs = plain(name);
    const bool kind = known.name.rfind(name + "-", 0) == 0;
    if (ours != theirs + "GB" && ours != theirs && ours != "RTX" + theirs + "GB" && !kind) continue;
    device = known;
    if (kind && name == "A100") device.name = name;
    return true;
  }
  return false;
}

// The blocks' matrices alone are kept in 4 bits; bitsandbytes' usual preparation keeps all else,
// and what flows between, in fp32 (PEFT's prepare_model_for_kbit_training).
void quantized(const Reader& c, Run& r) {
  const bool prepared = c.text("dtype_params") == "4-bit base";
  r.parameter = kFourBits;
  r.table = prepared ? 4 : 2;
  r.keeps_frozen_inputs = true;  // bitsandbytes' products do
  if (prepared) r.activation = 4;
}

void heads_of(const Reader& c, Run& r) {
  const bool pure = r.parameter == r.compute && c.text("source") == "gpu-test-page";
  if (pure || r.activation > r.compute) r.head = Head::plain;
  if (c.holds("notes", "chunked cross entropy") || c.holds("source_repo", "torchtune")) {
    r.head = Head::chunked;
  }
  // Encoders are tuned to classify in such tables.
  const bool encoder = r.model.name.find("bert") != std::string::npos;
  if (encoder || c.holds("notes", "no LM logits")) r.head = Head::none;
  if (c.holds("flash_attn", "own kernels")) r.head = Head::in_place;
  if (c.holds("source_repo", "llm-foundry")) r.head = Head::fused;
  // torchtitan compiles the loss, too, since 2025.
  const bool later = c.holds("source_repo", "torchtitan") && c.holds("source_version", "2025");
  if (r.compiled && later) r.head = Head::fused;
  r.caps_logits = c.text("model_family") == "gemma2";
}

void gradients_of(const Reader& c, Run& r) {
  const bool first_fsdp = c.text("shard_mode") == "fsdp1";  // flat parameters
  r.frozen_gradients = first_fsdp && r.trained < 1;
  // Fabric's no_backward_sync around all micro-batches but the last.
  r.joins_once = first_fsdp && c.holds("source_repo", "litgpt") && r.accumulation > 1;
  // nanotron's accumulators make an fp32 copy of every parameter.
  if (c.holds("source_repo", "nanotron") && r.stage >= 1) r.whole_masters = 4;
  // torch's AdamW since 2.0, where nobody asks for the fused one.
  r.updates_all_at_once = c.text("optimizer") == "adamw" && c.text("source") == "gpu-test-page";
}

// What frameworks do where a table does not say.
void usual(const Reader& c, Run& r) {
  if (c.holds("source_repo", "nanotron")) {
    r.balances_stages = r.pp > 1;
    r.reads_first_stage = true;
  }
  if (c.holds("source_repo", "litgpt")) {
    r.fused_attention = true;
    r.dropout = false;
  }
  const bool plain = c.text("optimizer").empty() && c.text("dtype_optim").empty();
  if (c.holds("source_repo", "torchtune") && plain && r.trained == 1 && r.world == 1) {
    r.moments = 2;  // its recipe for one device: 8 bits, each parameter updated in backward
    r.updates_in_backward = true;
  }
  r.first_flash = c.holds("source_repo", "llm-foundry");
  r.broadcasts_parts = c.holds("source_repo", "InternEvo");
  // transformers' own GELU of GPT-2.
  r.gelu_by_parts =
      c.holds("source_repo", "DeepSpeedExamples") && r.model.name.rfind("gpt2", 0) == 0;
  // A chosen and a rejected one.
  if (c.holds("notes", "twice the micro-batch")) r.micro_batch *= 2;
}

Row row_of(const Cells& cells) {
  const Reader c(cells);
  Row row;
  row.id = c.text("case_id");
  Run& r = row.run;
  r.id = row.id;
  r.model = model_of(c);
  const bool shaped = r.model.width > 0 && r.model.layers > 0 && r.model.heads > 0 &&
                      r.model.ffn > 0 && r.model.vocabulary > 0 && c.number("seq_len", 0) > 0 &&
                      c.number("micro_batch", 0) > 0;
  if (!shaped || !find_device(c.text("gpu"), r.device)) return row;
  if (r.model.head_width == 0 && r.model.width % r.model.heads != 0) {
    r.model.heads = std::max<std::int64_t>(1, r.model.width / 128);  // as good as any for bytes
    while (r.model.width % r.model.heads != 0) --r.model.heads;
    r.model.kv_heads = r.model.heads;
  }
  r.sequence = c.number("seq_len", 0);
  r.micro_batch = c.number("micro_batch", 1);
  r.world = static_cast<int>(c.number("world_size", 1));
  r.tp = static_cast<int>(c.number("tp", 1));
  r.pp = static_cast<int>(c.number("pp", 1));
  r.vpp = static_cast<int>(c.number("vpp", 1));
  r.cp = static_cast<int>(c.number("cp", 1));
  r.dp = static_cast<int>(c.number("dp", r.world / (r.tp * r.pp * r.cp)));
  r.accumulation = c.number(
      "accum", std::max(1.0, c.number("global_batch", 0) / (r.micro_batch * std::max(1, r.dp))));
  r.sequence_parallel = c.text("seq_parallel") == "yes";
  r.sharding = sharding_of(c);
  r.stage = static_cast<int>(c.number("zero", 0));
  r.shards = r.dp * r.cp;
  const auto& mode = c.text("shard_mode");
  const auto groups = mode.find("groups of ");
  if (groups != std::string::npos) r.shards = std::atof(mode.c_str() + groups + 10);
  if (mode == "hsdp") r.shards = std::min(8, r.dp);
  r.keeps_gathered = c.text("reshard_policy").rfind("kept", 0) == 0;
  const auto& dtype = c.text("dtype_compute");
  r.compute = dtype == "fp32" ? 4 : 2;
  r.fp8 = dtype.find("fp8") != std::string::npos;
  const bool fsdp = r.sharding == Sharding::fsdp;
  r.parameter = width_of(c.text("dtype_params"), fsdp ? 4 : r.compute);
  r.gradient = width_of(c.text("dtype_grads"), r.parameter > 2 ? 4 : r.compute);
  if (r.sharding == Sharding::megatron && c.text("dtype_grads").empty()) r.gradient = 4;
  r.master = width_of(c.text("dtype_master"), r.parameter == 4 ? 0 : 4);
  r.moments = moments_of(c);
  const auto& tuned = c.text("tuned");
  r.trained = tuned == "full" || tuned.empty() ? 1 : 0.005;
  if (tuned.rfind("q", 0) == 0) quantized(c, r);
  r.kept = kept_of(c);
  r.fused_attention = c.holds("flash_attn", "yes");
  if (c.text("flash_attn").empty()) r.fused_attention = r.model.mlp == Mlp::gated;
  // Without scores to drop, "selective" is a share of the blocks.
  if (c.text("ac") == "selective" && r.fused_attention) r.kept = Kept::other_blocks;
  r.compiled = c.text("compile") == "yes";
  r.dropout = r.model.mlp == Mlp::gelu && !r.fused_attention;
  r.offloads_optimizer = c.holds("offload", "optimizer");
  r.offloads_states = c.holds("offload", "params/") || c.holds("offload", "FSDP");
  r.offloads_activations = c.holds("offload", "activations");
  r.updates_in_backward = c.holds("notes", "fused into backward");
  usual(c, r);
  heads_of(c, r);
  gradients_of(c, r);
  r.meter = meter_of(c);
  const bool nvidia = c.holds("source_repo", "NVIDIA") || c.holds("source_repo", "Megatron");
  // Those of a script that looks for the largest micro-batch gather them again: they would not fit.
  const bool again = c.holds("notes", "comment in the script");
  r.keeps_inputs_whole = r.sequence_parallel && !nvidia && !again;
  r.autocast = c.holds("dtype_compute", "autocast");
  // NVIDIA's recipes distribute the optimizer where they do not say otherwise.
  if (nvidia) {
    if (c.text("zero").empty()) r.stage = 1;
    if (c.text("seq_parallel").empty()) r.sequence_parallel = r.tp > 1;
    r.fused_mlp = r.fused_attention;  // and losses, in their later frameworks
    if (r.fused_attention) r.head = Head::fused;
  }
  row.predictable = true;
  return row;
}

}  // namespace

std::vector<Row> read_table(const std::string& path) {
  std::ifstream file(path);
  if (!file) fail("plan", "cannot read ", path, "; give a table of runs with a line of columns");
  std::string line;
  std::getline(file, line);
  const auto columns = split(line);
  if (std::find(columns.begin(), columns.end(), "case_id") == columns.end()) {
    fail("plan", path, " has no column case_id; its first line must name the columns");
  }
  std::vector<Row> rows;
  while (std::getline(file, line)) {
    if (line.empty()) continue;
    const auto cells = split(line);
    Cells named;
    for (std::size_t i = 0; i < columns.size() && i < cells.size(); ++i)
      named[columns[i]] = cells[i];
    rows.push_back(row_of(named));
  }
  return rows;
}

}  // namespace poise::plan::published

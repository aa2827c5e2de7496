// Names, descriptions and measurements of devices.
#include "cli/plan_machine.h"

#include <ATen/Context.h>
#include <ATen/Parallel.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>
#include <ostream>

#include "cli/measure.h"
#include "poise/cli.h"
#include "poise/error.h"
#include "poise/memory.h"

namespace poise::cli {
namespace {

using Json = nlohmann::ordered_json;

constexpr const char* kMeasured = "CPU (measured)";
constexpr const char* kMeasuredGpu = "this GPU (measured)";
constexpr const char* kThis = "this";  // in place of a device's name: the GPU that was measured
constexpr const char* kGpu = "gpu";    // its rates in the file of this machine

double number(const Json& value, const std::string& key) {
  if (!value.is_number() || value.get<double>() < 0) {
    fail("plan", key, " is ", value.dump(), "; allowed: a number of at least 0");
  }
  return value.get<double>();
}

std::int64_t bytes(const Json& value, const std::string& key) {
  if (value.is_string()) return memory::parse_bytes(value.get<std::string>());
  return static_cast<std::int64_t>(number(value, key));
}

void read_key(plan::Device& device, const std::string& key, const Json& value) {
  const std::pair<const char*, double*> rates[] = {
      {"half_flops", &device.half_flops},     {"float_flops", &device.float_flops},
      {"memory_rate", &device.memory_rate},   {"node_rate", &device.node_rate},
      {"network_rate", &device.network_rate}, {"efficiency", &device.efficiency},
      {"host_rate", &device.host_rate},       {"file_rate", &device.file_rate},
      {"host_update", &device.host_update},   {"overhead", &device.overhead},
      {"half_tokens", &device.half_tokens}};
  for (const auto& [name, place] : rates) {
    if (key == name) {
      *place = number(value, key);
      return;
    }
  }
  if (key == "memory") {
    device.memory = bytes(value, key);
  } else if (key == "name" && value.is_string()) {
    device.name = value.get<std::string>();
  } else if (key == "threads") {
    number(value, key);  // of the measurement
  } else {
    fail("plan", "\"", key, "\": ", value.dump(),
         " is no part of a device; the keys are name, memory (bytes or a text such as \"80GiB\"), "
         "half_flops, float_flops (a second), memory_rate, node_rate, network_rate, host_rate, "
         "file_rate, host_update (bytes a second), efficiency (share of the peak that is reached), "
         "overhead (seconds) and half_tokens");
  }
}

Json document_of(const std::string& path, std::ifstream& file) {
  auto document = Json::parse(file, nullptr, /*allow_exceptions=*/false, true);
  if (!document.is_object()) {
    fail("plan", path,
         " holds no JSON object; describe a device as {\"memory\": \"80GiB\", \"half_flops\": "
         "9.9e14, \"float_flops\": 6.7e13, \"memory_rate\": 3.3e12, \"node_rate\": 4.5e11, "
         "\"network_rate\": 5e10}");
  }
  return document;
}

std::string usual_path() {
  if (const char* set = std::getenv("POISE_MACHINE")) return set;
  if (const char* config = std::getenv("XDG_CONFIG_HOME")) {
    return std::string(config) + "/poise/machine.json";
  }
  const char* home = std::getenv("HOME");
  return std::string(home != nullptr ? home : ".") + "/.config/poise/machine.json";
}

bool is_file_name(const std::string& name) {
  return name.size() > 5 && name.compare(name.size() - 5, 5, ".json") == 0;
}

// What `path` says of a device, links that it does not say filled in.
plan::Device device_of(const std::string& path, const std::string& name, const Json& document) {
  plan::Device device;
  device.name = name;
  for (const auto& [key, value] : document.items()) read_key(device, key, value);
  if (device.half_flops == 0) device.half_flops = device.float_flops;
  if (device.float_flops == 0) device.float_flops = device.half_flops / 2;
  if (device.memory == 0 || device.half_flops == 0 || device.memory_rate == 0) {
    fail("plan", path, " says no memory, half_flops or memory_rate; a plan needs them");
  }
  // Links that are not said: PCIe and a network of 100 Gbit.
  if (device.node_rate == 0) device.node_rate = 25e9;
  if (device.network_rate == 0) device.network_rate = 12.5e9;
  return device;
}

// A device that a file describes: {"memory": "80GiB", "half_flops": 9.9e14, ...}.
plan::Device described_device(const std::string& path) {
  std::ifstream file(path);
  if (!file) fail("plan", "cannot read ", path, "; give a file that describes a device");
  return device_of(path, path, document_of(path, file));
}

// What `poise plan --calibrate` wrote; nothing where it did not and nobody said where.
std::optional<Json> measured(const std::string& path) {
  const auto& name = path.empty() ? usual_path() : path;
  std::ifstream file(name);
  if (file) return document_of(name, file);
  if (!path.empty()) fail("plan", "cannot read ", path, "; poise plan --calibrate writes it");
  return std::nullopt;
}

// "8xdevice.json", "8xthis", "8xH100-80GB".
plan::Machine asked_machine(const Devices& a) {
  if (a.gpus.empty()) return plan::read_machine("1xCPU");
  const auto times = a.gpus.find('x');
  const auto digits = a.gpus.substr(0, times);
  const bool counted = times != std::string::npos && !digits.empty() &&
                       digits.find_first_not_of("0123456789") == std::string::npos;
  const auto name = counted ? a.gpus.substr(times + 1) : a.gpus;
  const bool described = is_file_name(name);
  if (!described && name != kThis) return plan::read_machine(a.gpus);
  auto machine = plan::read_machine(counted ? digits + "xCPU" : "CPU");
  machine.device = described ? described_device(name) : this_gpu(a.machine);
  return machine;
}

// Where the disk has no room for the measurement, the guess of the table stays.
void add_file_rate(Json& document, std::ostream& out) {
  try {
    document["file_rate"] = file_rate(std::filesystem::current_path().string());
  } catch (const Error& error) {
    out << "the disk was not measured: " << error.what() << "\n";
  }
}

Json cpu_rates() {
  const auto rates = measure_cpu();
  return {{"threads", at::get_num_threads()}, {"float_flops", rates.float_flops},
          {"half_flops", rates.half_flops},   {"efficiency", 1.0},
          {"memory_rate", rates.memory_rate}, {"host_update", rates.memory_rate},
          {"overhead", rates.overhead},       {"half_tokens", 0}};
}

// The host updates states at what its memory moves.
Json gpu_rates(const Json& cpu) {
  const auto rates = measure_gpu();
  Json document{{"memory", gpu_memory()},
                {"float_flops", rates.float_flops},
                {"half_flops", rates.half_flops},
                {"efficiency", 1.0},
                {"memory_rate", rates.memory_rate},
                {"host_rate", host_rate()},
                {"overhead", rates.overhead},
                {"half_tokens", 0},
                {"host_update", cpu.at("host_update")}};
  if (const double peers = peer_rate(); peers > 0) document["node_rate"] = peers;
  if (cpu.contains("file_rate")) document["file_rate"] = cpu.at("file_rate");
  return document;
}

}  // namespace

plan::Device this_gpu(const std::string& path) {
  const auto document = measured(path);
  if (!document || !document->contains(kGpu) || !(*document)[kGpu].is_object()) {
    fail("plan",
         "no GPU was measured here; run poise plan --calibrate once on this machine, or name the "
         "device (poise plan --gpus) and the split (batch.micro_batch_size)");
  }
  return device_of(path.empty() ? usual_path() : path, kMeasuredGpu, (*document)[kGpu]);
}

plan::Device this_cpu(const std::string& path) {
  auto device = plan::known_device("CPU");
  const auto document = measured(path);
  if (!document) return device;
  for (const auto& [key, value] : document->items()) {
    if (key != kGpu) read_key(device, key, value);
  }
  device.name = kMeasured;
  return device;
}

bool is_measured(const plan::Device& device) {
  return device.name == kMeasured || device.name == kMeasuredGpu;
}

plan::Machine machine_of(const Devices& a) {
  auto machine = asked_machine(a);
  if (machine.device.name == "CPU") machine.device = this_cpu(a.machine);
  if (a.per_node > 0) machine.ranks_per_node = static_cast<int>(a.per_node);
  if (a.nodes > 0) {
    machine.ranks_per_node = machine.ranks;
    machine.ranks *= static_cast<int>(a.nodes);
  }
  if (a.node_link > 0) machine.device.node_rate = a.node_link * 1e9;
  if (a.network > 0) machine.device.network_rate = a.network * 1e9;
  return machine;
}

std::string calibrate(const std::string& path, std::ostream& out) {
  const auto target = path.empty() ? usual_path() : path;
  auto document = cpu_rates();
  add_file_rate(document, out);
  if (at::hasCUDA() && at::getNumGPUs() > 0) document[kGpu] = gpu_rates(document);
  std::error_code error;  // said by the write below
  const auto folder = std::filesystem::path(target).parent_path();
  if (!folder.empty()) std::filesystem::create_directories(folder, error);
  std::ofstream file(target);
  file << document.dump(2) << '\n';
  file.flush();
  if (!file) fail("plan", "cannot write ", target, "; give another file with --machine");
  out << "measured with " << at::get_num_threads() << " threads: " << document.dump() << "\n"
      << target << " is read by plans for the CPU from now on"
      << (document.contains(kGpu) ? ", and by those for --gpus 1xthis" : "") << "\n";
  return target;
}

}  // namespace poise::cli

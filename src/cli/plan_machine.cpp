// Names, descriptions and measurements of devices.
#include "cli/plan_machine.h"

#include <ATen/Parallel.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <ostream>

#include "cli/measure.h"
#include "poise/error.h"
#include "poise/memory.h"

namespace poise::cli {
namespace {

using Json = nlohmann::ordered_json;

constexpr const char* kMeasured = "CPU (measured)";

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

// "8xdevice.json" where the name is a file.
plan::Machine described_machine(const std::string& text) {
  const auto times = text.find('x');
  const auto digits = text.substr(0, times);
  const bool counted = times != std::string::npos && !digits.empty() &&
                       digits.find_first_not_of("0123456789") == std::string::npos;
  auto machine = plan::read_machine(counted ? digits + "xCPU" : "CPU");
  machine.device = described_device(counted ? text.substr(times + 1) : text);
  return machine;
}

}  // namespace

plan::Device described_device(const std::string& path) {
  std::ifstream file(path);
  if (!file) fail("plan", "cannot read ", path, "; give a file that describes a device");
  plan::Device device;
  device.name = path;
  const auto document = document_of(path, file);
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

plan::Device this_cpu(const std::string& path) {
  auto device = plan::known_device("CPU");
  std::ifstream file(path.empty() ? usual_path() : path);
  if (!file) {
    if (!path.empty()) fail("plan", "cannot read ", path, "; poise plan --calibrate writes it");
    return device;
  }
  const auto document = document_of(path.empty() ? usual_path() : path, file);
  for (const auto& [key, value] : document.items()) read_key(device, key, value);
  device.name = kMeasured;
  return device;
}

bool is_measured(const plan::Device& device) { return device.name == kMeasured; }

plan::Machine machine_of(const PlanArguments& a) {
  const bool described = is_file_name(a.gpus);
  auto machine =
      described ? described_machine(a.gpus) : plan::read_machine(a.gpus.empty() ? "1xCPU" : a.gpus);
  if (machine.device.place == plan::Place::cpu && !described) machine.device = this_cpu(a.machine);
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
  const auto rates = measure_cpu();
  Json document{{"threads", at::get_num_threads()}, {"float_flops", rates.float_flops},
                {"half_flops", rates.half_flops},   {"efficiency", 1.0},
                {"memory_rate", rates.memory_rate}, {"host_update", rates.memory_rate},
                {"overhead", rates.overhead},       {"half_tokens", 0}};
  std::error_code error;  // said by the write below
  const auto folder = std::filesystem::path(target).parent_path();
  if (!folder.empty()) std::filesystem::create_directories(folder, error);
  std::ofstream file(target);
  file << document.dump(2) << '\n';
  file.flush();
  if (!file) fail("plan", "cannot write ", target, "; give another file with --machine");
  out << "measured with " << at::get_num_threads() << " threads: " << document.dump() << "\n"
      << target << " is read by plans for the CPU from now on\n";
  return target;
}

}  // namespace poise::cli

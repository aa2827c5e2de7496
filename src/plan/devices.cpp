// Devices by name. Rates are those of the makers' data sheets without sparsity, memory is what
// drivers report; the reached share of the peak is an estimate.
#include <cctype>
#include <charconv>
#include <utility>

#include "poise/error.h"
#include "poise/log.h"
#include "poise/plan.h"

namespace poise::plan {
namespace {

constexpr double T = 1e12, G = 1e9;

std::int64_t gib(double value) { return static_cast<std::int64_t>(value * 1024 * 1024 * 1024); }

std::vector<Device> make_all() {
  //  name, memory, bf16, fp32, memory rate, node rate, network rate, efficiency
  return {
      {"B200-180GB", gib(178.4), 2250 * T, 75 * T, 8000 * G, 900 * G, 50 * G, 0.40},
      {"H200-141GB", gib(139.8), 989 * T, 67 * T, 4800 * G, 450 * G, 50 * G, 0.46},
      {"H100-96GB", gib(95.0), 989 * T, 67 * T, 2400 * G, 450 * G, 50 * G, 0.44},
      {"H100-80GB", gib(79.1), 989 * T, 67 * T, 3350 * G, 450 * G, 50 * G, 0.48},
      {"H800-80GB", gib(79.1), 989 * T, 67 * T, 3350 * G, 200 * G, 50 * G, 0.45},
      {"A100-80GB", gib(79.2), 312 * T, 19.5 * T, 2039 * G, 300 * G, 25 * G, 0.58},
      {"A100-40GB", gib(39.4), 312 * T, 19.5 * T, 1555 * G, 300 * G, 25 * G, 0.56},
      {"A800-80GB", gib(79.2), 312 * T, 19.5 * T, 2039 * G, 200 * G, 25 * G, 0.58},
      {"V100-32GB", gib(31.7), 125 * T, 15.7 * T, 900 * G, 150 * G, 12.5 * G, 0.45},
      {"V100-16GB", gib(15.8), 125 * T, 15.7 * T, 900 * G, 150 * G, 12.5 * G, 0.45},
      {"L40S-48GB", gib(44.5), 362 * T, 91.6 * T, 864 * G, 25 * G, 12.5 * G, 0.45},
      {"L4-24GB", gib(22.0), 121 * T, 30 * T, 300 * G, 12.5 * G, 6 * G, 0.45},
      {"A10G-24GB", gib(22.0), 70 * T, 31 * T, 600 * G, 12.5 * G, 6 * G, 0.5},
      {"RTX-PRO-6000-96GB", gib(95.0), 504 * T, 126 * T, 1792 * G, 25 * G, 12.5 * G, 0.45},
      {"RTX-A6000-48GB", gib(47.5), 155 * T, 38.7 * T, 768 * G, 25 * G, 12.5 * G, 0.5},
      {"RTX-4090-24GB", gib(23.5), 165 * T, 82.6 * T, 1008 * G, 12.5 * G, 3 * G, 0.55},
      {"RTX-3090-24GB", gib(23.6), 71 * T, 35.6 * T, 936 * G, 12.5 * G, 3 * G, 0.55},
      // Not one machine: its time is a guess, its bytes are exact.
      {"CPU", gib(1 << 20), 0.1 * T, 0.1 * T, 20 * G, 5 * G, 1 * G, 0.5, Place::cpu, 20 * G, 1 * G,
       20 * G, 0, 16},
  };
}

bool is_digits(const std::string& text) {
  return !text.empty() && text.find_first_not_of("0123456789") == std::string::npos;
}

std::string in_lower_case(std::string text) {
  for (char& c : text) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return text;
}

// Where `part` stands for `name`: "H100" and "h100-80" for "H100-80GB", "4090" for "RTX-4090-24GB".
enum class Match { none, begins, whole_words };
Match match(const std::string& name, const std::string& part) {
  const auto whole = in_lower_case("-" + name + "-");
  const auto wanted = in_lower_case("-" + part);
  if (part.empty()) return Match::none;
  if (whole.find(wanted + "-") != std::string::npos) return Match::whole_words;
  return whole.compare(0, wanted.size(), wanted) == 0 ? Match::begins : Match::none;
}

// What people mean by a name that is part of several.
constexpr std::pair<const char*, const char*> kUsual[] = {{"h100", "H100-80GB"}};

// The devices that a part of a name stands for; whole words before beginnings: L4 is no L40S.
std::vector<Device> meant_by(const std::string& part) {
  std::vector<Device> whole, begins;
  for (const auto& device : known_devices()) {
    for (const auto& [usual, name] : kUsual) {
      if (in_lower_case(part) == usual && device.name == name) return {device};
    }
    const auto how = match(device.name, part);
    if (how == Match::whole_words) whole.push_back(device);
    if (how == Match::begins) begins.push_back(device);
  }
  return whole.empty() ? begins : whole;
}

std::string names_of(const std::vector<Device>& devices, const char* between) {
  std::string names;
  for (const auto& device : devices) names += (names.empty() ? "" : between) + device.name;
  return names;
}

}  // namespace

const std::vector<Device>& known_devices() {
  static const auto all = make_all();
  return all;
}

Device known_device(const std::string& name) {
  for (const auto& device : known_devices()) {
    if (device.name == name) return device;
  }
  const auto meant = meant_by(name);
  if (meant.size() == 1) {
    log::info("[plan] ", name, " is taken for ", meant.front().name);
    return meant.front();
  }
  if (!meant.empty()) {
    fail("plan", "device \"", name, "\" may be ", names_of(meant, " or "), "; give one of them");
  }
  fail("plan", "unknown device \"", name, "\"; known are ", names_of(known_devices(), ", "),
       "; or give a JSON file that describes one (poise plan --help)");
}

Machine read_machine(const std::string& text) {
  Machine machine;
  std::string name = text;
  const auto times = text.find('x');
  if (times != std::string::npos && is_digits(text.substr(0, times))) {
    const auto [end, error] = std::from_chars(text.data(), text.data() + times, machine.ranks);
    if (error != std::errc() || machine.ranks < 1 || machine.ranks > 1 << 20) {
      fail("plan", "cannot plan for ", text.substr(0, times), " devices; give 1 to ", 1 << 20);
    }
    name = text.substr(times + 1);
  }
  machine.device = known_device(name);
  return machine;
}

std::int64_t reserve(const Device& device) {
  if (device.place == Place::cpu) return 0;
  return gib(1.5) + device.memory / 50;  // context and libraries; blocks the allocator cannot join
}

}  // namespace poise::plan

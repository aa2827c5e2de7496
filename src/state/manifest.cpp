// The manifest as JSON. Its first member is the checksum of the text with that checksum's digits
// set to 0.
#include "state/manifest.h"

#include <algorithm>
#include <limits>
#include <nlohmann/json.hpp>

#include "offload/digest.h"
#include "poise/error.h"
#include "state/files.h"

namespace poise::state {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::uint64_t kLargest = std::uint64_t{256} << 20;
constexpr int kDeepest = 16;
constexpr char kOpening[] = "{\n  \"xxh64\": \"";
constexpr std::size_t kDigitsAt = sizeof(kOpening) - 1;
constexpr std::size_t kDigits = 16;

const char* key_of(offload::Hash hash) { return hash == offload::Hash::xxh3 ? "xxh3" : "xxh64"; }

template <class T>
Json or_null(const std::optional<T>& value) {
  return value ? Json(*value) : Json(nullptr);
}

Json to_json(const Manifest& m) {
  Json parameters = Json::array(), buffers = Json::array(), files = Json::array();
  for (const auto& p : m.parameters) {
    parameters.push_back({{"name", p.name},
                          {"aliases", p.aliases},
                          {"shape", p.shape},
                          {"order", p.order},
                          {"dtype", p.dtype},
                          {"trainable", p.trainable}});
    if (p.missed > 0) parameters.back()["missed_updates"] = p.missed;
  }
  for (const auto& b : m.buffers) {
    buffers.push_back({{"name", b.name}, {"shape", b.shape}, {"dtype", b.dtype}});
  }
  for (const auto& f : m.files) {
    files.push_back({{"name", f.name},
                     {"bytes", f.bytes},
                     {key_of(f.hash), offload::hex(f.digest)},
                     {"rank", or_null(f.rank)}});
  }
  const auto& p = m.progress;
  const bool plain = std::all_of(m.moments.begin(), m.moments.end(),
                                 [](const auto& one) { return one == SavedMoment(); });
  Json optimizer{{"type", m.optimizer}, {"moments", m.moments.size()}};
  for (const auto& one : m.moments) {
    if (!plain)
      optimizer["arrays"].push_back(
          {{"dtype", one.dtype}, {"block", one.block}, {"factored", one.factored}});
  }
  return {
      {"xxh64", std::string(kDigits, '0')},
      {"format", "poise-state"},
      {"version", kVersion},
      {"written_by", m.written_by},
      {"updates", p.updates},
      {"skipped", p.skipped},
      {"ranks", m.ranks},
      {"stage", m.stage},
      {"optimizer", std::move(optimizer)},
      {"learning_rate", m.learning_rate},
      {"loss_scaler",
       {{"scale", p.loss_scale},
        {"clean_updates", p.clean_updates},
        {"overflows_in_row", p.overflows_in_row}}},
      {"loss_weight_exponent", or_null(p.loss_weight_exponent)},
      {"noise", p.noise ? Json{{"variance", p.noise->variance}, {"signal", p.noise->signal}}
                        : Json(nullptr)},
      {"cursor", or_null(m.cursor)},
      {"user", m.user},
      {"table_hash", offload::hex(m.table_hash)},
      {"config", m.config.empty() ? Json(nullptr) : Json::parse(m.config)},
      {"parameters", std::move(parameters)},
      {"buffers", std::move(buffers)},
      {"files", std::move(files)},
  };
}

bool is_too_deep(const std::string& text) {
  int depth = 0;
  bool in_string = false;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (in_string && c == '\\') {
      ++i;
    } else if (c == '"') {
      in_string = !in_string;
    } else if (!in_string && (c == '{' || c == '[')) {
      if (++depth > kDeepest) return true;
    } else if (!in_string && (c == '}' || c == ']')) {
      --depth;
    }
  }
  return false;
}

// Reads members by type; what is missing or of another type is named.
class Reader {
 public:
  Reader(const Json& json, const std::string& path) : json_(json), path_(path) {
    if (!json.is_object()) refuse("one of its entries");
  }

  const Json& at(const char* key) const {
    const auto found = json_.find(key);
    if (found == json_.end()) refuse(key);
    return *found;
  }
  bool knows(const char* key) const { return json_.contains(key); }
  bool has(const char* key) const { return !at(key).is_null(); }
  std::string text(const char* key) const { return text(at(key), key); }
  std::string text(const Json& value, const char* key) const {
    if (!value.is_string()) refuse(key);
    return value.get<std::string>();
  }
  std::int64_t count(const char* key) const { return count(at(key), key); }
  std::int64_t count(const Json& value, const char* key) const {
    const bool fits = value.is_number_unsigned() &&
                      value.get<std::uint64_t>() <=
                          static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max());
    if (!fits) refuse(key);
    return value.get<std::int64_t>();
  }
  std::int64_t whole(const char* key) const {
    if (!at(key).is_number_integer()) refuse(key);
    return at(key).get<std::int64_t>();
  }
  double number(const char* key) const {
    if (!at(key).is_number()) refuse(key);
    return at(key).get<double>();
  }
  bool flag(const char* key) const {
    if (!at(key).is_boolean()) refuse(key);
    return at(key).get<bool>();
  }
  std::uint64_t digits(const char* key) const {
    const auto said = text(key);
    if (said.size() != kDigits || said.find_first_not_of("0123456789abcdef") != std::string::npos) {
      refuse(key);
    }
    return std::stoull(said, nullptr, 16);
  }
  const Json& array(const char* key) const {
    if (!at(key).is_array()) refuse(key);
    return at(key);
  }
  std::vector<std::int64_t> counts(const char* key) const {
    std::vector<std::int64_t> values;
    for (const auto& value : array(key)) values.push_back(count(value, key));
    return values;
  }
  std::vector<std::string> texts(const char* key) const {
    std::vector<std::string> values;
    for (const auto& value : array(key)) values.push_back(text(value, key));
    return values;
  }
  [[noreturn]] void refuse(const char* key) const {
    fail("state", path_, " is damaged: ", key,
         " is missing or not what it should be; load another "
         "save");
  }

 private:
  const Json& json_;
  const std::string& path_;
};

std::int64_t product(const std::vector<std::int64_t>& shape, const Reader& reader) {
  std::int64_t numel = 1;
  for (const auto size : shape) {
    if (__builtin_mul_overflow(numel, size, &numel)) reader.refuse("shape");
  }
  return numel;
}

SavedParameter parameter_from(const Json& json, const std::string& path) {
  const Reader reader(json, path);
  SavedParameter p{reader.text("name"),    reader.texts("aliases"), reader.counts("shape"),
                   reader.counts("order"), reader.text("dtype"),    reader.flag("trainable")};
  if (reader.knows("missed_updates")) p.missed = reader.count("missed_updates");
  product(p.shape, reader);
  std::vector<bool> seen(p.shape.size());
  if (p.order.size() != p.shape.size()) reader.refuse("order");
  for (const auto dimension : p.order) {
    const auto at = static_cast<std::size_t>(dimension);
    if (at >= seen.size() || seen[at]) reader.refuse("order");
    seen[at] = true;
  }
  return p;
}

// As many as `moments` says; `arrays` is there where they are not all fp32 numbers of elements.
std::vector<SavedMoment> moments_from(const Reader& optimizer, const std::string& path) {
  constexpr std::int64_t kMost = 64, kLargestBlock = 1 << 20;
  const auto count = optimizer.count("moments");
  if (count > kMost) optimizer.refuse("moments");
  std::vector<SavedMoment> moments(static_cast<std::size_t>(count));
  if (!optimizer.knows("arrays")) return moments;
  const auto& arrays = optimizer.array("arrays");
  if (arrays.size() != moments.size()) optimizer.refuse("arrays");
  for (std::size_t i = 0; i < moments.size(); ++i) {
    const Reader reader(arrays[i], path);
    moments[i] = {reader.text("dtype"), reader.count("block"), reader.flag("factored")};
    if (moments[i].block < 1 || moments[i].block > kLargestBlock) reader.refuse("block");
  }
  return moments;
}

SavedBuffer buffer_from(const Json& json, const std::string& path) {
  const Reader reader(json, path);
  SavedBuffer b{reader.text("name"), reader.counts("shape"), reader.text("dtype")};
  product(b.shape, reader);
  return b;
}

// Inside the save's folder, whatever a hostile manifest says.
bool stays_inside(const std::string& name) {
  std::size_t begin = 0;
  for (std::size_t at = 0; at <= name.size(); ++at) {
    if (at < name.size() && name[at] != '/') continue;
    const auto part = name.substr(begin, at - begin);
    if (part.empty() || part == "." || part == "..") return false;
    begin = at + 1;
  }
  return name.find('\0') == std::string::npos;
}

SavedFile file_from(const Json& json, const std::string& path) {
  const Reader reader(json, path);
  SavedFile file;
  file.name = reader.text("name");
  if (!stays_inside(file.name)) reader.refuse("the name of a file");
  file.bytes = static_cast<std::uint64_t>(reader.count("bytes"));
  file.hash = reader.knows("xxh3") ? offload::Hash::xxh3 : offload::Hash::xxh64;
  file.digest = reader.digits(key_of(file.hash));
  if (reader.has("rank")) file.rank = reader.count("rank");
  return file;
}

void check_digest(std::string text, const std::string& path) {
  const bool begins_well =
      text.size() > kDigitsAt + kDigits && text.compare(0, kDigitsAt, kOpening) == 0;
  const auto said = begins_well ? text.substr(kDigitsAt, kDigits) : std::string();
  if (begins_well) text.replace(kDigitsAt, kDigits, kDigits, '0');
  if (!begins_well || offload::hex(offload::xxh64_of(text)) != said) {
    fail("state", path, " is damaged: its checksum is not that of its text; load another save");
  }
}

}  // namespace

std::int64_t SavedParameter::numel() const {
  std::int64_t numel = 1;
  for (const auto size : shape) numel *= size;
  return numel;
}

std::int64_t SavedMoment::numel(const SavedParameter& parameter) const {
  const auto whole = parameter.numel();
  const auto dims = parameter.shape.size();
  if (factored && dims >= 2 && whole > 0) {
    return whole / parameter.shape[dims - 1] + whole / parameter.shape[dims - 2];
  }
  return whole / block + (whole % block > 0 ? 1 : 0);
}

std::string to_text(const Manifest& manifest) {
  std::string text;
  try {
    text = to_json(manifest).dump(2) + '\n';
  } catch (const Json::exception& error) {
    fail("state", "a name or value to save is no UTF-8 text: ", error.what(), "; change it");
  }
  POISE_CHECK(text.compare(0, kDigitsAt, kOpening) == 0);
  return text.replace(kDigitsAt, kDigits, offload::hex(offload::xxh64_of(text)));
}

Manifest manifest_from(const std::string& text, const std::string& path) {
  check_digest(text, path);
  const auto json = is_too_deep(text) ? Json() : Json::parse(text, nullptr, false);
  const Reader reader(json, path);
  if (reader.text("format") != "poise-state") reader.refuse("format");
  Manifest m;
  m.version = reader.count("version");
  if (m.version > kVersion) {
    fail("state", path, " has version ", m.version, " of the format, and this poise reads up to ",
         kVersion, "; use the poise that wrote it (", reader.text("written_by"),
         ") or a newer one");
  }
  m.written_by = reader.text("written_by");
  m.progress.updates = reader.count("updates");
  m.progress.skipped = reader.count("skipped");
  m.ranks = reader.count("ranks");
  m.stage = reader.count("stage");
  const Reader optimizer(reader.at("optimizer"), path);
  m.optimizer = optimizer.text("type");
  m.moments = moments_from(optimizer, path);
  m.learning_rate = reader.number("learning_rate");
  const Reader scaler(reader.at("loss_scaler"), path);
  m.progress.loss_scale = scaler.number("scale");
  m.progress.clean_updates = scaler.count("clean_updates");
  m.progress.overflows_in_row = scaler.count("overflows_in_row");
  if (reader.has("loss_weight_exponent")) {
    m.progress.loss_weight_exponent = reader.whole("loss_weight_exponent");
  }
  if (reader.knows("noise") && reader.has("noise")) {
    const Reader noise(reader.at("noise"), path);
    m.progress.noise = {noise.number("variance"), noise.number("signal")};
  }
  if (reader.has("cursor")) m.cursor = reader.count("cursor");
  if (!reader.at("user").is_object() && !reader.at("user").is_null()) reader.refuse("user");
  for (const auto& [key, value] : reader.at("user").items()) {
    m.user[key] = reader.text(value, "user");
  }
  m.table_hash = reader.digits("table_hash");
  if (reader.has("config")) m.config = reader.at("config").dump(2);
  for (const auto& p : reader.array("parameters")) m.parameters.push_back(parameter_from(p, path));
  for (const auto& b : reader.array("buffers")) m.buffers.push_back(buffer_from(b, path));
  for (const auto& f : reader.array("files")) m.files.push_back(file_from(f, path));
  return m;
}

Manifest read_manifest(const std::string& folder) {
  const auto path = in(folder, kManifest);
  return manifest_from(read_file(path, kLargest), path);
}

}  // namespace poise::state

// Text to Config and back. Outside bytes come in here: size, depth and keys are bounded before any
// of them is believed.
#include <algorithm>
#include <fstream>
#include <set>
#include <sstream>
#include <utility>

#include "config/schema.h"
#include "core/nearest_name.h"
#include "poise/error.h"

namespace poise {
namespace config {
namespace {

constexpr std::size_t kMaxBytes = 1 << 20;
constexpr int kMaxDepth = 8;

// Parses JSON with comments; repeated keys, which JSON libraries take in silence, are errors.
Json parse(const std::string& text) {
  if (text.size() > kMaxBytes) {
    fail("config", "the text has ", text.size(), " bytes; at most ", kMaxBytes, " are read");
  }
  std::vector<std::set<std::string>> seen;  // keys of the objects that are open
  const auto watch = [&](int depth, Json::parse_event_t event, Json& parsed) {
    using Event = Json::parse_event_t;
    if ((event == Event::object_start || event == Event::array_start) && depth >= kMaxDepth) {
      fail("config", "nested deeper than ", kMaxDepth, " levels; no setting is");
    }
    if (event == Event::object_start) seen.emplace_back();
    if (event == Event::object_end) seen.pop_back();
    if (event == Event::key && !seen.back().insert(parsed.get_ref<const std::string&>()).second) {
      fail("config", "key ", shown(parsed), " comes twice in one object; keep one of them");
    }
    return true;
  };
  try {
    return Json::parse(text, watch, /*allow_exceptions=*/true, /*ignore_comments=*/true);
  } catch (const Json::exception& error) {
    fail("config", "not valid JSON: ", shown(std::string(error.what())),
         "; comments are allowed, trailing commas are not");
  }
}

std::vector<std::string> known_paths() {
  std::vector<std::string> paths;
  for (const auto& key : keys()) paths.push_back(key.path);
  return paths;
}

const Key<Config>* find(const std::string& path) {
  const auto at = std::find_if(keys().begin(), keys().end(),
                               [&](const Key<Config>& key) { return key.path == path; });
  return at == keys().end() ? nullptr : &*at;
}

bool is_section(const std::string& name) {
  return std::any_of(sections().begin(), sections().end(),
                     [&](const Section& section) { return section.name == name; });
}

// Its other keys are arguments of a Python function, which no schema knows.
[[noreturn]] void fail_imported(const Json& value) {
  fail("config", "model.import is ", shown(value),
       ": a model of Python, which only `poise train` of the Python package (pip) trains; run that "
       "one, or name a model.builtin");
}

void read_key(Config& config, const std::string& path, const Json& value) {
  if (path == "model.import") fail_imported(value);
  const auto* key = find(path);
  if (key == nullptr) fail_unknown(path, known_paths());
  key->read(config, value, path);
}

void read_document(Config& config, const Json& document) {
  if (!document.is_object())
    fail("config", "the text is ", shown(document), "; allowed: an object {...}");
  for (const auto& [section, body] : document.items()) {
    if (!is_section(section)) fail_unknown(section, known_paths());
    if (!body.is_object())
      fail("config", section, " is ", shown(body), "; allowed: an object {...}");
    if (section == "model" && body.contains("import")) fail_imported(body["import"]);
    for (const auto& [name, value] : body.items()) read_key(config, section + "." + name, value);
  }
}

// Runs `read`; its Error then ends in where the text came from.
template <class Read>
void with_place(const std::string& place, Read read) {
  try {
    read();
  } catch (const Error& error) {
    if (place.empty()) throw;
    throw Error(join(error.what(), " (in ", place, ")"));
  }
}

// "optimizer.lr=1e-3": the value is JSON where it parses as JSON, else text.
void read_override(Config& config, const std::string& setting) {
  const auto equals = setting.find('=');
  if (equals == std::string::npos) {
    fail("config", "setting ", shown(setting),
         " has no '='; write key=value, for example optimizer.lr=1e-3");
  }
  const std::string path = setting.substr(0, equals);
  const std::string value = setting.substr(equals + 1);
  read_key(config, path, Json::accept(value) ? parse(value) : Json(value));
}

std::string last_part(const std::string& path) { return path.substr(path.rfind('.') + 1); }

}  // namespace

std::string shown(const std::string& text) {
  constexpr std::size_t kLongest = 160;
  std::string out;
  for (const unsigned char c : text.substr(0, kLongest))
    out += c >= 0x20 && c < 0x7f ? static_cast<char>(c) : '?';
  return text.size() > kLongest ? out + "..." : out;
}

std::string shown(const Json& value) {
  if (value.is_number_float() && !std::isfinite(value.get<double>())) {
    return std::to_string(value.get<double>());  // JSON has no word for it
  }
  return shown(value.dump(-1, ' ', /*ensure_ascii=*/true, Json::error_handler_t::replace));
}

// What other tools call it, where that is far from what it is called here.
constexpr std::pair<const char*, const char*> kElsewhere[] = {
    {"optimizer.learning_rate", "optimizer.lr"},
    {"batch.gradient_accumulation_steps", "batch.accumulation"},
    {"batch.train_batch_size", "batch.global_batch_size"},
};

void fail_unknown(const std::string& path, const std::vector<std::string>& known) {
  // A key in the wrong section is likelier than a long chain of typing errors: exact last parts
  // first.
  std::string nearest;
  for (const auto& candidate : known) {
    if (last_part(candidate) == last_part(path)) nearest = candidate;
  }
  auto names = known;
  for (const auto& [theirs, ours] : kElsewhere) {
    const bool is_known = std::find(known.begin(), known.end(), ours) != known.end();
    if (is_known) names.emplace_back(theirs);
  }
  if (nearest.empty()) nearest = nearest_name(path.substr(0, 64), names);
  for (const auto& [theirs, ours] : kElsewhere) {
    if (nearest == theirs) nearest = ours;
  }
  fail("config", "unknown key ", shown(path), "; the nearest known one is ", nearest,
       " (`poise config --reference` lists all)");
}

}  // namespace config

Config Config::from_json(const std::string& text, const std::vector<std::string>& overrides,
                         const std::string& place) {
  using config::with_place;
  const std::string where = config::shown(place);
  Config result;
  with_place(where, [&] { config::read_document(result, config::parse(text)); });
  for (const auto& setting : overrides) {
    with_place("setting " + config::shown(setting),
               [&] { config::read_override(result, setting); });
  }
  // Settings that contradict each other may come from both.
  const bool both = !where.empty() && !overrides.empty();
  with_place(both ? where + " with the settings given beside it" : where,
             [&] { result.validate(); });
  return result;
}

Config Config::from_json_file(const std::string& path, const std::vector<std::string>& overrides) {
  std::ifstream file(path, std::ios::binary);
  std::string text(config::kMaxBytes + 1, '\0');
  // A folder opens but does not read; a longer file is refused by its first bytes.
  if (!file ||
      (!file.read(text.data(), static_cast<std::streamsize>(text.size())) && !file.eof())) {
    fail("config", "cannot read ", config::shown(path), "; check that it is a readable file");
  }
  text.resize(static_cast<std::size_t>(file.gcount()));
  return from_json(text, overrides, path);
}

std::string Config::to_json() const {
  config::Json out = config::Json::object();
  for (const auto& key : config::keys()) {
    const auto dot = key.path.find('.');
    out[key.path.substr(0, dot)][key.path.substr(dot + 1)] = key.write(*this);
  }
  // A path need not be UTF-8, and where it is not, no text of JSON has it.
  return out.dump(2, ' ', /*ensure_ascii=*/false, config::Json::error_handler_t::replace) + "\n";
}

}  // namespace poise

// The one table of settings: key, kind, field, sentence. Reading, messages, printing and the
// reference page all walk it, so they cannot drift apart.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "config/kinds.h"

namespace poise::config {

template <class Owner>
struct Key {
  std::string path;  // "optimizer.lr"; inside a group only "lr_multiplier"
  std::string type;
  std::string allowed;
  std::string doc;
  // Throws Error naming `path`, the value and what is allowed; the owner is then unchanged.
  std::function<void(Owner&, const Json& value, const std::string& path)> read;
  std::function<Json(const Owner&)> write;
};

struct Section {
  std::string name;
  std::string doc;
};

const std::vector<Section>& sections();            // in the order of Config
const std::vector<Key<Config>>& keys();            // in the order of the sections
const std::vector<Key<ParamGroup>>& group_keys();  // of one entry of optimizer.groups

// The value as it may stand in a message: short, printable.
std::string shown(const Json& value);
std::string shown(const std::string& text);

// Throws Error for a key that is in nobody's table, naming the nearest of `known`.
[[noreturn]] void fail_unknown(const std::string& path, const std::vector<std::string>& known);

}  // namespace poise::config

// docs/config.md, written from the schema.
#include "config/schema.h"

namespace poise::config {
namespace {

// A table cell: a bar would end it.
std::string cell(const std::string& text) {
  std::string out;
  for (const char c : text) out += c == '|' ? std::string("\\|") : std::string(1, c);
  return out;
}

template <class Owner>
std::string rows(const std::vector<Key<Owner>>& keys, const std::string& section,
                 const std::string& prefix) {
  const Owner defaults{};
  std::string out = "| key | type | default | allowed | |\n|---|---|---|---|---|\n";
  for (const auto& key : keys) {
    if (key.path.rfind(section, 0) != 0) continue;
    out += "| `" + prefix + key.path + "` | " + key.type + " | `" + key.write(defaults).dump() +
           "` | " + cell(key.allowed) + " | " + cell(key.doc) + " |\n";
  }
  return out;
}

}  // namespace

std::string reference() {
  std::string out =
      "# Settings\n\n"
      "This page is made from the schema that reads the file: `poise config --reference > "
      "docs/config.md`.\n"
      "A test compares the two.\n\n"
      "A configuration is one JSON object of sections; `//` and `/* */` comments are allowed. "
      "Every key has a\n"
      "default. An unknown key, a repeated key, a value outside what is allowed and settings that "
      "contradict\n"
      "each other are errors. On the command line `--set optimizer.lr=1e-3` replaces one value.\n";
  for (const auto& section : sections()) {
    out += "\n## " + section.name + "\n\n" + section.doc + "\n\n" +
           rows(keys(), section.name + ".", "");
    if (section.name == "optimizer") {
      out +=
          "\nOne entry of `optimizer.groups`:\n\n" + rows(group_keys(), "", "optimizer.groups[].");
    }
  }
  return out;
}

}  // namespace poise::config

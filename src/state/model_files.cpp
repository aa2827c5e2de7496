// From files of tensors to a model.
#include "poise/model_files.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "core/nearest_name.h"
#include "poise/error.h"
#include "state/files.h"
#include "state/safetensors.h"

namespace poise::state {
namespace {

constexpr char kWhole[] = "model.safetensors";
constexpr char kIndex[] = "model.safetensors.index.json";
constexpr std::uint64_t kLargestIndex = std::uint64_t{64} << 20;

struct Found {
  std::shared_ptr<const InputFile> file;
  TensorEntry tensor;
  std::uint64_t data_begin = 0;
};
using FoundByName = std::map<std::string, Found>;

// The names of the parts; only names, whatever the index says.
std::set<std::string> parts_of(const std::string& index_path) {
  const auto json =
      nlohmann::json::parse(read_file(index_path, kLargestIndex), nullptr, /*exceptions=*/false);
  std::set<std::string> parts;
  const bool has_map = json.is_object() && json.contains("weight_map");
  if (has_map && json["weight_map"].is_object()) {
    for (const auto& part : json["weight_map"]) {
      const bool fits = part.is_string();
      const auto name = fits ? part.get<std::string>() : std::string();
      if (name.empty() || name.find('/') != std::string::npos || name.front() == '.') {
        fail("state", index_path, " names a part '", name, "', which is no file beside it");
      }
      parts.insert(name);
    }
  }
  if (parts.empty()) fail("state", index_path, " has no weight_map; get the model again");
  return parts;
}

std::vector<std::string> files_of(const std::string& path) {
  if (is_file(path)) return {path};
  if (is_file(in(path, kIndex))) {
    std::vector<std::string> files;
    for (const auto& part : parts_of(in(path, kIndex))) files.push_back(in(path, part));
    return files;
  }
  if (is_file(in(path, kWhole))) return {in(path, kWhole)};
  fail("state", "no model in ", path, "; give a safetensors file, or a folder with ", kWhole,
       " or ", kIndex);
}

FoundByName tensors_in(const std::string& path) {
  FoundByName all;
  for (const auto& name : files_of(path)) {
    const auto file = std::make_shared<const InputFile>(name);
    const auto header = read_header(*file);
    for (const auto& tensor : header.tensors) {
      if (!all.emplace(tensor.name, Found{file, tensor, header.data_begin}).second) {
        fail("state", path, " has the tensor '", tensor.name, "' in two files");
      }
    }
  }
  return all;
}

void fill(const at::Tensor& target, const Found& found) {
  auto values = at::empty(found.tensor.shape, at::TensorOptions().dtype(found.tensor.type));
  found.file->read(values.mutable_data_ptr(), values.nbytes(),
                   found.data_begin + found.tensor.begin);
  target.detach().copy_(values);
}

}  // namespace

std::vector<std::string> load_model(const ModelView& model, const std::string& path,
                                    const NameMap& name_in_file) {
  const auto tensors = tensors_in(path);
  std::vector<std::string> names;
  for (const auto& [name, found] : tensors) names.push_back(name);
  std::vector<std::pair<at::Tensor, const Found*>> work;
  std::set<std::string> taken;
  const auto match = [&](const NamedTensor& one, bool is_parameter) {
    const auto wanted = name_in_file ? name_in_file(one.name) : one.name;
    const auto found = tensors.find(wanted);
    if (found == tensors.end()) {
      if (!is_parameter) return;
      fail("state", path, " has no tensor '", wanted, "' for parameter '", one.name,
           "'; the nearest is '", nearest_name(wanted, names), "'");
    }
    if (one.tensor.sizes() != at::IntArrayRef(found->second.tensor.shape)) {
      fail("state", "'", one.name, "' has shape ", one.tensor.sizes(), ", and '", wanted, "' in ",
           path, " ", at::IntArrayRef(found->second.tensor.shape));
    }
    taken.insert(wanted);
    work.emplace_back(one.tensor, &found->second);
  };
  for (const auto& parameter : model.parameters) match(parameter, true);
  for (const auto& buffer : model.buffers) match(buffer, false);
  at::NoGradGuard no_grad;
  for (const auto& [target, found] : work) fill(target, *found);
  std::erase_if(names, [&](const std::string& name) { return taken.count(name) > 0; });
  return names;
}

}  // namespace poise::state

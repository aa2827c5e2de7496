// Lays out a model's parameters: ties folded, overlaps refused, each parameter given a place in a
// flat.
#include "poise/core.h"

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <unordered_map>

#include "core/nearest_name.h"

namespace poise {
namespace {

std::string shape_text(at::IntArrayRef sizes) { return join('[', c10::Join(", ", sizes), ']'); }

// Bytes [first, last) that a tensor spans in its storage.
struct ByteRange {
  const char* first;
  const char* last;
  std::string name;
};

ByteRange byte_range(const NamedTensor& named) {
  const auto& tensor = named.tensor;
  const auto* first = static_cast<const char*>(tensor.const_data_ptr());
  return {first, first + tensor.numel() * tensor.element_size(), named.name};
}

void refuse_what_cannot_be_laid_out(const NamedTensor& named, const at::Device& device) {
  const auto& tensor = named.tensor;
  if (tensor.layout() != at::kStrided) {
    fail("core", "parameter '", named.name, "' is not a dense tensor (layout ", tensor.layout(),
         "); use a dense parameter");
  }
  if (tensor.device() != device) {
    fail("core", "parameters on several devices: '", named.name, "' is on ", tensor.device(),
         ", the first parameter on ", device, "; move the model to one device");
  }
  if (tensor.requires_grad() && !at::isFloatingType(tensor.scalar_type())) {
    fail("core", "parameter '", named.name, "' is trainable and of type ", tensor.scalar_type(),
         "; masters, sums of gradients and moments are real: keep the parameter as "
         "torch.view_as_real of it, and use torch.view_as_complex of that in forward");
  }
  if (!tensor.is_non_overlapping_and_dense()) {
    fail("core", "parameter '", named.name, "' of shape ", shape_text(tensor.sizes()),
         " and strides ", shape_text(tensor.strides()),
         " has gaps or repeats in memory; make it contiguous first");
  }
}

void refuse_overlaps(std::vector<ByteRange> ranges) {
  std::sort(ranges.begin(), ranges.end(), [](auto& a, auto& b) { return a.first < b.first; });
  for (std::size_t i = 1; i < ranges.size(); ++i) {
    if (ranges[i].first < ranges[i - 1].last) {
      fail("core", "parameters '", ranges[i - 1].name, "' and '", ranges[i].name,
           "' overlap in memory; tie them by using the same parameter object, or clone one");
    }
  }
}

std::int64_t padded(std::int64_t numel) {
  constexpr auto a = ParamTable::kAlignment;
  return (numel + a - 1) / a * a;
}

struct Hash {
  std::uint64_t value = 14695981039346656037ull;  // FNV-1a offset basis
  void bytes(const void* data, std::size_t size) {
    const auto* p = static_cast<const unsigned char*>(data);
    for (std::size_t i = 0; i < size; ++i) value = (value ^ p[i]) * 1099511628211ull;
  }
  void number(std::int64_t n) { bytes(&n, sizeof n); }
  void text(const std::string& s) {
    number(static_cast<std::int64_t>(s.size()));
    bytes(s.data(), s.size());
  }
};

}  // namespace

ParamTable::ParamTable(const ModelView& model, std::int64_t small_below) {
  if (model.parameters.empty()) {
    fail("core", "the model has no parameters; pass a model with at least one trainable parameter");
  }
  // Folds ties: one entry per tensor object, the later names become aliases.
  std::unordered_map<const void*, int> entry_of;
  std::unordered_map<std::string, int> entry_of_name;
  const auto device = model.parameters.front().tensor.device();
  std::vector<Entry> found;
  std::vector<ByteRange> ranges;
  for (const auto& named : model.parameters) {
    if (!named.tensor.defined()) {
      fail("core", "parameter '", named.name, "' is an undefined tensor; remove or define it");
    }
    const auto [it, is_new] =
        entry_of.try_emplace(named.tensor.unsafeGetTensorImpl(), static_cast<int>(found.size()));
    if (!entry_of_name.try_emplace(named.name, it->second).second) {
      fail("core", "two parameters are named '", named.name,
           "'; give every parameter its own name");
    }
    if (!is_new) {
      found[it->second].aliases.push_back(named.name);
      continue;
    }
    refuse_what_cannot_be_laid_out(named, device);
    // One that was made without memory gets its own later.
    if (named.tensor.numel() > 0 && named.tensor.storage().nbytes() > 0) {
      ranges.push_back(byte_range(named));
    }
    Entry entry;
    entry.name = named.name;
    entry.sizes = named.tensor.sizes().vec();
    entry.dtype = named.tensor.scalar_type();
    entry.trainable = named.tensor.requires_grad();
    entry.numel = named.tensor.numel();
    entry.unit = -1;
    found.push_back(std::move(entry));
  }
  refuse_overlaps(std::move(ranges));

  // Canonical order: the view's units, then the rest; a tied parameter lives in the first unit, or
  // in the rest where it has a name that no unit lists: it is used outside of them, too.
  const auto rest = static_cast<int>(model.units.size());
  std::set<std::string> listed;
  for (const auto& unit : model.units) {
    listed.insert(unit.parameters.begin(), unit.parameters.end());
  }
  const auto used_outside = [&](const Entry& entry) {
    return listed.count(entry.name) == 0 ||
           std::any_of(entry.aliases.begin(), entry.aliases.end(),
                       [&](const std::string& alias) { return listed.count(alias) == 0; });
  };
  std::vector<int> order;
  const auto place = [&](int index, int unit) {
    if (found[index].unit >= 0) return;
    found[index].unit = unit;
    order.push_back(index);
  };
  for (const auto& unit : model.units) {
    for (const auto& name : unit.parameters) {
      const auto it = entry_of_name.find(name);
      if (it == entry_of_name.end()) {
        fail("core", "unit '", unit.name, "' lists a parameter '", name,
             "' that the model does not have");
      }
      if (!used_outside(found[it->second])) place(it->second, static_cast<int>(units_.size()));
    }
    std::set<int> needs{static_cast<int>(units_.size())};
    for (const auto& name : unit.parameters) {
      const int unit_of = found[entry_of_name.at(name)].unit;
      needs.insert(unit_of < 0 ? rest : unit_of);
    }
    needs_.emplace_back(needs.begin(), needs.end());
    units_.push_back(unit.name);
  }
  for (std::size_t i = 0; i < found.size(); ++i) place(static_cast<int>(i), rest);
  if (std::any_of(found.begin(), found.end(), [&](const Entry& e) { return e.unit == rest; })) {
    units_.push_back("rest");
    needs_.push_back({rest});
    rest_unit_ = rest;
  }

  std::map<std::tuple<int, at::ScalarType, bool, bool>, int> flat_of;
  for (const int index : order) {
    auto& entry = found[index];
    const bool small = entry.numel < small_below;
    const auto key = std::tuple(entry.unit, entry.dtype, entry.trainable, small);
    const auto [it, is_new] = flat_of.try_emplace(key, static_cast<int>(flats_.size()));
    if (is_new) flats_.push_back({entry.unit, entry.dtype, entry.trainable, small, 0, {}});
    auto& flat = flats_[it->second];
    entry.flat = it->second;
    entry.offset = flat.numel;
    flat.numel += padded(entry.numel);
    flat.entries.push_back(static_cast<int>(entries_.size()));
    entries_.push_back(std::move(entry));
  }
}

int ParamTable::find(const std::string& name) const {
  std::vector<std::string> names;
  for (std::size_t i = 0; i < entries_.size(); ++i) {
    const auto& entry = entries_[i];
    if (entry.name == name ||
        std::find(entry.aliases.begin(), entry.aliases.end(), name) != entry.aliases.end()) {
      return static_cast<int>(i);
    }
    names.push_back(entry.name);
  }
  fail("core", "no parameter named '", name, "'; the nearest is '", nearest_name(name, names), "'");
}

std::uint64_t ParamTable::hash() const {
  Hash hash;
  for (const auto& entry : entries_) {
    hash.text(entry.name);
    for (const auto size : entry.sizes) hash.number(size);
    hash.number(static_cast<std::int64_t>(entry.dtype));
    hash.number(entry.trainable);
    hash.number(entry.unit);
    hash.number(entry.flat);
    hash.number(entry.offset);
  }
  return hash.value;
}

}  // namespace poise

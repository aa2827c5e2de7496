// Opening, checking and reading.
#include "state/saved.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>

#include <algorithm>
#include <utility>

#include "poise/error.h"
#include "state/safetensors.h"
#include "state/staging.h"

namespace poise::state {
namespace {

at::Tensor on_host(std::int64_t numel, c10::ScalarType type) {
  return at::empty({numel}, at::TensorOptions().dtype(type).device(at::kCPU));
}

}  // namespace

Saved::Saved(std::string folder) : folder_(std::move(folder)), manifest_(read_manifest(folder_)) {
  for (std::size_t i = 0; i < manifest_.files.size(); ++i) {
    if (file(i).size() != manifest_.files[i].bytes) {
      fail("state", file(i).path(), " has ", file(i).size(), " bytes, and had ",
           manifest_.files[i].bytes, " when it was saved; load another save");
    }
    if (manifest_.files[i].rank) open_shard(i);
  }
  if (static_cast<std::int64_t>(own_.size()) != manifest_.ranks) {
    fail("state", folder_, " is damaged: it has the shards of ", own_.size(), " of ",
         manifest_.ranks, " ranks; load another save");
  }
  for (std::size_t i = 0; i < manifest_.parameters.size(); ++i) {
    const auto& parameter = manifest_.parameters[i];
    by_name_.emplace(parameter.name, i);
    for (const auto& alias : parameter.aliases) by_name_.emplace(alias, i);
    if (!parameter.trainable) {
      check_cover(parameter, kValue, parameter.numel(), "");
      continue;
    }
    check_cover(parameter, kMaster, parameter.numel(), "F32");
    for (std::size_t i = 0; i < manifest_.moments.size(); ++i) {
      const auto& one = manifest_.moments[i];
      check_cover(parameter, moment(static_cast<std::int64_t>(i)), one.numel(parameter), one.dtype);
    }
  }
}

const InputFile& Saved::file(std::size_t index) const {
  if (!open_ || open_index_ != index) {
    open_.emplace(in(folder_, manifest_.files[index].name));
    open_index_ = index;
  }
  return *open_;
}

void Saved::open_shard(std::size_t index) {
  const auto& input = file(index);
  const auto rank = *manifest_.files[index].rank;
  const auto header = read_header(input);
  if (rank >= manifest_.ranks) {
    fail("state", folder_, " is damaged: its manifest has a shard of rank ", rank, " of ",
         manifest_.ranks, "; load another save");
  }
  if (own_.emplace(rank, header.metadata).first->second != header.metadata) {
    fail("state", folder_, " is damaged: the files of rank ", rank,
         " have other values of its own; load another save");
  }
  for (const auto& tensor : header.tensors) {
    const auto key = key_from(tensor.name, input.path());
    if (key.kind == kPadding) continue;
    if (tensor.shape.size() != 1) {
      fail("state", input.path(), " is damaged: '", tensor.name, "' is no run of elements");
    }
    const Place place{key.begin, tensor.shape[0], index, header.data_begin + tensor.begin,
                      tensor.type};
    if (key.kind == kBuffer || key.kind == kRandom) {
      if (!wholes_.emplace(std::tuple(key.kind, key.name, rank), place).second) {
        fail("state", folder_, " is damaged: the ", key.kind, " '", key.name, "' of rank ", rank,
             " is there twice; load another save");
      }
    } else if (place.numel > 0 && !pieces_[{key.kind, key.name}].emplace(key.begin, place).second) {
      fail("state", folder_, " is damaged: element ", key.begin, " of '", key.name,
           "' is there twice; load another save");
    }
  }
}

// Every element once; `dtype` empty: any.
void Saved::check_cover(const SavedParameter& parameter, const std::string& kind,
                        std::int64_t numel, const std::string& dtype) const {
  std::int64_t at = 0;
  const auto found = pieces_.find({kind, parameter.name});
  if (found != pieces_.end()) {
    for (const auto& [begin, place] : found->second) {
      const bool fits = begin == at && place.numel <= numel - at;
      if (!fits || (!dtype.empty() && dtype_name(place.type) != dtype)) break;
      at += place.numel;
    }
  }
  if (at != numel) {
    fail("state", folder_, " is damaged: of the ", kind, " of parameter '", parameter.name,
         "' element ", at, " of ", numel, " is missing; load another save");
  }
}

std::map<std::string, std::string> Saved::own(int rank, int ranks) const {
  return ranks == manifest_.ranks ? own_.at(rank) : std::map<std::string, std::string>();
}

void Saved::verify(int part, int of) const {
  for (std::size_t i = static_cast<std::size_t>(part); i < manifest_.files.size();
       i += static_cast<std::size_t>(of)) {
    if (file(i).digest(manifest_.files[i].hash) != manifest_.files[i].digest) {
      fail("state", file(i).path(),
           " is damaged: its checksum is not the one it was saved with; load another save");
    }
  }
}

const SavedParameter* Saved::parameter(const std::string& name) const {
  const auto found = by_name_.find(name);
  return found == by_name_.end() ? nullptr : &manifest_.parameters[found->second];
}

at::Tensor Saved::read_place(const Place& place) const {
  auto values = on_host(place.numel, place.type);
  file(place.file).read(values.mutable_data_ptr(), values.nbytes(), place.offset);
  return values;
}

at::Tensor Saved::whole(const std::string& kind, const std::string& name, int rank) const {
  const auto found = wholes_.find({kind, name, rank});
  return found == wholes_.end() ? at::Tensor() : read_place(found->second);
}

// Straight into the target where types are equal, else tile by tile.
void Saved::read_run(const Places& places, std::int64_t begin, const at::Tensor& target) const {
  const auto end = begin + target.numel();
  for (auto at = begin; at < end;) {
    const auto& place = std::prev(places.upper_bound(at))->second;
    const auto element = static_cast<std::int64_t>(c10::elementSize(place.type));
    const auto offset = place.offset + static_cast<std::uint64_t>((at - place.begin) * element);
    auto length = std::min(end, place.begin + place.numel) - at;
    const bool direct = target.is_cpu() && target.scalar_type() == place.type;
    if (!direct) length = std::min(length, static_cast<std::int64_t>(kTile) / element);
    const auto part = target.narrow(0, at - begin, length);
    if (direct) {
      file(place.file).read(part.mutable_data_ptr(), part.nbytes(), offset);
    } else {
      const auto tile = on_host(length, place.type);
      file(place.file).read(tile.mutable_data_ptr(), tile.nbytes(), offset);
      part.copy_(tile);
    }
    at += length;
  }
}

bool Saved::in_elements(const std::string& kind) const {
  for (std::size_t i = 0; i < manifest_.moments.size(); ++i) {
    const auto& one = manifest_.moments[i];
    if (kind == moment(static_cast<std::int64_t>(i))) return one.block == 1 && !one.factored;
  }
  return true;
}

void Saved::read(const std::string& kind, const SavedParameter& parameter, std::int64_t begin,
                 const std::vector<std::int64_t>& order, const at::Tensor& target) const {
  at::NoGradGuard no_grad;
  if (target.numel() == 0) return;
  const auto found = pieces_.find({kind, parameter.name});
  POISE_CHECK(found != pieces_.end() && target.is_contiguous(), kind, ' ', parameter.name);
  const auto& places = found->second;
  const auto saved_numel = std::prev(places.end())->first + std::prev(places.end())->second.numel;
  POISE_CHECK(begin >= 0 && begin + target.numel() <= saved_numel, parameter.name);
  if (!in_elements(kind)) return read_run(places, begin, target);
  if (same_order(parameter.shape, parameter.order, order)) return read_run(places, begin, target);
  // The model lays it out another way than the one that saved: through the whole parameter.
  const auto saved = on_host(parameter.numel(), places.begin()->second.type);
  read_run(places, 0, saved);
  const auto wanted =
      at::empty_strided(parameter.shape, strides_of(parameter.shape, order), saved.options());
  wanted.copy_(saved.as_strided(parameter.shape, strides_of(parameter.shape, parameter.order)));
  target.copy_(wanted.as_strided({target.numel()}, {1}, begin));
}

c10::ScalarType Saved::type_of(const std::string& kind, const SavedParameter& parameter) const {
  const auto found = pieces_.find({kind, parameter.name});
  if (found == pieces_.end()) return c10::ScalarType::Float;  // it has no elements
  return found->second.begin()->second.type;
}

bool same_order(const std::vector<std::int64_t>& shape, const std::vector<std::int64_t>& a,
                const std::vector<std::int64_t>& b) {
  const auto telling = [&](std::vector<std::int64_t> order) {
    std::erase_if(order, [&](auto d) { return shape[static_cast<std::size_t>(d)] == 1; });
    return order;
  };
  return telling(a) == telling(b);
}

std::vector<std::int64_t> strides_of(const std::vector<std::int64_t>& shape,
                                     const std::vector<std::int64_t>& order) {
  std::vector<std::int64_t> strides(shape.size());
  std::int64_t stride = 1;
  for (auto at = order.rbegin(); at != order.rend(); ++at) {
    strides[static_cast<std::size_t>(*at)] = stride;
    stride *= std::max<std::int64_t>(1, shape[static_cast<std::size_t>(*at)]);
  }
  return strides;
}

std::vector<std::int64_t> order_of(at::IntArrayRef sizes, at::IntArrayRef strides) {
  std::vector<std::int64_t> order(sizes.size());
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = static_cast<std::int64_t>(i);
  std::stable_sort(order.begin(), order.end(), [&](auto a, auto b) {
    return strides[static_cast<std::size_t>(a)] > strides[static_cast<std::size_t>(b)];
  });
  return order;
}

}  // namespace poise::state

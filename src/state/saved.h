// A save, opened to be read: which files hold which elements of what. Opening checks the manifest
// and every header; verify() the bytes of all files.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "state/contents.h"
#include "state/files.h"
#include "state/manifest.h"

namespace poise::state {

class Saved {
 public:
  explicit Saved(std::string folder);  // throws Error naming the file and what is wrong with it

  const std::string& path() const { return folder_; }
  const Manifest& manifest() const { return manifest_; }
  // This rank's own values of the save; empty where another number of ranks saved.
  std::map<std::string, std::string> own(int rank, int ranks) const;

  // Reads every file `part`, `part` + `of`, ... from end to end; throws Error where one is not what
  // was written.
  void verify(int part = 0, int of = 1) const;

  // The parameter of this name or alias; null: there is none.
  const SavedParameter* parameter(const std::string& name) const;

  // Elements [begin, begin + target.numel()) of a parameter's master, moment or value into `target`
  // (1-D, contiguous; cast where its type is another). `order`: of the target's dimensions in
  // memory, which `begin` counts in; no matter for moments in blocks or factors.
  void read(const std::string& kind, const SavedParameter& parameter, std::int64_t begin,
            const std::vector<std::int64_t>& order, const at::Tensor& target) const;

  // That a parameter's master, moment or value is saved in.
  c10::ScalarType type_of(const std::string& kind, const SavedParameter& parameter) const;

  // What a rank saved of a whole tensor: its own buffer or generator. Undefined: it has none.
  at::Tensor whole(const std::string& kind, const std::string& name, int rank) const;

 private:
  struct Place {
    std::int64_t begin = 0;  // elements of the parameter
    std::int64_t numel = 0;
    std::size_t file = 0;
    std::uint64_t offset = 0;  // bytes
    c10::ScalarType type = c10::ScalarType::Float;
  };
  using Places = std::map<std::int64_t, Place>;  // by begin

  const InputFile& file(std::size_t index) const;
  void open_shard(std::size_t index);
  void check_cover(const SavedParameter& parameter, const std::string& kind, std::int64_t numel,
                   const std::string& dtype) const;
  bool in_elements(const std::string& kind) const;  // one of each of the parameter's
  void read_run(const Places& places, std::int64_t begin, const at::Tensor& target) const;
  at::Tensor read_place(const Place& place) const;

  std::string folder_;
  Manifest manifest_;
  mutable std::optional<InputFile> open_;  // the one read last: descriptors are few
  mutable std::size_t open_index_ = 0;
  std::map<std::string, std::size_t> by_name_;                    // parameters, under each name
  std::map<std::pair<std::string, std::string>, Places> pieces_;  // by kind and name
  // Buffers and generators: by kind, name and rank.
  std::map<std::tuple<std::string, std::string, std::int64_t>, Place> wholes_;
  std::map<std::int64_t, std::map<std::string, std::string>> own_;  // by rank
};

// Whether elements lie alike in memory: dimensions of one element have no place.
bool same_order(const std::vector<std::int64_t>& shape, const std::vector<std::int64_t>& a,
                const std::vector<std::int64_t>& b);
std::vector<std::int64_t> strides_of(const std::vector<std::int64_t>& shape,
                                     const std::vector<std::int64_t>& order);
std::vector<std::int64_t> order_of(at::IntArrayRef sizes, at::IntArrayRef strides);

}  // namespace poise::state

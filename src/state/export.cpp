// The model of a save as one safetensors file.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <sys/stat.h>

#include <algorithm>
#include <cstring>
#include <memory>

#include "poise/error.h"
#include "poise/state.h"
#include "state/safetensors.h"
#include "state/saved.h"
#include "state/staging.h"

namespace poise::state {
namespace {

constexpr auto kSector = static_cast<std::size_t>(offload::kSector);

// Bytes in any pieces, to a file that takes aligned tiles.
class Appender {
 public:
  explicit Appender(const std::string& path)
      : file_(path), tile_(std::make_unique<char[]>(kTile + kSector)) {
    const auto address = reinterpret_cast<std::uintptr_t>(tile_.get());
    data_ = reinterpret_cast<char*>((address + kSector - 1) / kSector * kSector);
  }
  void append(const void* bytes, std::size_t size) {
    const auto* from = static_cast<const char*>(bytes);
    while (size > 0) {
      const auto length = std::min(size, kTile - filled_);
      std::memcpy(data_ + filled_, from, length);
      filled_ += length;
      from += length;
      size -= length;
      if (filled_ == kTile) flush();
    }
  }
  void finish() {
    if (filled_ > 0) flush();
    file_.finish();
  }

 private:
  void flush() {
    file_.write(data_, filled_);
    filled_ = 0;
  }
  OutputFile file_;
  std::unique_ptr<char[]> tile_;
  char* data_ = nullptr;
  std::size_t filled_ = 0;
};

// What one name of the file is read from.
struct Source {
  const SavedParameter* parameter = nullptr;  // else the buffer of this name
  TensorEntry entry;
};

std::vector<Source> sources_of(const Saved& saved) {
  std::vector<Source> sources;
  for (const auto& parameter : saved.manifest().parameters) {
    auto names = parameter.aliases;
    names.insert(names.begin(), parameter.name);
    for (const auto& name : names) {
      sources.push_back({&parameter, {name, dtype_of(parameter.dtype), parameter.shape, 0, 0}});
    }
  }
  for (const auto& buffer : saved.manifest().buffers) {
    sources.push_back({nullptr, {buffer.name, dtype_of(buffer.dtype), buffer.shape, 0, 0}});
  }
  std::stable_sort(sources.begin(), sources.end(), [](const Source& a, const Source& b) {
    return c10::elementSize(a.entry.type) > c10::elementSize(b.entry.type);
  });
  return sources;
}

at::Tensor read(const Saved& saved, const SavedParameter& parameter, c10::ScalarType type) {
  std::vector<std::int64_t> by_rows(parameter.shape.size());
  for (std::size_t i = 0; i < by_rows.size(); ++i) by_rows[i] = static_cast<std::int64_t>(i);
  auto values = at::empty({parameter.numel()}, type);
  saved.read(parameter.trainable ? kMaster : kValue, parameter, 0, by_rows, values);
  return values;
}

at::Tensor values_of(const Saved& saved, const Source& source) {
  if (!source.parameter) return saved.whole(kBuffer, source.entry.name, 0);
  return read(saved, *source.parameter, source.entry.type);
}

c10::ScalarType widened(c10::ScalarType type) {
  return c10::isFloatingType(type) && c10::elementSize(type) < 4 ? at::kFloat : type;
}

}  // namespace

std::vector<std::pair<std::string, at::Tensor>> read_model(const std::string& save, Frozen frozen) {
  at::NoGradGuard no_grad;
  const Saved saved(save);
  saved.verify();
  std::vector<std::pair<std::string, at::Tensor>> model;
  for (const auto& parameter : saved.manifest().parameters) {
    if (!parameter.trainable && frozen == Frozen::left_out) continue;
    const auto type = parameter.trainable ? at::kFloat : widened(dtype_of(parameter.dtype));
    const auto values = read(saved, parameter, type).view(parameter.shape);
    model.emplace_back(parameter.name, values);
    for (const auto& alias : parameter.aliases) model.emplace_back(alias, values);
  }
  for (const auto& buffer : saved.manifest().buffers) {
    const auto values = saved.whole(kBuffer, buffer.name, 0);
    if (!values.defined()) fail("state", save, " is damaged: it has no '", buffer.name, "'");
    model.emplace_back(buffer.name, values.view(buffer.shape).to(widened(dtype_of(buffer.dtype))));
  }
  return model;
}

void export_model(const std::string& save, const std::string& file) {
  // A device or a pipe would be gone for all: the file takes its place, and is not written into it.
  struct stat found {};
  if (::stat(file.c_str(), &found) == 0 && !S_ISREG(found.st_mode)) {
    fail("state", file, " is there and is no file, so that it is not replaced; name a file");
  }
  at::NoGradGuard no_grad;
  const Saved saved(save);
  saved.verify();
  const auto sources = sources_of(saved);
  std::vector<TensorEntry> entries;
  for (const auto& source : sources) entries.push_back(source.entry);
  const auto unfinished = file + ".saving";
  remove_tree(unfinished);
  Appender out(unfinished);
  const auto header = write_header(entries, {{"format", "pt"}});
  out.append(header.data(), header.size());
  for (std::size_t i = 0; i < sources.size(); ++i) {
    const auto values = values_of(saved, sources[i]);
    if (!values.defined() || values.nbytes() != entries[i].end - entries[i].begin) {
      fail("state", save, " is damaged: '", entries[i].name, "' is not what its manifest says");
    }
    out.append(values.const_data_ptr(), values.nbytes());
  }
  out.finish();
  rename_over(unfinished, file);
}

}  // namespace poise::state

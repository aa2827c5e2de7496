// manifest.json: what a save holds, and the checksum of everything in it, its own included.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "offload/digest.h"

namespace poise::state {

inline constexpr char kManifest[] = "manifest.json";
// Of the format; a reader refuses newer ones. 2: moments that are not fp32 numbers of elements.
// 3: files with XXH3 instead of XXH64. 4: several files of a rank.
inline constexpr std::int64_t kVersion = 4;

// A parameter's spans count elements in the order in which it lies in memory.
struct SavedParameter {
  std::string name;
  std::vector<std::string> aliases;
  std::vector<std::int64_t> shape;
  std::vector<std::int64_t> order;  // of its dimensions in memory, slowest first
  std::string dtype;                // the model's own, before poise cast it
  bool trainable = true;    // has a master and moments; else its values are kept as they are
  std::int64_t missed = 0;  // updates, while it was frozen
  std::int64_t numel() const;
};

// What one moment of the optimizer is: elements of a type, each for `block` of the parameter's, or
// its factors (optim::Moment).
struct SavedMoment {
  std::string dtype = "F32";
  std::int64_t block = 1;
  bool factored = false;
  std::int64_t numel(const SavedParameter& parameter) const;
  bool operator==(const SavedMoment&) const = default;
};

struct SavedBuffer {
  std::string name;
  std::vector<std::int64_t> shape;
  std::string dtype;
};

// Where the training is.
struct Progress {
  std::int64_t updates = 0;
  std::int64_t skipped = 0;
  double loss_scale = 1;
  std::int64_t clean_updates = 0;  // since the loss scale changed
  std::int64_t overflows_in_row = 0;
  struct Noise {
    double variance = 0, signal = 0;
  };
  std::optional<Noise> noise;  // averages of engine.noise_scale, where it was measured
  std::optional<std::int64_t> loss_weight_exponent;  // fp16: q of the run's first micro-batch
};

struct SavedFile {
  std::string name;  // its path inside the save
  std::uint64_t bytes = 0;
  std::uint64_t digest = 0;
  offload::Hash hash = offload::Hash::xxh3;  // of the digest
  std::optional<std::int64_t> rank;          // whose shard it is
};

struct Manifest {
  std::int64_t version = kVersion;
  std::string written_by;  // version of poise
  std::string config;      // its JSON
  std::uint64_t table_hash = 0;
  std::int64_t ranks = 1;
  std::int64_t stage = 0;
  std::string optimizer;
  std::vector<SavedMoment> moments;
  double learning_rate = 0;  // of the next update: to read, not to load
  Progress progress;
  std::optional<std::int64_t> cursor;
  std::map<std::string, std::string> user;
  std::vector<SavedParameter> parameters;
  std::vector<SavedBuffer> buffers;
  std::vector<SavedFile> files;
};

std::string to_text(const Manifest& manifest);
// Throws Error naming `path`: another checksum than its own, a newer version, something that is not
// what a manifest says there.
Manifest manifest_from(const std::string& text, const std::string& path);
Manifest read_manifest(const std::string& folder);

}  // namespace poise::state

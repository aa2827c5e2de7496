// Saves made to do harm: manifests and shards that say anything, under checksums that fit. They are
// read, within their files, or refused with an Error.
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>
#include <random>

#include "offload/digest.h"
#include "state/files.h"
#include "state/training.h"

namespace poise::state {
namespace {

using testing::TempFolder;
using Json = nlohmann::ordered_json;

// The manifest with the checksums of what is there.
std::string sealed(Json manifest, const std::string& folder) {
  for (auto& file : manifest["files"]) {
    const auto path = in(folder, file["name"].get<std::string>());
    if (!is_file(path)) continue;
    const auto bytes = testing::bytes_of(path);
    file["bytes"] = bytes.size();
    offload::Digest digest;
    digest.update(bytes.data(), bytes.size());
    file["xxh3"] = offload::hex(digest.value());
  }
  manifest["xxh64"] = std::string(16, '0');
  auto text = manifest.dump(2) + '\n';
  return text.replace(std::strlen("{\n  \"xxh64\": \""), 16, offload::hex(offload::xxh64_of(text)));
}

// Everything that a load would read.
void read_all(const Saved& saved) {
  saved.verify();
  for (const auto& parameter : saved.manifest().parameters) {
    ASSERT_LT(parameter.numel(), 1 << 20);  // no more than its files hold
    auto values = at::empty({parameter.numel()}, at::kFloat);
    saved.read(parameter.trainable ? kMaster : kValue, parameter, 0, parameter.order, values);
  }
  for (const auto& buffer : saved.manifest().buffers) saved.whole(kBuffer, buffer.name, 0);
}

// While it lives an allocation of many times what the files hold fails with an exception that is no
// Error. Not beside AddressSanitizer, which needs address space of its own.
class LittleMemory {
 public:
  LittleMemory() {
#ifndef __SANITIZE_ADDRESS__
    std::ifstream("/proc/self/statm") >> pages_;
    ::getrlimit(RLIMIT_AS, &old_);
    const rlimit lower{pages_ * 4096 + (std::uint64_t{128} << 20), old_.rlim_max};
    ::setrlimit(RLIMIT_AS, &lower);
#endif
  }
  ~LittleMemory() {
#ifndef __SANITIZE_ADDRESS__
    ::setrlimit(RLIMIT_AS, &old_);
#endif
  }

 private:
  std::uint64_t pages_ = 0;
  rlimit old_{};
};

class Hostile : public ::testing::Test {
 protected:
  void SetUp() override {
    test::TinyModel model;
    auto view = model.view();
    view.buffers = {{"mean", at::zeros({3}, at::kFloat)}};
    model.b2.set_requires_grad(false);
    Engine engine(view, test::adamw_config());
    save = engine.save(folder.path(), {.name = "x", .user = {{"a", "b"}}});
    manifest = Json::parse(testing::bytes_of(in(save, kManifest)));
    shard = testing::bytes_of(in(save, "rank-00000.safetensors"));
  }
  void put(const std::string& name, const std::string& bytes) { folder.write("x/" + name, bytes); }
  // Whether it was read.
  bool opens() {
    try {
      read_all(Saved(save));
      return true;
    } catch (const Error& error) {
      EXPECT_EQ(std::string(error.what()).rfind("[state] ", 0), 0u) << error.what();
    }
    return false;
  }

  TempFolder folder;
  std::string save, shard;
  Json manifest;
};

TEST_F(Hostile, ShardsSayAnything) {
  std::uint64_t length = 0;
  std::memcpy(&length, shard.data(), sizeof length);
  std::mt19937_64 random(5);
  const std::string signs = "{}[]\",:@.0123456789aemoruv ";
  int read = 0;
  const LittleMemory little;
  const auto count = testing::rounds("POISE_FUZZ", 100'000) / 200;
  for (std::int64_t i = 0; i < count; ++i) {
    auto bytes = shard;
    for (auto edits = 1 + random() % 3; edits > 0; --edits) {
      bytes[8 + random() % length] = signs[random() % signs.size()];
    }
    put("rank-00000.safetensors", bytes);
    put(kManifest, sealed(manifest, save));
    if (opens()) ++read;
  }
  EXPECT_GT(read, 0);
}

TEST_F(Hostile, ManifestsSayAnything) {
  std::vector<std::string> places;
  const auto flat = manifest.flatten();
  for (const auto& [pointer, value] : flat.items()) {
    if (pointer.rfind("/config", 0) != 0 && pointer != "/xxh64") places.push_back(pointer);
  }
  const std::vector<Json> values{0,
                                 1,
                                 -1,
                                 1e300,
                                 "",
                                 "x",
                                 true,
                                 nullptr,
                                 Json::array(),
                                 Json::object(),
                                 std::int64_t{1} << 62,
                                 std::uint64_t{1} << 63,
                                 Json::array({1, 2}),
                                 Json::array({std::int64_t{1} << 40}),
                                 "w",
                                 "F64",
                                 "rank-00000.safetensors",
                                 "."};
  std::mt19937_64 random(6);
  int read = 0;
  const LittleMemory little;
  const auto count = testing::rounds("POISE_FUZZ", 100'000) / 200;
  for (std::int64_t i = 0; i < count; ++i) {
    auto changed = manifest;
    try {
      const auto place = places[random() % places.size()];
      changed[Json::json_pointer(place)] = values[random() % values.size()];
      put(kManifest, sealed(changed, save));
    } catch (const Json::exception&) {
      continue;  // the change left no list of files to seal
    }
    if (opens()) ++read;
  }
  EXPECT_GT(read, 0);  // the learning rate is not looked at
}

}  // namespace
}  // namespace poise::state

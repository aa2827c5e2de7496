// What is not what was saved is refused by name, on all ranks, and the engine stays as it was.
#include <gtest/gtest.h>
#include <unistd.h>

#include "state/files.h"
#include "state/manifest.h"
#include "state/training.h"

namespace poise {
namespace {

using testing::message_of;
using testing::TempFolder;

constexpr int kRanks = 2;

// A save of two ranks, loaded by one.
class Damage : public ::testing::Test {
 protected:
  void SetUp() override {
    test::run({.ranks = kRanks, .config = test::adamw_config(2), .save = folder.path(), .end = 2});
    path = state::find(folder.path());
    before = values();
  }

  // Masters, and what is saved of the rest.
  test::Values values() {
    auto now = test::values_of(engine, model);
    for (auto& [name, tensor] : model.slots()) now["master " + name] = engine.master(name).clone();
    return now;
  }
  void expect_refused(const std::string& says) {
    const auto message = message_of([&] { engine.load(path); });
    EXPECT_NE(message.find(says), std::string::npos) << says << "\n" << message;
    ASSERT_EQ(test::first_difference(values(), before), "");
    EXPECT_EQ(engine.updates(), 0);
  }

  TempFolder folder;
  std::string path;
  test::GridModel model;
  Engine engine{model.view(), test::adamw_config()};
  test::Values before;
};

TEST_F(Damage, AnyFlippedBitOfAnyFile) {
  for (const auto& name : state::files_below(path)) {
    const auto file = state::in(path, name);
    const auto good = testing::bytes_of(file);
    // Every byte of the front, and a bit in each part of the rest.
    std::vector<std::size_t> places;
    for (std::size_t at = 0; at < std::min<std::size_t>(good.size(), 64); ++at)
      places.push_back(at);
    for (std::size_t at = 64; at < good.size(); at += 1 + good.size() / 97) places.push_back(at);
    places.push_back(good.size() - 1);
    for (const auto at : places) {
      auto bad = good;
      bad[at] = static_cast<char>(bad[at] ^ (1 << at % 8));
      folder.write(path.substr(folder.path().size() + 1) + "/" + name, bad);
      expect_refused("");
      EXPECT_THROW(engine.load(path), Error) << name << ' ' << at;
    }
    folder.write(path.substr(folder.path().size() + 1) + "/" + name, good);
  }
  engine.load(path);
  EXPECT_EQ(engine.updates(), 2);
}

// Versions before 3 of the format had another checksum of their files.
TEST_F(Damage, ASaveOfAnEarlierVersionIsReadAndChecked) {
  const auto inside = path.substr(folder.path().size() + 1) + "/";
  const auto shard = inside + "rank-00001.safetensors";
  auto manifest = state::read_manifest(path);
  for (auto& file : manifest.files) {
    file.hash = offload::Hash::xxh64;
    file.digest = offload::xxh64_of(testing::bytes_of(state::in(path, file.name)));
  }
  auto text = state::to_text(manifest);
  ASSERT_NE(text.find("\"version\": 4"), std::string::npos);
  text.replace(text.find("\"version\": 4"), 12, "\"version\": 1");
  constexpr std::size_t kDigitsAt = sizeof("{\n  \"xxh64\": \"") - 1;
  text.replace(kDigitsAt, 16, 16, '0');
  text.replace(kDigitsAt, 16, offload::hex(offload::xxh64_of(text)));
  folder.write(inside + state::kManifest, text);
  auto bytes = testing::bytes_of(state::in(path, "rank-00001.safetensors"));
  bytes.back() = static_cast<char>(bytes.back() ^ 1);
  folder.write(shard, bytes);
  expect_refused("rank-00001.safetensors is damaged: its checksum");
  bytes.back() = static_cast<char>(bytes.back() ^ 1);
  folder.write(shard, bytes);
  engine.load(path);
  EXPECT_EQ(engine.updates(), 2);
}

// What a caller added is held to its checksum, too.
TEST_F(Damage, AFlippedBitOfACallersFile) {
  engine.save(folder.path(), {.name = "more", .extra = [](const std::string& into) {
                                state::make_folder(state::in(into, "tokens"));
                                state::write_new_file(state::in(into, "config.json"), "{\"a\": 1}");
                                state::write_new_file(state::in(into, "tokens/list"), "a b c");
                              }});
  path = folder / "more";
  for (const std::string name : {"config.json", "tokens/list"}) {
    const auto good = testing::bytes_of(state::in(path, name));
    for (std::size_t at = 0; at < good.size(); ++at) {
      auto bad = good;
      bad[at] = static_cast<char>(bad[at] ^ (1 << at % 8));
      folder.write("more/" + name, bad);
      expect_refused(name);
    }
    folder.write("more/" + name, good);
  }
  engine.load(path);
}

TEST_F(Damage, FilesThatAreCutMissingOrLinks) {
  const auto shard = state::in(path, "rank-00001.safetensors");
  const auto good = testing::bytes_of(shard);
  for (const std::size_t size :
       {std::size_t{0}, std::size_t{5}, std::size_t{100}, good.size() - 1}) {
    ASSERT_EQ(::truncate(shard.c_str(), static_cast<off_t>(size)), 0);
    expect_refused("rank-00001.safetensors");
  }
  ASSERT_EQ(::unlink(shard.c_str()), 0);
  expect_refused("rank-00001.safetensors");
  const auto elsewhere = folder.write("elsewhere", good);
  state::link_to(elsewhere, shard);
  expect_refused("rank-00001.safetensors");
  ASSERT_EQ(::unlink(state::in(path, "manifest.json").c_str()), 0);
  expect_refused("no whole save in ");
}

// A rank may have several files: what they hold is there once, and what is the rank's own is alike.
TEST_F(Damage, FilesOfOneRankThatDisagree) {
  const auto join_ranks = [&](const std::string& save) {
    auto manifest = state::read_manifest(save);
    manifest.ranks = 1;
    for (auto& file : manifest.files) file.rank = 0;
    folder.write(save.substr(folder.path().size() + 1) + "/manifest.json", to_text(manifest));
  };
  join_ranks(path);
  expect_refused("the random 'cpu' of rank 0 is there twice");

  testing::on_ranks(kRanks,
                    [&](std::shared_ptr<comm::Group> group) {
                      test::GridModel m;
                      Engine other(m.view(), test::adamw_config(2), group);
                      other.save(folder.path(),
                                 {.name = "own", .own = {{"rank", std::to_string(group->rank())}}});
                    },
                    {.timeout = std::chrono::seconds(60)});
  path = folder / "own";
  join_ranks(path);
  expect_refused("the files of rank 0 have other values of its own");
}

TEST_F(Damage, AnotherModel) {
  const auto refused = [&](const ModelView& view, const Config& config, const std::string& says) {
    Engine other(view, config);
    const auto message = message_of([&] { other.load(path); });
    EXPECT_NE(message.find(says), std::string::npos) << says << "\n" << message;
    EXPECT_EQ(other.updates(), 0);
  };
  const auto config = test::adamw_config();
  {
    test::GridModel m;
    auto view = m.view();
    view.parameters.push_back({"more", test::normal({2}, 1).requires_grad_()});
    refused(view, config, "it has no parameter 'more'");
  }
  {
    test::GridModel m;
    auto view = m.view();
    std::erase_if(view.parameters, [](const auto& p) { return p.name == "unused"; });
    refused(view, config, "the model has no parameter 'unused'");
  }
  {
    test::GridModel m;
    auto view = m.view();
    for (auto& p : view.parameters) {
      if (p.name == "unused") p.tensor = test::normal({4}, 1).requires_grad_();
    }
    refused(view, config, "parameter 'unused' has shape [4], and [3] in ");
  }
  {
    test::GridModel m;
    m.unused.set_requires_grad(false);
    refused(m.view(), config, "parameter 'unused' is frozen, and was trained");
  }
  {
    test::GridModel m;
    auto view = m.view();
    view.buffers.push_back({"mean", at::zeros({2}, at::kFloat)});
    refused(view, config, "it has no buffer 'mean'");
  }
  {
    test::GridModel m;
    auto other = config;
    other.optimizer.type = "sgd";
    refused(m.view(), other,
            "was saved with the optimizer adamw (2 moments), and this engine has "
            "sgd (0)");
  }
}

TEST_F(Damage, IsToldToAllRanks) {
  const auto shard = state::in(path, "rank-00001.safetensors");
  auto bytes = testing::bytes_of(shard);
  bytes.back() = static_cast<char>(bytes.back() ^ 1);
  folder.write(path.substr(folder.path().size() + 1) + "/rank-00001.safetensors", bytes);
  const auto errors =
      testing::errors_on_ranks(3,
                               [&](std::shared_ptr<comm::Group> group) {
                                 test::GridModel m;
                                 Engine other(m.view(), test::adamw_config(3), group);
                                 other.load(path);
                               },
                               {.timeout = std::chrono::seconds(30)});
  for (const auto& error : errors) {
    EXPECT_NE(error.find("rank-00001.safetensors is damaged: its checksum"), std::string::npos)
        << error;
  }
}

// By explicit choice: parameters without the rest, and of those some.
TEST_F(Damage, WeightsOnlyIsAskedFor) {
  auto config = test::adamw_config();
  config.optimizer.type = "sgd";
  test::GridModel m;
  Engine other(m.view(), config);
  other.load(path, {.weights_only = true});
  EXPECT_EQ(other.updates(), 0);
  const state::Saved saved(path);
  const auto check = [&](const std::string& name, bool loaded) {
    const auto* p = saved.parameter(name);
    auto values = at::zeros({p->numel()}, at::kFloat);
    saved.read(p->trainable ? state::kMaster : state::kValue, *p, 0, p->order, values);
    const auto master = engine.master(name);
    const auto flat = at::as_strided(master, {master.numel()}, {1}, master.storage_offset());
    EXPECT_EQ(at::equal(flat.to(at::kFloat), values), loaded) << name;
  };
  engine.load(path, {.weights_only = true, .only = {"blocks.0.*"}});
  check("blocks.0.weight", true);
  check("blocks.0.norm", true);
  check("embedding", false);
  check("blocks.1.norm", false);
  EXPECT_NE(message_of([&] { engine.load(path, {.only = {"*"}}); }).find("set weights_only"),
            std::string::npos);
  EXPECT_NE(message_of([&] {
              engine.load(path, {.weights_only = true, .only = {"x*"}});
            }).find("no parameter matches 'x*'"),
            std::string::npos);
}

}  // namespace
}  // namespace poise

// The directory of saves: which one is the latest, what dead saves leave, which ones go, who may
// write.
#include "state/directory.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "poise/best_save.h"
#include "poise/state.h"
#include "state/files.h"
#include "state/saver.h"
#include "state/training.h"

namespace poise {
namespace {

using testing::message_of;
using testing::TempFolder;

// An engine that has made `updates` updates.
struct Trained {
  test::TinyModel model;
  Engine engine{model.view(), test::adamw_config()};
  void step() {
    engine.step(std::vector{test::make_batch(4, 1)},
                [&](const test::Batch& b) { return Loss(test::mean_loss(model, b)); });
  }
};

TEST(Directory, NamesTheLatestSave) {
  const TempFolder folder;
  EXPECT_EQ(state::find(folder.path()), "");
  EXPECT_EQ(state::find(folder / "nothing"), "");
  Trained run;
  run.engine.save(folder.path());
  run.step();
  const auto second = run.engine.save(folder.path());
  EXPECT_EQ(second, folder / "update-00000001");
  EXPECT_EQ(state::find(folder.path()), second);
  EXPECT_EQ(state::find(second), second);
  EXPECT_EQ(state::find(folder / "latest"), folder / "latest");
  EXPECT_EQ(state::list(folder.path()),
            (std::vector<std::string>{folder / "update-00000000", second}));
  EXPECT_EQ(state::link_target(folder / "latest"), "update-00000001");
  // Nothing but the saves, the link and the lock.
  EXPECT_EQ(state::names_in(folder.path()),
            (std::vector<std::string>{".lock", "latest", "update-00000000", "update-00000001"}));
}

TEST(Directory, FindsASaveWhoseLinkIsMissing) {
  const TempFolder folder;
  Trained run;
  run.engine.save(folder.path());
  run.step();
  const auto second = run.engine.save(folder.path());
  ::unlink((folder / "latest").c_str());
  EXPECT_EQ(state::find(folder.path()), second);
  state::link_to("gone", folder / "latest");
  EXPECT_EQ(state::find(folder.path()), second);
  ::unlink((folder / "latest").c_str());
  state::link_to("../../etc", folder / "latest");
  EXPECT_EQ(state::find(folder.path()), second);
}

TEST(Directory, ClearsWhatDeadSavesLeft) {
  const TempFolder folder;
  for (const auto* name : {".update-00000007.0123.saving", ".update-00000003.removing"}) {
    state::make_folder(folder / name);
    folder.write(std::string(name) + "/rank-00000.safetensors", "half");
    folder.write(std::string(name) + "/manifest.json", "{}");
  }
  folder.write("mine.txt", "kept");
  state::make_folder(folder / ".hidden");
  EXPECT_EQ(state::find(folder.path()), "");
  Trained run;
  run.engine.save(folder.path());
  EXPECT_EQ(
      state::names_in(folder.path()),
      (std::vector<std::string>{".hidden", ".lock", "latest", "mine.txt", "update-00000000"}));
}

TEST(Directory, KeepsTheNewestAndNoOther) {
  const TempFolder folder;
  Trained run;
  run.engine.save(folder.path(), {.name = "best"});
  for (int i = 0; i < 5; ++i) {
    run.engine.save(folder.path(), {.total_limit = 2});
    run.step();
  }
  EXPECT_EQ(
      state::names_in(folder.path()),
      (std::vector<std::string>{".lock", "best", "latest", "update-00000003", "update-00000004"}));
}

TEST(Directory, KeepsEveryNthBesides) {
  const TempFolder folder;
  Trained run;
  for (int i = 0; i < 8; ++i) {
    run.engine.save(folder.path(), {.total_limit = 2, .keep_every = 3});
    run.step();
  }
  EXPECT_EQ(state::names_in(folder.path()),
            (std::vector<std::string>{".lock", "latest", "update-00000003", "update-00000005",
                                      "update-00000006", "update-00000007"}));
}

TEST(Directory, KeepsTheBestBesides) {
  const TempFolder folder;
  Trained run;
  const auto save = [&](bool best) {
    run.engine.save(folder.path(), {.total_limit = 2, .best = best});
    run.step();
  };
  for (int i = 0; i < 5; ++i) save(i == 1);
  EXPECT_EQ(state::names_in(folder.path()),
            (std::vector<std::string>{".lock", "best", "latest", "update-00000001",
                                      "update-00000003", "update-00000004"}));
  EXPECT_EQ(state::link_target(folder / "best"), "update-00000001");
  // The links are no saves of their own.
  EXPECT_EQ(state::list(folder.path()).size(), 3u);
  Trained other;
  other.engine.load(folder / "best");
  EXPECT_EQ(other.engine.updates(), 1);
  // A better one takes its place, and the old one goes as others do.
  save(true);
  EXPECT_EQ(state::link_target(folder / "best"), "update-00000005");
  save(false);
  EXPECT_EQ(state::names_in(folder.path()),
            (std::vector<std::string>{".lock", "best", "latest", "update-00000004",
                                      "update-00000005", "update-00000006"}));
}

// Of a save that turns out to be the best one later the manifest alone is written anew.
TEST(Directory, TheBestMayBeNamedLater) {
  const TempFolder folder;
  Trained run;
  std::string last;
  for (int i = 0; i < 3; ++i) {
    last = run.engine.save(folder.path(), {.user = {{"a", "b"}}, .best = i == 0});
    run.step();
  }
  const auto shard = state::in(last, "rank-00000.safetensors");
  struct stat before {
  }, after{};
  ASSERT_EQ(::stat(shard.c_str(), &before), 0);
  state::mark_best(last, {{"loss", "0.5"}}, /*total_limit=*/2, /*keep_every=*/0);
  ASSERT_EQ(::stat(shard.c_str(), &after), 0);
  EXPECT_EQ(before.st_ino, after.st_ino);
  EXPECT_EQ(state::link_target(folder / "best"), "update-00000002");
  EXPECT_EQ(
      state::names_in(folder.path()),  // the one that was the best has gone as others do
      (std::vector<std::string>{".lock", "best", "latest", "update-00000001", "update-00000002"}));
  state::verify(last);
  Trained other;
  const auto loaded = other.engine.load(folder / "best");
  EXPECT_EQ(loaded.user.at("loss"), "0.5");
  EXPECT_EQ(loaded.user.at("a"), "b");
  EXPECT_EQ(other.engine.updates(), 2);
  state::make_folder(folder / "mine");
  EXPECT_NE(message_of([&] { state::mark_best(folder / "mine", {}, 0, 0); }).find("is no save"),
            std::string::npos);
}

TEST(Directory, TheBestThatIsNamedLaterIsAsOldAsItWas) {
  const TempFolder folder;
  Trained run;
  std::vector<std::string> made;
  for (int i = 0; i < 3; ++i) {
    made.push_back(run.engine.save(folder.path()));
    run.step();
  }
  state::mark_best(made[0], {}, 0, 0);
  EXPECT_EQ(state::list(folder.path()), made);
  state::mark_best(made[2], {}, /*total_limit=*/2, 0);  // the oldest of the others goes
  EXPECT_EQ(state::list(folder.path()), (std::vector<std::string>{made[1], made[2]}));
}

TEST(Directory, TheBestIsNamedWhereAnotherTryWasKilled) {
  const TempFolder folder;
  Trained run;
  const auto made = run.engine.save(folder.path());
  state::link_to("update-00000000", folder / ".latest.new");
  state::mark_best(made, {}, 0, 0);
  EXPECT_EQ(state::link_target(folder / "best"), "update-00000000");
}

// A lock of the process keeps its own saves from each other, too.
TEST(Directory, TakesOneSaveOfAProcessAfterTheOther) {
  const TempFolder folder;
  auto config = test::adamw_config();
  config.state.asynchronous = true;
  test::TinyModel models[2];
  Engine generator(models[0].view(), config), judge(models[1].view(), config);
  for (int i = 0; i < 3; ++i) {
    Stream::set_test_delay(3, 200'000);
    const auto one = generator.save(folder.path(), {.name = join("generator-", i)});
    const auto other = judge.save(folder.path(), {.name = join("judge-", i)});
    state::mark_best(one, {}, 0, 0);
    Stream::set_test_delay(0, 0);
    generator.finish_save();
    judge.finish_save();
    for (const auto& save : {one, other}) state::verify(save);
  }
  EXPECT_EQ(state::list(folder.path()).size(), 6u);
}

// A newest save that says fewer updates (the run was begun anew) is still the one that stays.
TEST(Directory, NeverRemovesWhatItHasJustMade) {
  const TempFolder folder;
  {
    Trained run;
    for (int i = 0; i < 3; ++i) {
      run.step();
      run.engine.save(folder.path());
    }
  }
  Trained run;
  const auto made = run.engine.save(folder.path(), {.total_limit = 1});
  EXPECT_EQ(state::list(folder.path()), std::vector<std::string>{made});
  EXPECT_EQ(state::find(folder.path()), made);
}

TEST(Directory, ReplacesASaveOfTheSameName) {
  const TempFolder folder;
  Trained run;
  run.engine.save(folder.path(), {.name = "x", .user = {{"which", "first"}}});
  run.step();
  run.engine.save(folder.path(), {.name = "x", .user = {{"which", "second"}}});
  Trained other;
  EXPECT_EQ(other.engine.load(folder.path()).user.at("which"), "second");
  EXPECT_EQ(state::names_in(folder.path()), (std::vector<std::string>{".lock", "latest", "x"}));
}

// What is no save of ours is never replaced, whatever it is.
TEST(Directory, LeavesAloneWhatIsNoSave) {
  Trained run;
  const auto refused = [&](const TempFolder& folder, const char* what) {
    const auto message = message_of([&] { run.engine.save(folder.path(), {.name = "mine"}); });
    EXPECT_NE(message.find(what), std::string::npos) << message;
    for (const auto& name : state::names_in(folder.path())) {
      EXPECT_EQ(name.find(".saving"), std::string::npos) << name;
    }
  };
  {
    const TempFolder folder;
    state::make_folder(folder / "mine");
    folder.write("mine/thesis.txt", "years of work");
    refused(folder, "mine is there and is no save");
    EXPECT_TRUE(state::is_file(folder / "mine/thesis.txt"));
  }
  {
    const TempFolder folder;
    folder.write("mine", "a file");
    refused(folder, "mine is there and is no save");
  }
  {
    const TempFolder folder;
    state::link_to("/nowhere", folder / "mine");
    refused(folder, "mine is there and is no save");
  }
  {
    const TempFolder folder;
    state::make_folder(folder / "latest");
    refused(folder, "latest is there and is no link");
  }
  {
    const TempFolder folder;
    run.engine.save(folder.path(), {.name = "best"});
    const auto message = message_of([&] { run.engine.save(folder.path(), {.best = true}); });
    EXPECT_NE(message.find("best is there and is no link"), std::string::npos) << message;
    EXPECT_NE(message_of([&] {
                run.engine.save(folder.path(), {.name = "best", .best = true});
              }).find("cannot have the name 'best' and be the best one"),
              std::string::npos);
    run.engine.save(folder.path(), {.name = "another"});
  }
}

// A run that went back to an older save makes newer ones with fewer updates.
TEST(Directory, TheNewestAreThoseMadeLast) {
  const TempFolder folder;
  Trained run;
  for (int i = 0; i < 3; ++i) {
    run.step();
    run.engine.save(folder.path());
  }
  Trained back;
  back.engine.load(folder / "update-00000001");
  const auto saved = back.engine.save(folder.path(), {.total_limit = 2});
  EXPECT_EQ(saved, folder / "update-00000001");
  EXPECT_EQ(state::list(folder.path()),
            (std::vector<std::string>{folder / "update-00000003", saved}));
  ::unlink((folder / "latest").c_str());
  EXPECT_EQ(state::find(folder.path()), saved);
}

TEST(Directory, TakesFilesOfTheCaller) {
  const TempFolder folder;
  Trained run;
  const auto path = run.engine.save(folder.path(), {.extra = [](const std::string& into) {
                                      state::make_folder(state::in(into, "more"));
                                      state::write_new_file(state::in(into, "a.json"), "{}");
                                      state::write_new_file(state::in(into, "more/b"), "xyz");
                                    }});
  const state::Saved saved(path);
  saved.verify();
  ASSERT_EQ(saved.manifest().files.size(), 3u);
  EXPECT_EQ(saved.manifest().files[2].name, "more/b");
  EXPECT_EQ(saved.manifest().files[2].bytes, 3u);
  EXPECT_EQ(testing::bytes_of(state::in(path, "more/b")), "xyz");
}

TEST(Directory, AFailureOfTheCallerLeavesNothing) {
  const TempFolder folder;
  Trained run;
  const auto first = run.engine.save(folder.path());
  run.step();
  const auto message = message_of([&] {
    run.engine.save(folder.path(), {.extra = [](const std::string&) {
                      throw std::domain_error("no such model card");
                    }});
  });
  EXPECT_EQ(message, "no such model card");
  EXPECT_EQ(state::list(folder.path()), std::vector<std::string>{first});
  EXPECT_EQ(state::names_in(folder.path()).size(), 3u);
  EXPECT_EQ(state::find(run.engine.save(folder.path())), folder / "update-00000001");
}

TEST(Directory, RefusesNamesThatLeadElsewhere) {
  const TempFolder folder;
  Trained run;
  for (const std::string name : {"../x", "a/b", ".x", "latest"}) {
    EXPECT_NE(message_of([&] {
                run.engine.save(folder.path(), {.name = name});
              }).find("cannot have the name"),
              std::string::npos);
  }
}

TEST(Directory, IsOfOneRunAtATime) {
  const TempFolder folder;
  int ready[2], go[2];
  ASSERT_EQ(::pipe(ready), 0);
  ASSERT_EQ(::pipe(go), 0);
  const auto child = ::fork();
  if (child == 0) {  // holds the lock until it is told to go
    const state::Lock lock(folder.path());
    char byte = 1;
    if (::write(ready[1], &byte, 1) != 1 || ::read(go[0], &byte, 1) != 1) ::_exit(1);
    ::_exit(0);
  }
  char byte = 0;
  ASSERT_EQ(::read(ready[0], &byte, 1), 1);
  Trained run;
  EXPECT_NE(message_of([&] { run.engine.save(folder.path()); }).find("another process is saving"),
            std::string::npos);
  ASSERT_EQ(::write(go[1], &byte, 1), 1);
  int status = 1;
  ::waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
  EXPECT_NE(run.engine.save(folder.path()), "");
}

// Ranks whose directories are not the same one are told so, all of them, and no save is made.
TEST(Directory, MustBeSharedByAllRanks) {
  const TempFolder folder;
  const auto errors = testing::errors_on_ranks(
      2,
      [&](std::shared_ptr<comm::Group> group) {
        offload::HostMemory memory(c10::Device(c10::kCPU), 0);
        state::Saver saver(group, memory, {.timeout = std::chrono::seconds(30)});
        state::Contents contents;
        const auto mine = folder / "here";
        if (group->rank() == 1) {  // its disk does not have what rank 0 makes
          while (!state::is_folder(mine)) std::this_thread::yield();
          while (state::names_in(mine).size() < 2) std::this_thread::yield();
          state::rename_over(mine, folder / "elsewhere");
        }
        saver.save(mine, contents, {.name = "x"}, state::Saver::Mode::wait);
      },
      {.timeout = std::chrono::seconds(30)});
  for (const auto& error : errors) {
    // Rank 0 does not either, where it looks after the renaming.
    EXPECT_NE(error.find(" does not see "), std::string::npos) << error;
  }
}

}  // namespace
}  // namespace poise

// Every call that a save makes to the file system fails in turn, or is the last one of its process:
// the save is whole or it is not there, and the one before it never comes to harm.
//
// This program has functions of these names of its own, which are called instead of the C
// library's.
#include <ATen/ops/equal.h>
#include <ATen/ops/ones.h>
#include <ATen/Parallel.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdarg>
#include <map>

#include "state/files.h"
#include "state/training.h"
#include "support/folder_in_memory.h"

namespace {

enum class Fault { none, full, broken, interrupted, dies };

// What shall happen to the `at`-th call from now on.
struct Plan {
  std::atomic<Fault> fault{Fault::none};
  std::atomic<int> at{0};
  std::atomic<int> calls{0};
} plan;

// 0: go on; else the errno of a failure.
int fault_of_this_call() {
  const auto fault = plan.fault.load();
  if (fault == Fault::none) return 0;
  if (++plan.calls != plan.at) return 0;
  if (fault == Fault::dies) ::kill(::getpid(), SIGKILL);
  return fault == Fault::full ? ENOSPC : fault == Fault::broken ? EIO : EINTR;
}

template <class Function>
Function* real(const char* name) {
  return reinterpret_cast<Function*>(::dlsym(RTLD_NEXT, name));
}

template <class Result, class Function, class... Arguments>
Result call(const char* name, Arguments... arguments) {
  if (const int error = fault_of_this_call()) {
    errno = error;
    return -1;
  }
  return real<Function>(name)(arguments...);
}

}  // namespace

#define POISE_SHOWN extern "C" __attribute__((visibility("default")))
POISE_SHOWN int open(const char* path, int flags, ...) {
  va_list rest;
  va_start(rest, flags);
  const auto mode = (flags & O_CREAT) != 0 ? va_arg(rest, mode_t) : 0;
  va_end(rest);
  using Open = int(const char*, int, ...);
  if ((flags & O_CREAT) == 0) return real<Open>("open")(path, flags);
  return call<int, Open>("open", path, flags, mode);
}
POISE_SHOWN ssize_t write(int fd, const void* data, size_t size) {
  return call<ssize_t, ssize_t(int, const void*, size_t)>("write", fd, data, size);
}
POISE_SHOWN ssize_t pwrite(int fd, const void* data, size_t size, off_t at) {
  return call<ssize_t, ssize_t(int, const void*, size_t, off_t)>("pwrite", fd, data, size, at);
}
POISE_SHOWN int ftruncate(int fd, off_t size) noexcept {
  return call<int, int(int, off_t)>("ftruncate", fd, size);
}
POISE_SHOWN int fsync(int fd) { return call<int, int(int)>("fsync", fd); }
POISE_SHOWN int mkdir(const char* path, mode_t mode) noexcept {
  return call<int, int(const char*, mode_t)>("mkdir", path, mode);
}
POISE_SHOWN int rename(const char* from, const char* to) noexcept {
  return call<int, int(const char*, const char*)>("rename", from, to);
}
POISE_SHOWN int renameat2(int a, const char* from, int b, const char* to, unsigned flags) noexcept {
  using Rename = int(int, const char*, int, const char*, unsigned);
  return call<int, Rename>("renameat2", a, from, b, to, flags);
}
POISE_SHOWN int symlink(const char* target, const char* link) noexcept {
  return call<int, int(const char*, const char*)>("symlink", target, link);
}
POISE_SHOWN int remove(const char* path) noexcept {
  return call<int, int(const char*)>("remove", path);
}

namespace poise {
namespace {

using testing::TempFolder;

class Armed {
 public:
  Armed(Fault fault, int at) {
    plan.calls = 0;
    plan.at = at;
    plan.fault = fault;
  }
  ~Armed() { plan.fault = Fault::none; }
  int calls() const { return plan.calls; }
};

// A training whose saves are known: the masters after each update.
struct Known {
  test::GridModel model;
  Engine engine{model.view(), config()};
  std::map<std::int64_t, test::Values> masters;

  static Config config() {
    auto config = test::adamw_config();
    config.comm.timeout_seconds = 20;
    return config;
  }
  Known() { note(); }
  void note() {
    for (auto& [name, tensor] : model.slots()) {
      masters[engine.updates()][name] = engine.master(name).clone();
    }
  }
  void step() {
    const auto seed = static_cast<std::uint64_t>(engine.updates());
    engine.step(std::vector{test::make_tokens(3, seed)}, [&](const at::Tensor& b) {
      return Loss::sum(model.loss_sum(b), test::counted(b));
    });
    note();
  }
};

// The latest whole save loads, is one of those that were made, and not older than `oldest`.
void expect_intact(const Known& known, const std::string& directory, std::int64_t oldest) {
  test::GridModel model;
  Engine other(model.view(), Known::config());
  other.load(directory);
  ASSERT_GE(other.updates(), oldest);
  ASSERT_EQ(known.masters.count(other.updates()), 1u);
  test::Values masters;
  for (auto& [name, tensor] : model.slots()) masters[name] = other.master(name).clone();
  EXPECT_EQ(test::first_difference(masters, known.masters.at(other.updates())), "");
  for (const auto& save : state::list(directory)) state::verify(save);
}

const state::SaveOptions kOptions{
    .name = {}, .cursor = {}, .user = {}, .own = {}, .total_limit = 2};

TEST(Faults, EveryCallFailsInTurn) {
  for (const auto fault : {Fault::full, Fault::broken}) {
    const TempFolder folder;
    Known known;
    known.engine.save(folder.path(), kOptions);
    int failed = 0, call = 1;
    std::int64_t saved = 0;  // updates at the last save that said it was made
    for (;; ++call) {
      known.step();
      int calls = 0;
      try {
        const Armed armed(fault, call);
        try {
          known.engine.save(folder.path(), kOptions);
        } catch (...) {
          calls = armed.calls();
          throw;
        }
        calls = armed.calls();
        saved = known.engine.updates();
      } catch (const Error& error) {
        ++failed;
        EXPECT_NE(std::string(error.what()).find("[state] cannot "), std::string::npos);
        EXPECT_NE(std::string(error.what()).find(folder.path()), std::string::npos);
      }
      expect_intact(known, folder.path(), saved);
      if (calls < call) break;  // there is no such call any more
      if (call % 5 == 0) {      // a save without faults clears up
        known.step();
        known.engine.save(folder.path(), kOptions);
        saved = known.engine.updates();
        expect_intact(known, folder.path(), saved);
        EXPECT_LE(state::list(folder.path()).size(), 2u);
        for (const auto& name : state::names_in(folder.path())) {
          EXPECT_EQ(name.find(".saving"), std::string::npos) << name;
        }
      }
    }
    EXPECT_GE(failed, 12) << "of " << call;
  }
}

TEST(Faults, AnInterruptedWriteIsMadeAgain) {
  const TempFolder folder;
  Known known;
  for (int call = 1; call <= 12; ++call) {
    const Armed armed(Fault::interrupted, call);
    try {
      known.engine.save(folder.path());
    } catch (const Error& error) {  // open() and the like are not made again
      EXPECT_EQ(std::string(error.what()).find("cannot write"), std::string::npos) << error.what();
    }
  }
}

TEST(Faults, DeathAtEveryCall) {
  const TempFolder folder;
  Known known;
  known.engine.save(folder.path(), kOptions);
  int deaths = 0;
  for (int call = 1;; ++call) {
    known.step();
    const auto child = ::fork();
    if (child == 0) {
      const Armed armed(Fault::dies, call);
      try {
        known.engine.save(folder.path(), kOptions);
      } catch (const std::exception& error) {
        ::_exit(1);
      }
      ::_exit(0);
    }
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    expect_intact(known, folder.path(), 0);
    if (WIFEXITED(status)) {
      EXPECT_EQ(WEXITSTATUS(status), 0);
      expect_intact(known, folder.path(), known.engine.updates());
      break;
    }
    ASSERT_EQ(WTERMSIG(status), SIGKILL);
    ++deaths;
  }
  EXPECT_GE(deaths, 15);
}

// A rank that writes several files at once: any of them fails, or the process dies, at any run.
class SeveralFiles : public ::testing::TestWithParam<Fault> {
 protected:
  void SetUp() override {
    if (!memory.is_there()) GTEST_SKIP() << "no room in /dev/shm";
    at::set_num_threads(2);
  }
  void TearDown() override { at::set_num_threads(threads); }

  struct Training {
    std::vector<at::Tensor> weights;
    std::unique_ptr<Engine> engine;
    Training() {
      ModelView view;
      for (const std::int64_t numel : {11, 1'500'000, 1'500'001}) {
        weights.push_back(at::ones({numel}).requires_grad_());
        view.parameters.push_back({join("w", weights.size()), weights.back()});
      }
      engine = std::make_unique<Engine>(view, Known::config());
    }
    void step() {
      engine->step(1, [&](std::size_t) {
        auto sum = weights[0].square().sum();
        for (const auto& weight : weights) sum = sum + weight.square().sum();
        return Loss::sum(sum, 1);
      });
    }
  };

  // In a process of its own where it dies. Whether the save was made.
  bool save(Training& training, int call, int& calls) {
    const auto try_to = [&] {
      const Armed armed(GetParam(), call);
      try {
        training.engine->save(memory.path(), kOptions);
        calls = armed.calls();
        return true;
      } catch (const Error& error) {
        calls = armed.calls();
        EXPECT_NE(std::string(error.what()).find("[state] cannot "), std::string::npos);
        return false;
      }
    };
    if (GetParam() != Fault::dies) return try_to();
    const auto child = ::fork();
    if (child == 0) ::_exit(try_to() ? 0 : 1);
    int status = 0;
    EXPECT_EQ(::waitpid(child, &status, 0), child);
    calls = WIFEXITED(status) ? 0 : call;
    return WIFEXITED(status) && WEXITSTATUS(status) == 0;
  }

  const int threads = at::get_num_threads();
  const testing::FolderInMemory memory{120 << 20};  // bytes: three saves
};

TEST_P(SeveralFiles, FailAtEveryFifthCall) {
  Training training;
  std::map<std::int64_t, at::Tensor> known{{0, training.weights[2].detach().clone()}};
  training.engine->save(memory.path(), kOptions);
  std::int64_t saved = 0;
  int failed = 0;
  for (int call = 1, calls = 1;; call += 5) {
    training.step();
    known[training.engine->updates()] = training.weights[2].detach().clone();
    if (save(training, call, calls)) {
      saved = training.engine->updates();
    } else {
      ++failed;
    }
    Training other;
    other.engine->load(memory.path());
    ASSERT_GE(other.engine->updates(), saved);
    EXPECT_TRUE(at::equal(other.weights[2].detach(), known.at(other.engine->updates())));
    for (const auto& one : state::list(memory.path())) state::verify(one);
    if (calls < call) break;  // there is no such call any more
  }
  EXPECT_GE(failed, 25);  // 36 MB in runs of 256 KiB
}
INSTANTIATE_TEST_SUITE_P(Kinds, SeveralFiles, ::testing::Values(Fault::full, Fault::dies),
                         [](const auto& info) {
                           return info.param == Fault::full ? "Full" : "Dies";
                         });

}  // namespace
}  // namespace poise

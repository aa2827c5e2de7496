// A training that is killed again and again while it saves, and resumed from what is there: after
// every kill the latest save is the state of the run that was never stopped.
// Every other one has its masters and moments in a file, so that kills meet its writing, too.
// POISE_KILLS says how many kills; tests/state/kills.sh makes hundreds.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <fstream>
#include <random>

#include "comm/processes.h"
#include "offload/digest.h"
#include "state/files.h"
#include "state/training.h"
#include "support/free_port.h"

namespace poise {
namespace {

using testing::TempFolder;

// About 1 MB of state, so that a kill meets its writing.
struct Model {
  at::Tensor weight = test::normal({320, 320}, 1, 0.05).requires_grad_();
  at::Tensor bias = test::normal({320}, 2).requires_grad_();
  ModelView view() const { return {{{"weight", weight}, {"bias", bias}}, {}, {}}; }
  StepResult step(Engine& engine) {
    const auto x = test::normal({4, 320}, static_cast<std::uint64_t>(engine.updates()));
    return engine.step(
        1, [&](std::size_t) { return Loss::sum(at::linear(x, weight, bias).pow(2).sum(), 4); });
  }
};

// `away`: of a file that masters and moments lie in; empty: memory.
Config config_of(bool asynchronous, const std::string& away = "") {
  auto config = test::adamw_config(2);
  if (!away.empty()) {
    config.offload.optimizer = config::Offload::file;
    config.offload.directory = away;
    config.offload.block_bytes = 4096;
    config.offload.staging_bytes = 64 * 4096;
  }
  config.state.asynchronous = asynchronous;
  config.comm.timeout_seconds = 60;
  return config;
}

std::string digest_of(Engine& engine) {
  std::string text;
  for (const auto* name : {"weight", "bias"}) {
    const auto master = engine.master(name).contiguous();
    offload::Digest digest;
    digest.update(master.const_data_ptr(), master.nbytes());
    text += offload::hex(digest.value());
  }
  return text;
}

// A rank in a process of its own, which goes on from the latest save and saves after every update.
// A fork of this one: it has no threads yet, and loading torch takes longer than saving.
class Rank {
 public:
  Rank(int rank, int size, int port, const std::string& saves, const Config& config,
       const std::string& ready) {
    pid_ = ::fork();
    if (pid_ != 0) return;
    const std::map<std::string, int> variables{
        {"RANK", rank}, {"LOCAL_RANK", rank}, {"WORLD_SIZE", size}, {"MASTER_PORT", port}};
    for (const auto& [name, value] : variables) {
      ::setenv(name.c_str(), std::to_string(value).c_str(), 1);
    }
    ::setenv("MASTER_ADDR", "127.0.0.1", 1);
    // What a rank says of the other one's death is not what this is about.
    if (!std::freopen("/dev/null", "w", stderr)) ::_exit(1);
    try {
      save_until_killed(saves, config, ready);
    } catch (const std::exception& error) {  // the other rank was killed first
    }
    ::_exit(1);
  }
  ~Rank() { kill(); }
  Rank(const Rank&) = delete;
  Rank& operator=(const Rank&) = delete;

  void kill() {
    if (pid_ <= 0) return;
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
    pid_ = 0;
  }

 private:
  static void save_until_killed(const std::string& saves, const Config& config,
                                const std::string& ready) {
    Model model;
    Engine engine(model.view(), config, comm::from_environment());
    const auto found = engine.group().all_gather_text(state::find(saves), "latest").front();
    if (!found.empty()) engine.load(found);
    std::ofstream(ready + std::to_string(engine.group().rank())) << "saving";
    for (;;) {
      model.step(engine);
      engine.save(saves, {.total_limit = 2});
    }
  }
  pid_t pid_ = 0;
};

// By threads, which give the bits of processes, in a fork: torch's autograd cannot be forked once
// it has run.
std::vector<std::string> digests_of_the_unbroken_run(int ranks, std::int64_t updates,
                                                     const std::string& file) {
  const auto child = ::fork();
  if (child == 0) {
    std::ofstream out(file);
    at::set_num_threads(1);  // the first call after a fork is not one for two threads at once
    testing::on_ranks(ranks, [&](std::shared_ptr<comm::Group> group) {
      at::set_num_threads(1);
      Model model;
      Engine engine(model.view(), config_of(false), group);
      for (;;) {
        const auto digest = digest_of(engine);
        if (group->rank() == 0) out << digest << std::endl;
        if (engine.updates() == updates) return;
        model.step(engine);
      }
    });
    ::_exit(0);
  }
  int status = 1;
  ::waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
  std::vector<std::string> digests;
  std::ifstream in(file);
  for (std::string line; std::getline(in, line);) digests.push_back(line);
  return digests;
}

std::string name_of(const ::testing::TestParamInfo<std::tuple<int, bool>>& info) {
  return join(std::get<0>(info.param), std::get<1>(info.param) ? "_background" : "_waiting");
}

class Kills : public ::testing::TestWithParam<std::tuple<int, bool>> {};

TEST_P(Kills, NeverLoseTheLatestSave) {
  at::set_num_threads(1);  // forks of a process with a pool of threads wait for it forever
  const auto [ranks, behind] = GetParam();
  const auto kills = testing::rounds("POISE_KILLS", 40) / 4;
  const TempFolder folder;
  const auto saves = folder / "saves", away = folder / "away";
  std::mt19937 random(static_cast<unsigned>(17 * ranks + (behind ? 1 : 0)));

  std::vector<std::pair<std::int64_t, std::string>> seen;  // after each kill
  std::int64_t latest = 0, in_flight = 0;
  for (std::int64_t kill = 0; kill < kills; ++kill) {
    const auto ready = folder / "ready" + std::to_string(kill) + ".";
    std::vector<std::unique_ptr<Rank>> processes;
    const int port = testing::free_port();
    const auto config = config_of(behind, kill % 2 == 1 ? away : "");
    for (int rank = 0; rank < ranks; ++rank) {
      processes.push_back(std::make_unique<Rank>(rank, ranks, port, saves, config, ready));
    }
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(120);
    for (int rank = 0; rank < ranks; ++rank) {
      while (!state::is_file(ready + std::to_string(rank))) {
        ASSERT_LT(std::chrono::steady_clock::now(), deadline) << "of rank " << rank;
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
    }
    while (kill == 0 && state::find(saves).empty()) {  // there is something to lose
      ASSERT_LT(std::chrono::steady_clock::now(), deadline);
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 250'000));
    // All of them, or one that the other waits for a while.
    const auto first = static_cast<std::size_t>(random() % static_cast<unsigned>(ranks));
    processes[first]->kill();
    if (random() % 2 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(random() % 100));
    processes.clear();
    const auto found = state::find(saves);
    ASSERT_FALSE(found.empty()) << "all saves are lost after kill " << kill;
    for (const auto& name : state::names_in(saves)) {
      if (name.find(".saving") != std::string::npos) ++in_flight;
    }
    Model loaded;
    Engine engine(loaded.view(), config_of(false));
    engine.load(found);  // verifies every byte
    ASSERT_GE(engine.updates(), latest) << "a save was lost at kill " << kill;
    latest = engine.updates();
    seen.emplace_back(latest, digest_of(engine));
  }
  const auto want = digests_of_the_unbroken_run(ranks, latest, folder / "digests");
  ASSERT_EQ(want.size(), static_cast<std::size_t>(latest) + 1);
  for (const auto& [updates, digest] : seen) {
    EXPECT_EQ(digest, want[static_cast<std::size_t>(updates)]) << "after update " << updates;
  }
  std::printf("%d rank%s, %s: %lld kills, %lld of them during a save, %lld updates saved\n", ranks,
              ranks > 1 ? "s" : "", behind ? "in the background" : "waiting",
              static_cast<long long>(kills), static_cast<long long>(in_flight),
              static_cast<long long>(latest));
  std::fflush(stdout);
  EXPECT_GT(latest, 0);
  if (kills > 1) {
    EXPECT_TRUE(state::names_in(away).empty()) << "something is left of offloaded states";
  }
}

INSTANTIATE_TEST_SUITE_P(Ways, Kills,
                         ::testing::Combine(::testing::Values(1, 2), ::testing::Bool()), name_of);

}  // namespace
}  // namespace poise

// Ranks as processes: this test program runs itself again, once per rank, with one of its disabled
// tests as the rank's body.
#pragma once

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdio>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "poise/error.h"
#include "support/free_port.h"

namespace poise::comm {

using Variables = std::map<std::string, std::string>;

// One run of the disabled test Rank.<body>.
class Process {
 public:
  Process(const std::string& body, const Variables& variables) : output_(std::tmpfile()) {
    pid_ = fork();
    if (pid_ != 0) return;
    for (const auto& [name, value] : variables) setenv(name.c_str(), value.c_str(), 1);
    dup2(fileno(output_), STDOUT_FILENO);
    dup2(fileno(output_), STDERR_FILENO);
    const std::string filter = "--gtest_filter=Rank.DISABLED_" + body;
    execl("/proc/self/exe", "rank", filter.c_str(), "--gtest_also_run_disabled_tests", nullptr);
    _exit(127);
  }
  ~Process() {
    signal(SIGKILL);
    wait(std::chrono::seconds(5));
    std::fclose(output_);
  }
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;

  pid_t pid() const { return pid_; }
  void signal(int number) const {
    if (!over_) kill(pid_, number);
  }

  // False: still running then.
  bool wait(std::chrono::seconds limit) {
    const auto deadline = std::chrono::steady_clock::now() + limit;
    while (!over_) {
      over_ = waitpid(pid_, &status_, WNOHANG) == pid_;
      if (over_) break;
      if (std::chrono::steady_clock::now() > deadline) return false;
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    return true;
  }

  bool ended_well() const { return over_ && WIFEXITED(status_) && WEXITSTATUS(status_) == 0; }

  std::string output() const {
    std::string text;
    std::rewind(output_);
    for (int letter = std::fgetc(output_); letter != EOF; letter = std::fgetc(output_)) {
      text += static_cast<char>(letter);
    }
    return text;
  }

 private:
  std::FILE* output_;
  pid_t pid_ = -1;
  int status_ = 0;
  bool over_ = false;
};

using Processes = std::vector<std::unique_ptr<Process>>;

// `size` ranks as torchrun would start them.
inline Processes start_ranks(const std::string& body, int size, Variables variables = {}) {
  variables["WORLD_SIZE"] = std::to_string(size);
  variables.try_emplace("MASTER_ADDR", "127.0.0.1");
  variables.try_emplace("MASTER_PORT", std::to_string(testing::free_port()));
  variables["OMP_NUM_THREADS"] = "1";
  variables["CUDA_VISIBLE_DEVICES"] = "";
  Processes ranks;
  for (int rank = 0; rank < size; ++rank) {
    variables["RANK"] = variables["LOCAL_RANK"] = std::to_string(rank);
    ranks.push_back(std::make_unique<Process>(body, variables));
  }
  return ranks;
}

inline void expect_all_well(const Processes& ranks) {
  for (const auto& rank : ranks) {
    const bool over = rank->wait(std::chrono::seconds(60));
    EXPECT_TRUE(over && rank->ended_well()) << rank->output();
  }
}

inline void run_ranks(const std::string& body, int size, const Variables& variables = {}) {
  expect_all_well(start_ranks(body, size, variables));
}

// Waits until the rank has printed `text`.
inline void await_output(const Process& rank, const std::string& text) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(30);
  while (rank.output().find(text) == std::string::npos) {
    ASSERT_LT(std::chrono::steady_clock::now(), deadline) << rank.output();
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
}

}  // namespace poise::comm

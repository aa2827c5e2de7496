// What launchers leave in the environment, and ranks that do not meet.
#include "comm/launch.h"

#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdlib>
#include <map>

#include "comm/processes.h"
#include "comm/rendezvous.h"
#include "poise/comm.h"
#include "poise/error.h"
#include "support/free_port.h"

namespace poise::comm {
namespace {

using namespace std::chrono_literals;
using ::testing::AllOf;
using ::testing::HasSubstr;

std::optional<Launch> launch_from(const Variables& variables) {
  return launch_of([&](const char* name) {
    const auto found = variables.find(name);
    return found == variables.end() ? nullptr : found->second.c_str();
  });
}

std::string error_from(const Variables& variables) {
  try {
    launch_from(variables);
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

TEST(Launch, ByHandIsNone) {
  EXPECT_EQ(launch_from({}), std::nullopt);
  EXPECT_EQ(launch_from({{"MASTER_ADDR", "a"}, {"MASTER_PORT", "1"}}), std::nullopt);
  EXPECT_EQ(launch_from({{"SLURM_NTASKS", "8"}}), std::nullopt);  // a shell inside a job
}

TEST(Launch, ByTorchrun) {
  const auto launch = launch_from({{"RANK", "3"},
                                   {"WORLD_SIZE", "4"},
                                   {"LOCAL_RANK", "1"},
                                   {"MASTER_ADDR", "node1"},
                                   {"MASTER_PORT", "29400"},
                                   {"TORCHELASTIC_USE_AGENT_STORE", "True"},
                                   {"TORCHELASTIC_RESTART_COUNT", "2"},
                                   {"SLURM_PROCID", "0"},  // torchrun was itself started by Slurm
                                   {"SLURM_NTASKS", "2"}});
  ASSERT_TRUE(launch);
  EXPECT_EQ(launch->rank, 3);
  EXPECT_EQ(launch->size, 4);
  EXPECT_EQ(launch->local_rank, 1);
  EXPECT_EQ(launch->address, "node1");
  EXPECT_EQ(launch->port, 29400);
  EXPECT_TRUE(launch->store_runs);
  EXPECT_EQ(launch->attempt, 2);
}

TEST(Launch, BySlurm) {
  const auto launch = launch_from({{"SLURM_PROCID", "5"},
                                   {"SLURM_NTASKS", "16"},
                                   {"SLURM_STEP_NUM_TASKS", "16"},
                                   {"SLURM_STEP_ID", "0"},
                                   {"SLURM_LOCALID", "1"},
                                   {"SLURM_JOB_NODELIST", "gpu[07-10]"},
                                   {"SLURM_JOB_ID", "123456"}});
  ASSERT_TRUE(launch);
  EXPECT_EQ(launch->rank, 5);
  EXPECT_EQ(launch->size, 16);
  EXPECT_EQ(launch->local_rank, 1);
  EXPECT_EQ(launch->address, "gpu07");
  EXPECT_EQ(launch->port, 15000 + 123456 % 15000);
  EXPECT_FALSE(launch->store_runs);
}

// The script that sbatch runs sees the job's number of tasks, and is one process.
TEST(Launch, OneProcessInABatchShell) {
  const Variables shell{{"SLURM_PROCID", "0"},
                        {"SLURM_LOCALID", "0"},
                        {"SLURM_NTASKS", "16"},
                        {"SLURM_JOB_NODELIST", "gpu[07-10]"},
                        {"SLURM_JOB_ID", "123456"}};
  EXPECT_EQ(launch_from(shell), std::nullopt);
  for (const char* step : {"batch", "4294967291", "interactive"}) {
    auto numbered = shell;
    numbered["SLURM_STEP_ID"] = step;
    numbered["SLURM_STEP_NUM_TASKS"] = "16";
    EXPECT_EQ(launch_from(numbered), std::nullopt) << step;
  }
  auto started = shell;  // srun --ntasks 4 inside of it
  started["SLURM_STEP_ID"] = "3";
  started["SLURM_STEP_NUM_TASKS"] = "4";
  ASSERT_TRUE(launch_from(started));
  EXPECT_EQ(launch_from(started)->size, 4);
  auto without = shell;
  without["SLURM_PROCID"] = "1";  // no shell has that
  EXPECT_THAT(error_from(without), HasSubstr("has SLURM_PROCID but not SLURM_STEP_NUM_TASKS"));
}

TEST(Launch, ByMpirun) {
  const auto open_mpi = launch_from({{"OMPI_COMM_WORLD_RANK", "1"},
                                     {"OMPI_COMM_WORLD_SIZE", "2"},
                                     {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                                     {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
                                     {"MASTER_PORT", "1234"}});
  ASSERT_TRUE(open_mpi);
  EXPECT_EQ(open_mpi->address, "127.0.0.1");  // all on one machine
  EXPECT_EQ(open_mpi->local_rank, 1);
  const auto mpich = launch_from(
      {{"PMI_RANK", "1"}, {"PMI_SIZE", "2"}, {"MASTER_ADDR", "here"}, {"MASTER_PORT", "1234"}});
  ASSERT_TRUE(mpich);
  EXPECT_EQ(mpich->rank, 1);
  EXPECT_EQ(mpich->local_rank, std::nullopt);
  EXPECT_THAT(error_from({{"OMPI_COMM_WORLD_RANK", "1"},
                          {"OMPI_COMM_WORLD_SIZE", "4"},
                          {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
                          {"MASTER_PORT", "1234"}}),
              HasSubstr("but not MASTER_ADDR"));
}

TEST(Launch, RefusesWhatContradicts) {
  const Variables fine{
      {"RANK", "0"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "a"}, {"MASTER_PORT", "1"}};
  EXPECT_EQ(error_from(fine), "no error");
  const auto with = [&](const char* name, const char* value) {
    auto changed = fine;
    changed[name] = value;
    return error_from(changed);
  };
  EXPECT_THAT(with("RANK", ""), HasSubstr("has WORLD_SIZE but not RANK"));
  EXPECT_THAT(with("WORLD_SIZE", ""), HasSubstr("has RANK but not WORLD_SIZE"));
  EXPECT_THAT(with("RANK", "2"), HasSubstr("RANK=2, WORLD_SIZE=2"));
  EXPECT_THAT(with("RANK", "one"), HasSubstr("RANK=\"one\""));
  EXPECT_THAT(with("RANK", "-1"), HasSubstr("RANK=\"-1\""));
  EXPECT_THAT(with("MASTER_ADDR", ""), HasSubstr("not MASTER_ADDR"));
  EXPECT_THAT(with("MASTER_PORT", ""), HasSubstr("not MASTER_PORT"));
  EXPECT_THAT(with("MASTER_PORT", "70000"), HasSubstr("MASTER_PORT=70000"));
}

TEST(FirstHost, OfSlurmsLists) {
  EXPECT_EQ(first_host("node1"), "node1");
  EXPECT_EQ(first_host("node1,node2"), "node1");
  EXPECT_EQ(first_host("node[07-09,12],gpu3"), "node07");
  EXPECT_EQ(first_host("rack[2,5]-node[1-4].x"), "rack2-node1.x");
  EXPECT_EQ(first_host(""), "");
  EXPECT_EQ(first_host("node[07"), "node");
}

TEST(Rank, DISABLED_DoesNotGetItsGroup) {
  const char* seconds = std::getenv("WAITS_FOR");
  try {
    from_environment({.timeout = std::chrono::seconds(seconds ? std::atoi(seconds) : 1)});
    ADD_FAILURE() << "no error";
  } catch (const Error& error) {
    std::cout << error.what() << std::endl;
  }
}

TEST(Meeting, NamesAMissingRank) {
  // Rank 0 of 2 alone, then rank 1 of 2 alone.
  const Variables variables{{"RANK", "0"},
                            {"WORLD_SIZE", "2"},
                            {"MASTER_ADDR", "127.0.0.1"},
                            {"MASTER_PORT", std::to_string(testing::free_port())}};
  Process first("DoesNotGetItsGroup", variables);
  EXPECT_TRUE(first.wait(20s) && first.ended_well()) << first.output();
  EXPECT_THAT(first.output(), HasSubstr("rank 1 of 2 did not come within 1 s"));
  auto other = variables;
  other["RANK"] = "1";
  Process second("DoesNotGetItsGroup", other);
  EXPECT_TRUE(second.wait(20s) && second.ended_well()) << second.output();
  EXPECT_THAT(second.output(), HasSubstr("rank 1 waited 1 s for rank 0 at 127.0.0.1:"));
}

// As a process that was stopped does: the system still takes connections for it.
TEST(Meeting, NamesARankThatListensAndDoesNotAnswer) {
  const int silent = ::socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof(address);
  ASSERT_EQ(::bind(silent, reinterpret_cast<sockaddr*>(&address), length), 0);
  ASSERT_EQ(::listen(silent, 8), 0);
  ASSERT_EQ(::getsockname(silent, reinterpret_cast<sockaddr*>(&address), &length), 0);
  Process rank("DoesNotGetItsGroup", {{"RANK", "1"},
                                      {"WORLD_SIZE", "2"},
                                      {"MASTER_ADDR", "127.0.0.1"},
                                      {"MASTER_PORT", std::to_string(ntohs(address.sin_port))}});
  EXPECT_TRUE(rank.wait(20s) && rank.ended_well()) << rank.output();
  EXPECT_THAT(rank.output(), HasSubstr("rank 1 waited 1 s for rank 0 at 127.0.0.1:"));
  ::close(silent);
}

TEST(Meeting, NamesRanksThatWereToldOfDifferentWorlds) {
  Variables variables{{"RANK", "0"},
                      {"WORLD_SIZE", "2"},
                      {"WAITS_FOR", "20"},
                      {"MASTER_ADDR", "127.0.0.1"},
                      {"MASTER_PORT", std::to_string(testing::free_port())}};
  Process first("DoesNotGetItsGroup", variables);
  variables["RANK"] = "1";
  variables["WORLD_SIZE"] = "3";
  Process second("DoesNotGetItsGroup", variables);
  EXPECT_TRUE(first.wait(40s) && first.ended_well()) << first.output();
  EXPECT_TRUE(second.wait(40s) && second.ended_well()) << second.output();
  EXPECT_THAT(first.output(),
              HasSubstr("rank 1 was started as one of 3 ranks and rank 0 as one of 2"));
  EXPECT_THAT(second.output(),
              HasSubstr("rank 0 was started as one of 2 ranks and rank 1 as one of 3"));
}

TEST(Meeting, NamesAPortInUse) {
  const int taken = ::socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  socklen_t length = sizeof(address);
  ASSERT_EQ(::bind(taken, reinterpret_cast<sockaddr*>(&address), length), 0);
  ASSERT_EQ(::listen(taken, 1), 0);
  ASSERT_EQ(::getsockname(taken, reinterpret_cast<sockaddr*>(&address), &length), 0);
  const int port = ntohs(address.sin_port);
  Process rank("DoesNotGetItsGroup", {{"RANK", "0"},
                                      {"WORLD_SIZE", "2"},
                                      {"MASTER_ADDR", "127.0.0.1"},
                                      {"MASTER_PORT", std::to_string(port)}});
  EXPECT_TRUE(rank.wait(20s) && rank.ended_well()) << rank.output();
  EXPECT_THAT(rank.output(), AllOf(HasSubstr(join("rank 0 cannot listen on port ", port)),
                                   HasSubstr("set MASTER_PORT to a free port")));
  ::close(taken);
}

TEST(Meeting, NamesAnUnknownHost) {
  Launch launch;
  launch.rank = 1;
  launch.size = 2;
  launch.address = "no-such-host.invalid";
  launch.port = 1;
  try {
    meet(launch, 1s);
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("cannot find the host of rank 0, no-such-host.invalid"));
  }
}

}  // namespace
}  // namespace poise::comm

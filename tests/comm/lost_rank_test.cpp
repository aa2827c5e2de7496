// Ranks that die, fail, freeze, leave, differ or are merely slow: who is named, and how soon.
#include <ATen/ops/full.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <functional>
#include <iostream>

#include "comm/launch.h"
#include "comm/make_backend.h"
#include "comm/process_group.h"
#include "comm/processes.h"
#include "comm/rendezvous.h"
#include "comm/store_notes.h"
#include "poise/comm.h"
#include "poise/error.h"
#include "poise/interrupt.h"

namespace poise::comm {
namespace {

using namespace std::chrono_literals;
using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::Not;

at::Tensor floats(std::int64_t numel) { return at::full({numel}, 1, at::kFloat); }

// from_environment() with less patience.
std::shared_ptr<Group> impatient_group(WatchSettings settings, Options options = {}) {
  const auto launch = *launch_of([](const char* name) { return std::getenv(name); });
  Peers peers;
  peers.rank = launch.rank;
  peers.size = launch.size;
  peers.store = meet(launch, 30s);
  roll_call(peers.store, launch, "here", 30s);
  peers.backend = make_gloo(peers.store, launch.rank, launch.size, own_address(launch), 30s);
  settings.linger = launch.rank == 0 ? 5s : 0s;
  return group_of(peers, options, settings);
}

void say(const std::string& text) { std::cout << text << std::endl; }

// Comes to the meeting, and no further.
TEST(Rank, DISABLED_IsMetOnly) {
  const auto launch = *launch_of([](const char* name) { return std::getenv(name); });
  const char* victim = std::getenv("VICTIM");
  if (launch.rank == (victim ? std::atoi(victim) : 1)) {
    const auto store = meet(launch, 30s);
    roll_call(store, launch, "host elsewhere, pid 17\ncpu", 30s);
    if (victim) std::this_thread::sleep_for(2s);  // until the others have heard the roll, too
    _exit(0);
  }
  try {
    from_environment();
    ADD_FAILURE() << "no error";
  } catch (const Error& error) {
    say(error.what());
  }
}

TEST(Rank, DISABLED_IsSlowToMeet) {
  const auto launch = *launch_of([](const char* name) { return std::getenv(name); });
  const auto store = meet(launch, 30s);
  {
    const auto watch = watch_meeting(store, launch);
    say("waiting");
    if (launch.rank == 1) std::this_thread::sleep_for(12s);  // the patience is 10
    EXPECT_EQ(roll_call(store, launch, "here", 60s, [&] { watch->check(); }).size(), 3);
  }
  // Rank 0 holds the store: where it left first, the others would not read the roll to its end.
  auto over = store->add("over", 1);
  while (launch.rank == 0 && over < 3) {
    std::this_thread::sleep_for(20ms);
    over = store->add("over", 0);
  }
}

TEST(Rank, DISABLED_ComesAndWaits) {
  const auto launch = *launch_of([](const char* name) { return std::getenv(name); });
  const int victim = std::atoi(std::getenv("VICTIM"));
  if (launch.rank == victim) {
    const auto store = meet(launch, 30s);
    const auto watch = watch_meeting(store, launch);
    while (watch->awaited()) std::this_thread::sleep_for(20ms);
    say("waiting");
    std::this_thread::sleep_for(60s);
  }
  try {
    from_environment();
    ADD_FAILURE() << "no error";
  } catch (const Error& error) {
    say(error.what());
  }
}

bool listens(int port) {
  const int socket = ::socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(static_cast<std::uint16_t>(port));
  const auto* to = reinterpret_cast<const sockaddr*>(&address);
  const bool connected = ::connect(socket, to, sizeof(address)) == 0;
  ::close(socket);
  return connected;
}

std::atomic<bool> is_time = false;

// Rank 2 never comes.
TEST(Rank, DISABLED_IsInterruptedWhileItWaits) {
  const auto launch = *launch_of([](const char* name) { return std::getenv(name); });
  if (launch.rank == 2) std::this_thread::sleep_for(60s);
  std::thread clock([&] {
    while (!listens(launch.port)) std::this_thread::sleep_for(20ms);
    std::this_thread::sleep_for(1500ms);
    is_time = true;
  });
  set_interrupt_check([] {
    if (is_time) throw std::runtime_error("KeyboardInterrupt");
  });
  if (launch.rank != 1) set_interrupt_check(nullptr);
  try {
    from_environment();
    ADD_FAILURE() << "no error";
  } catch (const std::exception& error) {
    say(error.what());
  }
  clock.join();
}

// Rank 1 is gone when it would make its shard group.
TEST(Rank, DISABLED_MakesTheFirstOfItsGroups) {
  const auto launch = *launch_of([](const char* name) { return std::getenv(name); });
  if (launch.rank == 1) {
    Peers peers;
    peers.rank = launch.rank;
    peers.size = launch.size;
    peers.store = meet(launch, 30s);
    roll_call(peers.store, launch, "host elsewhere, pid 17\ncpu", 30s);
    auto seat = take_seat(peers, {});
    peers.backend = make_gloo(peers.store, launch.rank, launch.size, own_address(launch), 30s);
    std::this_thread::sleep_for(1s);
    _exit(0);
  }
  try {
    ranks_from_environment(2);
    ADD_FAILURE() << "no error";
  } catch (const Error& error) {
    say(error.what());
  }
}

// Rank 0 holds the store.
TEST(Rank, DISABLED_AsksTheStoreWithoutAWatch) {
  Peers peers;
  const auto launch = *launch_of([](const char* name) { return std::getenv(name); });
  peers.rank = launch.rank;
  peers.size = launch.size;
  peers.store = meet(launch, 30s);
  StoreNotes notes(peers.store);
  notes.leave("mine", "text");
  EXPECT_EQ(notes.find("mine"), "text");
  say("working");
  if (launch.rank == 0) std::this_thread::sleep_for(60s);
  const std::vector<std::function<void()>> questions{[&] {
                                                       while (notes.find("mine"))
                                                         std::this_thread::sleep_for(20ms);
                                                     },
                                                     [&] { take_seat(peers, {}); }};
  for (const auto& question : questions) {
    try {
      question();
      ADD_FAILURE() << "no error";
    } catch (const Error& error) {
      say(error.what());
    }
  }
}

// Works until something ends the group; prints what.
void work_until_it_ends(Group& group) {
  say("working");
  try {
    for (;;) group.all_reduce(floats(1000), "norm").wait();
  } catch (const Error& error) {
    say(join("ended by: ", error.what()));
    try {
      group.barrier("again");
    } catch (const Error& again) {
      EXPECT_STREQ(again.what(), error.what());
      return;
    }
  }
  ADD_FAILURE() << "the group goes on";
}

TEST(Rank, DISABLED_WorksUntilItEnds) { work_until_it_ends(*from_environment()); }

TEST(Rank, DISABLED_Impatient) {
  const auto group = impatient_group({.period = 100ms, .patience = 1s});
  work_until_it_ends(*group);
}

TEST(Rank, DISABLED_ImpatientWithASleeper) {
  const auto group = impatient_group({.period = 100ms, .patience = 1s});
  if (group->rank() == 1) {
    say("working");
    std::this_thread::sleep_for(20s);
  }
  work_until_it_ends(*group);
}

TEST(Rank, DISABLED_FailsInTheThirdStep) {
  const auto group = from_environment();
  for (int step = 0; step < 3; ++step) group->all_reduce(floats(10), "norm").wait();
  if (group->rank() == 1) {
    group->abort("ValueError: token 777 of 500");
  } else {
    work_until_it_ends(*group);
  }
}

TEST(Rank, DISABLED_SleepsLong) {
  // Ten times the patience: beats come from a thread of their own.
  const auto group = impatient_group({.period = 50ms, .patience = 300ms});
  if (group->rank() == 1) std::this_thread::sleep_for(3s);
  group->all_reduce(floats(10), "norm").wait();
  group->barrier("end");
}

TEST(Rank, DISABLED_WaitsTooLong) {
  const auto group = impatient_group({.period = 50ms}, {.timeout = 1s});
  group->barrier("start");
  if (group->rank() == 1) {
    std::this_thread::sleep_for(4s);
  } else {
    try {
      group->reduce_scatter(floats(10), floats(20), "blocks.3").wait();
      ADD_FAILURE() << "no error";
    } catch (const Error& error) {
      say(error.what());
    }
  }
}

TEST(Rank, DISABLED_RunsAnotherOrder) {
  const auto group = from_environment();
  group->barrier("start");
  try {
    if (group->rank() == 0) {
      group->all_gather(floats(3000), floats(1000), "blocks.0").wait();
    } else {
      group->reduce_scatter(floats(50), floats(150), "blocks.1").wait();
    }
    ADD_FAILURE() << "no error";
  } catch (const Error& error) {
    say(error.what());
  }
}

// Only the bytes do, which come last in what a collective is about.
TEST(Rank, DISABLED_DiffersBehindALongName) {
  const auto group = from_environment();
  group->barrier("start");
  try {
    group->broadcast(floats(group->rank() == 1 ? 11 : 10), 0, std::string(2000, 'x')).wait();
  } catch (const Error& error) {
    say(error.what());
  }
}

// Ranks 2 and 3 are 0 and 1 of their shard group.
TEST(Rank, DISABLED_DiffersInItsShardGroup) {
  const auto ranks = ranks_from_environment(2);
  ranks.shard->barrier("start");
  try {
    if (ranks.all->rank() < 3) {
      ranks.shard->all_gather(floats(20), floats(10), "blocks.0").wait();
    } else {
      ranks.shard->reduce_scatter(floats(10), floats(20), "blocks.1").wait();
    }
  } catch (const Error& error) {
    say(error.what());
  }
}

TEST(Rank, DISABLED_WorksInItsReplicaGroup) {
  work_until_it_ends(*ranks_from_environment(2).replica);
}

TEST(Rank, DISABLED_LeavesEarly) {
  const auto group = impatient_group({.period = 50ms});
  group->barrier("start");
  if (group->rank() == 1) return;
  work_until_it_ends(*group);
}

TEST(Rank, DISABLED_IsInterrupted) {
  const auto group = from_environment();
  group->barrier("start");
  if (group->rank() == 0) {
    set_interrupt_check([] { throw std::runtime_error("KeyboardInterrupt"); });
    try {
      group->all_reduce(floats(3), "norm").wait();
      ADD_FAILURE() << "no interrupt";
    } catch (const std::runtime_error& error) {
      EXPECT_STREQ(error.what(), "KeyboardInterrupt");
      set_interrupt_check(nullptr);
      group->abort(error.what());
    }
  } else {
    std::this_thread::sleep_for(1s);
    work_until_it_ends(*group);
  }
}

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

TEST(LostRank, KilledIsNamedWithinFifteenSeconds) {
  for (const std::size_t victim : {0u, 1u}) {  // rank 0 takes the store with it
    const auto ranks = start_ranks("WorksUntilItEnds", 3);
    for (const auto& rank : ranks) await_output(*rank, "working");
    std::this_thread::sleep_for(1500ms);  // names are known after a beat
    ranks[victim]->signal(SIGKILL);
    const auto start = std::chrono::steady_clock::now();
    for (std::size_t rank = 0; rank < 3; ++rank) {
      if (rank == victim) continue;
      EXPECT_TRUE(ranks[rank]->wait(30s));
      EXPECT_TRUE(ranks[rank]->ended_well()) << ranks[rank]->output();
      EXPECT_THAT(ranks[rank]->output(),
                  AllOf(ContainsRegex(join("rank ", victim, " \\(host .*, pid ",
                                           ranks[victim]->pid(), "\\)")),
                        HasSubstr("disappeared")));
    }
    EXPECT_LT(seconds_since(start), 15);
  }
}

TEST(LostRank, FrozenIsNamedByItsMissingBeat) {
  const auto ranks = start_ranks("Impatient", 3);
  for (const auto& rank : ranks) await_output(*rank, "working");
  std::this_thread::sleep_for(500ms);
  ranks[2]->signal(SIGSTOP);
  for (const std::size_t rank : {0u, 1u}) {
    EXPECT_TRUE(ranks[rank]->wait(20s));
    EXPECT_TRUE(ranks[rank]->ended_well()) << ranks[rank]->output();
    EXPECT_THAT(ranks[rank]->output(),
                AllOf(ContainsRegex("rank 2 \\(host .*\\) disappeared: no sign of life for 1 s"),
                      HasSubstr("all_reduce of 'norm'")));
  }
}

TEST(LostRank, KilledBeforeItDidAnythingIsNamedToo) {
  const auto ranks = start_ranks("ImpatientWithASleeper", 2);
  for (const auto& rank : ranks) await_output(*rank, "working");
  std::this_thread::sleep_for(500ms);
  ranks[1]->signal(SIGKILL);
  EXPECT_TRUE(ranks[0]->wait(20s));
  EXPECT_THAT(ranks[0]->output(),
              HasSubstr("no sign of life for 1 s, before any collective; look"));
}

// Though nobody has a connection to it yet, and it has never beaten.
TEST(LostRank, ThatCameToTheMeetingOnlyIsNamedWithinFifteenSeconds) {
  const auto ranks = start_ranks("IsMetOnly", 3);
  EXPECT_TRUE(ranks[1]->wait(30s));
  const auto start = std::chrono::steady_clock::now();
  for (const std::size_t rank : {0u, 2u}) {
    EXPECT_TRUE(ranks[rank]->wait(30s));
    EXPECT_TRUE(ranks[rank]->ended_well()) << ranks[rank]->output();
    EXPECT_THAT(ranks[rank]->output(),
                HasSubstr("rank 1 (host elsewhere, pid 17) disappeared: no sign of life for 10 s, "
                          "before any collective"));
  }
  EXPECT_LT(seconds_since(start), 15);
}

// Gloo, whose question it was, would say that the network is at fault.
TEST(LostRank, ThatTakesTheStoreWithItIsNamedWhileTheOthersConnect) {
  const auto ranks = start_ranks("IsMetOnly", 3, {{"VICTIM", "0"}});
  for (const std::size_t rank : {1u, 2u}) {
    EXPECT_TRUE(ranks[rank]->wait(30s));
    EXPECT_TRUE(ranks[rank]->ended_well()) << ranks[rank]->output();
    EXPECT_THAT(ranks[rank]->output(), ContainsRegex("\\[comm\\] lost the store .*rank 0"));
    EXPECT_THAT(ranks[rank]->output(), Not(HasSubstr("GLOO_SOCKET_IFNAME")));
  }
}

// Though it never came to the roll call, for which the others wait half an hour.
TEST(LostRank, ThatDiedWhileTheRanksMeetIsNamedWithinFifteenSeconds) {
  for (const std::size_t victim : {0u, 1u}) {  // rank 0 takes the store with it
    const auto ranks = start_ranks("ComesAndWaits", 3, {{"VICTIM", std::to_string(victim)}});
    await_output(*ranks[victim], "waiting");
    std::this_thread::sleep_for(1500ms);
    ranks[victim]->signal(SIGKILL);
    const auto start = std::chrono::steady_clock::now();
    const auto said =
        victim == 0 ? std::string("lost the store .* look at the output of rank 0")
                    : join("rank 1 \\(host .*, pid ", ranks[1]->pid(),
                           "\\) disappeared: no sign of life for 10 s, before any collective");
    for (std::size_t rank = 0; rank < 3; ++rank) {
      if (rank == victim) continue;
      EXPECT_TRUE(ranks[rank]->wait(30s));
      EXPECT_TRUE(ranks[rank]->ended_well()) << ranks[rank]->output();
      EXPECT_THAT(ranks[rank]->output(), ContainsRegex(said));
    }
    EXPECT_LT(seconds_since(start), 15);
  }
}

TEST(LostRank, AFrozenStoreIsNamedWhileTheRanksMeet) {
  const auto ranks = start_ranks("ComesAndWaits", 3, {{"VICTIM", "2"}});
  await_output(*ranks[2], "waiting");
  std::this_thread::sleep_for(1500ms);
  ranks[0]->signal(SIGSTOP);
  EXPECT_TRUE(ranks[1]->wait(30s));
  EXPECT_TRUE(ranks[1]->ended_well()) << ranks[1]->output();
  EXPECT_THAT(ranks[1]->output(),
              ContainsRegex("store of the group has not answered for 10 s; its host, rank 0 "
                            "\\(host .*\\) or the launcher, was stopped"));
}

TEST(LostRank, AFrozenStoreIsNamedWhereNobodyWatchesOverIt) {
  const auto ranks = start_ranks("AsksTheStoreWithoutAWatch", 2);
  for (const auto& rank : ranks) await_output(*rank, "working");
  ranks[0]->signal(SIGSTOP);
  EXPECT_TRUE(ranks[1]->wait(40s));
  EXPECT_TRUE(ranks[1]->ended_well()) << ranks[1]->output();
  const std::string said =
      "store of the group has not answered for 10 s; its host, rank 0 or the launcher, was stopped";
  EXPECT_THAT(ranks[1]->output(), ContainsRegex(said + "(.|\n)*" + said));
}

// Rank 2 waits for rank 0 alone, which lives, and which waits for rank 1.
TEST(LostRank, IsHeardOfInGroupsThatItIsNoMemberOf) {
  const auto ranks = start_ranks("MakesTheFirstOfItsGroups", 4);
  EXPECT_TRUE(ranks[1]->wait(30s));
  const auto start = std::chrono::steady_clock::now();
  for (const std::size_t rank : {0u, 2u, 3u}) {
    EXPECT_TRUE(ranks[rank]->wait(30s));
    EXPECT_TRUE(ranks[rank]->ended_well()) << ranks[rank]->output();
    EXPECT_THAT(ranks[rank]->output(),
                HasSubstr("rank 1 (host elsewhere, pid 17) disappeared: no sign of life for 10 s"));
  }
  EXPECT_LT(seconds_since(start), 25);
}

TEST(SlowRank, IsWaitedForWhileTheRanksMeet) { run_ranks("IsSlowToMeet", 3); }

// It holds the store, so that nobody answers.
TEST(LostRank, AFrozenStoreIsNamed) {
  const auto ranks = start_ranks("Impatient", 3);
  for (const auto& rank : ranks) await_output(*rank, "working");
  std::this_thread::sleep_for(500ms);
  ranks[0]->signal(SIGSTOP);
  for (const std::size_t rank : {1u, 2u}) {
    EXPECT_TRUE(ranks[rank]->wait(20s));
    EXPECT_TRUE(ranks[rank]->ended_well()) << ranks[rank]->output();
    EXPECT_THAT(ranks[rank]->output(),
                ContainsRegex("store of the group has not answered for 1 s; its host, rank 0 "
                              "\\(host .*\\) or the launcher, was stopped"));
  }
}

TEST(LostRank, PassesItsMessageOn) {
  const auto start = std::chrono::steady_clock::now();
  const auto ranks = start_ranks("FailsInTheThirdStep", 3);
  expect_all_well(ranks);
  for (const std::size_t rank : {0u, 2u}) {
    EXPECT_THAT(ranks[rank]->output(), AllOf(ContainsRegex("rank 1.* ended the group"),
                                             HasSubstr("ValueError: token 777 of 500")));
  }
  EXPECT_LT(seconds_since(start), 15);
}

TEST(StoppedJob, GoesOnTogether) {
  const auto ranks = start_ranks("Impatient", 3);
  for (const auto& rank : ranks) await_output(*rank, "working");
  for (const auto& rank : ranks) rank->signal(SIGSTOP);
  std::this_thread::sleep_for(2s);
  for (const auto& rank : ranks) rank->signal(SIGCONT);
  std::this_thread::sleep_for(2s);  // the patience is one
  for (const auto& rank : ranks) EXPECT_FALSE(rank->wait(0s)) << rank->output();
}

TEST(SlowRank, DoesNotFall) { run_ranks("SleepsLong", 2); }

TEST(SlowRank, FallsByTheTimeoutWithItsPlace) {
  const auto ranks = start_ranks("WaitsTooLong", 2);
  expect_all_well(ranks);
  EXPECT_THAT(ranks[0]->output(),
              AllOf(HasSubstr("rank 0 waited 1 s in collective 1, reduce_scatter of 'blocks.3'"),
                    HasSubstr("which is last in collective 0, barrier of 'start'")));
}

TEST(Divergence, IsNamedByAllRanks) {
  const auto ranks = start_ranks("RunsAnotherOrder", 3);
  expect_all_well(ranks);
  for (const auto& rank : ranks) {
    EXPECT_THAT(rank->output(),
                AllOf(HasSubstr("rank 0 is in collective 1, all_gather of 'blocks.0' (12000 bytes "
                                "of Float)"),
                      HasSubstr("rank 1 is in collective 1, reduce_scatter of 'blocks.1'")));
  }
}

TEST(Divergence, BehindALongNameIsNamedToo) {
  const auto ranks = start_ranks("DiffersBehindALongName", 4);
  expect_all_well(ranks);
  for (const auto& rank : ranks) {
    EXPECT_THAT(rank->output(),
                AllOf(ContainsRegex("rank 0 is in .*x' from rank 0 \\(40 bytes of Float\\)"),
                      ContainsRegex("rank 1 is in .*x' from rank 0 \\(44 bytes of Float\\)")));
  }
}

// As the world numbers them, whichever part of it they were in.
TEST(Divergence, InAShardGroupIsNamedByTheRanksOfTheWorld) {
  const auto ranks = start_ranks("DiffersInItsShardGroup", 4);
  expect_all_well(ranks);
  for (const std::size_t rank : {2u, 3u}) {
    EXPECT_THAT(ranks[rank]->output(),
                AllOf(HasSubstr("rank 2 is in collective 1, all_gather of 'blocks.0'"),
                      HasSubstr("rank 3 is in collective 1, reduce_scatter of 'blocks.1'")));
  }
}

TEST(LostRank, OfAReplicaGroupIsNamedByItsRankOfTheWorld) {
  const auto ranks = start_ranks("WorksInItsReplicaGroup", 4);
  for (const auto& rank : ranks) await_output(*rank, "working");
  std::this_thread::sleep_for(1500ms);  // names are known after a beat
  ranks[3]->signal(SIGKILL);
  EXPECT_TRUE(ranks[1]->wait(30s));
  EXPECT_THAT(ranks[1]->output(),
              AllOf(ContainsRegex(join("rank 3 \\(host .*, pid ", ranks[3]->pid(), "\\)")),
                    HasSubstr("while rank 1 was in")));
}

TEST(LeavingRank, IsNamed) {
  const auto ranks = start_ranks("LeavesEarly", 2);
  expect_all_well(ranks);
  EXPECT_THAT(ranks[0]->output(), AllOf(HasSubstr("rank 1"), HasSubstr("collective 1")));
}

TEST(Interrupt, EndsAWaitAndTheOtherRanks) {
  const auto ranks = start_ranks("IsInterrupted", 2);
  expect_all_well(ranks);
  EXPECT_THAT(ranks[1]->output(), HasSubstr("KeyboardInterrupt"));
}

// It lets the others know, as one that is killed cannot.
TEST(Interrupt, WhileTheRanksMeetEndsTheOthers) {
  const auto ranks = start_ranks("IsInterruptedWhileItWaits", 3);
  for (const std::size_t rank : {0u, 1u}) {
    EXPECT_TRUE(ranks[rank]->wait(30s));
    EXPECT_TRUE(ranks[rank]->ended_well()) << ranks[rank]->output();
  }
  EXPECT_THAT(ranks[0]->output(), ContainsRegex(join("rank 1 \\(host .*, pid ", ranks[1]->pid(),
                                                     "\\) ended the group: KeyboardInterrupt")));
}

}  // namespace
}  // namespace poise::comm

// Groups of processes over gloo, made without Python: the bits of the threads group.
#include <ATen/ops/_lazy_clone.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <cstdlib>
#include <fstream>

#include "comm/chain.h"
#include "comm/make_backend.h"
#include "comm/process_group.h"
#include "comm/processes.h"
#include "comm/rank_values.h"
#include "poise/comm.h"
#include "poise/error.h"
#include "support/free_port.h"
#include "support/ranks.h"

namespace poise::comm {
namespace {

using ::testing::HasSubstr;

// What follows runs in a process of its own per rank.

TEST(Rank, DISABLED_HasTheBitsOfThreads) {
  const auto group = from_environment();
  const int size = group->size();
  EXPECT_EQ(group->backend(), "gloo");
  EXPECT_EQ(std::to_string(group->rank()), std::getenv("RANK"));
  for (const std::int64_t numel : {1, 11, 5000, 40001}) {  // the last in several blocks
    at::Tensor want;
    testing::on_ranks(size, [&](Group& threads) {
      const auto end = chain(threads, numel);
      if (threads.rank() == group->rank()) want = end;
    });
    EXPECT_TRUE(same_bits(chain(*group, numel), want)) << numel;
  }
  for (const auto& [type, numel] : std::vector<std::pair<c10::ScalarType, std::int64_t>>{
           {at::kBFloat16, 777}, {at::kHalf, 777}, {at::kBFloat16, 200003}, {at::kHalf, 200003}}) {
    auto mine = at::full({numel}, 99, at::kFloat);
    group->reduce_scatter(mine, flat_of(values_of(group->rank(), size * numel), type), "x").wait();
    const auto want = sum_in_order(size, size * numel, type);
    EXPECT_TRUE(same_bits(mine, want.narrow(0, group->rank() * numel, numel))) << type;
  }
  EXPECT_EQ(
      group->all_gather_text(std::string(static_cast<std::size_t>(group->rank()), 'x'), "t"),
      (size == 2 ? std::vector<std::string>{"", "x"} : std::vector<std::string>{"", "x", "xx"}));
}

TEST(Rank, DISABLED_LeavesNotes) {
  const auto group = from_environment();
  const auto wait_for = [&](const std::string& key) {
    for (;;) {
      if (const auto text = group->note(key)) return *text;
      group->check();
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  };
  const int next = (group->rank() + 1) % group->size();
  EXPECT_EQ(group->note("nobody's"), std::nullopt);
  group->leave_note(join("from ", group->rank()), join("text\n of ", group->rank()));
  EXPECT_EQ(wait_for(join("from ", next)), join("text\n of ", next));
  std::thread other([&] { group->leave_note(join("again ", group->rank()), ""); });
  EXPECT_EQ(wait_for(join("again ", next)), "");
  other.join();
  group->barrier("all have read");  // collectives go on beside them
  group->leave_note(join("from ", group->rank()), "later");
  group->barrier("all have left one");
  EXPECT_EQ(group->note(join("from ", next)), "later");
}

TEST(Rank, DISABLED_GathersAnyDtypeInPlaceAndNot) {
  const auto group = from_environment();
  const int size = group->size();
  for (const auto type :
       {at::kFloat, at::kBFloat16, at::kHalf, at::kDouble, at::kLong, at::kInt, at::kByte}) {
    for (const std::int64_t numel : {0, 1, 7, 8195}) {
      auto whole = at::full({size * numel}, 99, type);
      auto in_place = at::full({size * numel}, 99, type);
      const auto mine = flat_of(values_of(group->rank(), numel), type);
      in_place.narrow(0, group->rank() * numel, numel).copy_(mine);
      const auto version = in_place._version();
      group->all_gather(whole, mine, "x").wait();
      group->all_gather(in_place, in_place.narrow(0, group->rank() * numel, numel), "x").wait();
      EXPECT_EQ(in_place._version(), version);
      for (int rank = 0; rank < size; ++rank) {
        const auto want = flat_of(values_of(rank, numel), type);
        EXPECT_TRUE(same_bits(whole.narrow(0, rank * numel, numel), want)) << type << ' ' << numel;
        EXPECT_TRUE(same_bits(in_place.narrow(0, rank * numel, numel), want)) << type;
      }
    }
  }
}

TEST(Rank, DISABLED_MakesSeveralGroups) {
  // One after the other, and two at once around one backend.
  for (int i = 0; i < 2; ++i) {
    const auto group = from_environment();
    group->barrier("made");
  }
}

TEST(Rank, DISABLED_WrapsAProcessGroup) {
  const int rank = std::atoi(std::getenv("RANK")), size = 2;
  ::c10d::TCPStoreOptions options;
  options.port = static_cast<std::uint16_t>(std::atoi(std::getenv("MASTER_PORT")));
  options.isServer = rank == 0;
  const auto store = c10::make_intrusive<::c10d::TCPStore>("127.0.0.1", options);
  const auto torchs = c10::make_intrusive<::c10d::ProcessGroup>(store, rank, size);
  const auto gloo = make_gloo(store, rank, size, "127.0.0.1", std::chrono::seconds(30));
  using Type = ::c10d::ProcessGroup::BackendType;
  torchs->setBackend(c10::kCPU, Type::GLOO, gloo);
  torchs->setDefaultBackend(Type::GLOO);
  {
    const auto first = from_process_group(torchs, c10::kCPU);
    const auto second = from_process_group(torchs, c10::kCPU);
    // In flight at once, on two streams: their messages must not mix.
    const auto a = flat_of(values_of(rank, 5000, 1)), b = flat_of(values_of(rank, 5000, 2));
    const Event one = first->all_reduce(a, "a");
    const Event two = second->all_reduce(b, "b");
    one.wait();
    two.wait();
    EXPECT_TRUE(same_bits(a, sum_in_order(size, 5000, at::kFloat, 1)));
    EXPECT_TRUE(same_bits(b, sum_in_order(size, 5000, at::kFloat, 2)));
    first->barrier("end");
  }
  try {
    from_process_group(torchs, c10::Device(c10::kCUDA, 0));
    ADD_FAILURE() << "no error";
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("carries no tensors on cuda:0; it has: cpu"));
  }
  torchs->setBackend(c10::kCUDA, Type::GLOO, gloo);
  try {
    from_process_group(torchs, c10::Device(c10::kCUDA, 0));
    ADD_FAILURE() << "no error";
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("on cuda:0 over gloo; poise needs nccl there"));
  }
  store->add("over", 1);
  while (store->add("over", 0) < size) {  // rank 0 holds the store
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
}

// Counts what goes through a backend.
class Counting : public ::c10d::Backend {
 public:
  explicit Counting(c10d_calls::BackendPtr inner)
      : Backend(inner->getRank(), inner->getSize()), inner_(std::move(inner)) {}
  const std::string getBackendName() const override { return inner_->getBackendName(); }
  c10d_calls::WorkPtr send(std::vector<at::Tensor>& tensors, int rank, int tag) override {
    for (const auto& tensor : tensors) sent += static_cast<std::int64_t>(tensor.nbytes());
    return inner_->send(tensors, rank, tag);
  }
  c10d_calls::WorkPtr recv(std::vector<at::Tensor>& tensors, int rank, int tag) override {
    return inner_->recv(tensors, rank, tag);
  }
  std::int64_t sent = 0;

 private:
  c10d_calls::BackendPtr inner_;
};

// This rank of a group whose bytes are counted: body(group, backend).
template <class Body>
void on_counted_group(Body body) {
  const int rank = std::atoi(std::getenv("RANK")), size = std::atoi(std::getenv("WORLD_SIZE"));
  ::c10d::TCPStoreOptions options;
  options.port = static_cast<std::uint16_t>(std::atoi(std::getenv("MASTER_PORT")));
  options.isServer = rank == 0;
  const auto store = c10::make_intrusive<::c10d::TCPStore>("127.0.0.1", options);
  const auto counting = c10::make_intrusive<Counting>(
      make_gloo(store, rank, size, "127.0.0.1", std::chrono::seconds(30)));
  {
    const auto group = group_of({counting, store, rank, size}, Options{}, {});
    body(*group, *counting);
    group->barrier("end");
  }
  store->add("over", 1);
  while (store->add("over", 0) < size) {  // rank 0 holds the store
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
}

TEST(Rank, DISABLED_ReducesWithFewBytes) {
  on_counted_group([](Group& group, const Counting& counting) {
    const int rank = group.rank(), size = group.size();
    for (const std::int64_t numel : {1000, 50001}) {
      const auto values = flat_of(values_of(rank, numel, 1));
      const auto wide = flat_of(values_of(rank, numel, 2), at::kDouble);
      const auto before = counting.sent;
      group.all_reduce(values, "values").wait();
      const auto moved = static_cast<double>(counting.sent - before);
      EXPECT_TRUE(same_bits(values, sum_in_order(size, numel, at::kFloat, 1))) << numel;
      group.all_reduce(wide, "wide").wait();
      auto want = at::zeros({numel}, at::kDouble);
      for (int r = 0; r < size; ++r) want += flat_of(values_of(r, numel, 2), at::kDouble);
      EXPECT_TRUE(same_bits(wide, want)) << numel;
      const double bytes = 4.0 * static_cast<double>(numel), others = size - 1;
      // Small ones go to all at once; of large ones each rank sums a segment.
      const double expected =
          numel == 1000 || size == 2 ? others * bytes : 2 * others / size * bytes;
      EXPECT_NEAR(moved, expected, 0.01 * expected + 64 * others) << numel << " of " << size;
    }
  });
}

TEST(Rank, DISABLED_ReadsWhatIsNear) {
  on_counted_group([](Group& group, const Counting& counting) {
    const int rank = group.rank(), size = group.size();
    group.barrier("met");
    const std::int64_t numel = 250001;
    const auto values = flat_of(values_of(rank, numel, 1));
    const auto wide = flat_of(values_of(rank, numel, 2), at::kDouble);
    const auto sent = flat_of(values_of(rank, numel * size, 3));
    auto received = at::zeros({numel * size}, at::kFloat);
    auto shown = rank == 1 ? values.clone() : at::zeros({numel}, at::kFloat);
    const auto before = counting.sent;
    group.broadcast(shown, 1, "shown").wait();
    group.all_reduce(values, "values").wait();
    group.all_reduce(wide, "wide").wait();
    group.all_to_all(received, sent, "exchanged").wait();
    EXPECT_LE(counting.sent - before, 4 * 4 * 16 * (size - 1));
    EXPECT_TRUE(same_bits(shown, flat_of(values_of(1, numel, 1))));
    EXPECT_TRUE(same_bits(values, sum_in_order(size, numel, at::kFloat, 1)));
    auto want = at::zeros({numel}, at::kDouble);
    for (int r = 0; r < size; ++r) {
      want += flat_of(values_of(r, numel, 2), at::kDouble);
      const auto from = flat_of(values_of(r, numel * size, 3)).narrow(0, rank * numel, numel);
      EXPECT_TRUE(same_bits(received.narrow(0, r * numel, numel), from)) << r;
    }
    EXPECT_TRUE(same_bits(wide, want));
  });
}

// Its memory moves when it is first written to.
TEST(Rank, DISABLED_ReducesALazyClone) {
  const auto group = from_environment();
  group->barrier("met");
  const std::int64_t numel = 50001;
  const auto original = flat_of(values_of(group->rank(), numel));
  const auto lazy = at::_lazy_clone(original);
  group->all_reduce(lazy, "x").wait();
  EXPECT_TRUE(same_bits(lazy, sum_in_order(group->size(), numel, at::kFloat)));
  EXPECT_TRUE(same_bits(original, flat_of(values_of(group->rank(), numel))));
}

TEST(Rank, DISABLED_SumsNothing) {
  const auto group = from_environment();
  group->all_reduce(at::zeros({0}, at::kFloat), "x").wait();
  group->reduce_scatter(at::zeros({0}, at::kFloat), at::zeros({0}, at::kFloat), "x").wait();
  group->barrier("end");
}

// What a child does with its parent's group is nothing to the other ranks.
TEST(Rank, DISABLED_Forks) {
  const auto group = from_environment();
  const auto values = at::full({5}, 1, at::kFloat);
  group->all_reduce(values, "x").wait();
  const pid_t child = fork();
  if (child == 0) {
    alarm(10);
    try {
      group->barrier("in the child");
    } catch (const Error& error) {
      group->abort("the child's failure");
      const bool says =
          std::string(error.what()).find("in the child of a fork") != std::string::npos;
      _exit(says ? 0 : 1);
    }
    _exit(2);
  }
  int status = -1;
  waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
  for (int i = 0; i < 3; ++i) group->all_reduce(values, "x").wait();
  EXPECT_EQ(values.const_data_ptr<float>()[0], 16);  // two ranks, four times
}

// Its page cannot be found: another file, as long and as empty, lies in its place.
TEST(Rank, DISABLED_LosesItsPage) {
  const auto group = from_environment();
  for (int descriptor = 3; descriptor < 1000 && group->rank() == 1; ++descriptor) {
    char name[64] = {};
    const auto link = join("/proc/self/fd/", descriptor);
    if (readlink(link.c_str(), name, sizeof(name) - 1) < 0) continue;
    if (std::string(name).find("memfd:poise") == std::string::npos) continue;
    const auto other = std::tmpfile();
    ASSERT_EQ(ftruncate(fileno(other), 4096), 0);
    dup2(fileno(other), descriptor);
  }
  alarm(20);
  for (int i = 0; i < 3; ++i) group->barrier("x");
}

TEST(Rank, DISABLED_ShardsInBlocks) {
  const auto ranks = ranks_from_environment(2);
  EXPECT_EQ(ranks.all->size(), 4);
  EXPECT_EQ(ranks.shard->size(), 2);
  EXPECT_EQ(ranks.replica->size(), 2);
  EXPECT_EQ(ranks.all->rank(), 2 * ranks.replica->rank() + ranks.shard->rank());
  const auto name = std::to_string(ranks.all->rank());
  const auto block = ranks.shard->all_gather_text(name, "block");
  const auto first = 2 * ranks.replica->rank();
  EXPECT_EQ(block, (std::vector{std::to_string(first), std::to_string(first + 1)}));
  const auto place = ranks.shard->rank();
  EXPECT_EQ(ranks.replica->all_gather_text(name, "place"),
            (std::vector{std::to_string(place), std::to_string(place + 2)}));
  for (const auto& group : {ranks.replica, ranks.shard, ranks.all}) group->barrier("end");
  try {
    ranks_from_environment(3);
    ADD_FAILURE() << "no error";
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("shard groups of 3 ranks do not divide the 4 ranks"));
  }
}

// From here on: the test's own process.

const Variables kApart{{"POISE_NEAR_MEMORY", "off"}};  // ranks that cannot read each other

TEST(ProcessGroup, ReducesWithFewBytes) {
  run_ranks("ReducesWithFewBytes", 2, kApart);
  run_ranks("ReducesWithFewBytes", 3, kApart);
}

TEST(ProcessGroup, ReadsWhatIsNear) {
  int scope = 0;
  std::ifstream("/proc/sys/kernel/yama/ptrace_scope") >> scope;
  if (scope > 0 && geteuid() != 0) GTEST_SKIP() << "ranks may not read each other here (Yama)";
  run_ranks("ReadsWhatIsNear", 2);
  run_ranks("ReadsWhatIsNear", 3);
}

// As on two hosts, or where the system refuses: then all must send.
TEST(ProcessGroup, SendsWhereOneRankCannotBeRead) {
  Variables variables{{"WORLD_SIZE", "2"},
                      {"MASTER_ADDR", "127.0.0.1"},
                      {"MASTER_PORT", std::to_string(testing::free_port())},
                      {"OMP_NUM_THREADS", "1"},
                      {"CUDA_VISIBLE_DEVICES", ""}};
  Processes ranks;
  for (const char* rank : {"0", "1"}) {
    variables["RANK"] = variables["LOCAL_RANK"] = rank;
    if (*rank == '1') variables.insert(kApart.begin(), kApart.end());
    ranks.push_back(std::make_unique<Process>("HasTheBitsOfThreads", variables));
  }
  expect_all_well(ranks);
}

TEST(ProcessGroup, ReducesALazyClone) {
  run_ranks("ReducesALazyClone", 2);
  run_ranks("ReducesALazyClone", 3);
}

TEST(ProcessGroup, SendsWhereAnotherFileLiesInThePlaceOfAPage) { run_ranks("LosesItsPage", 2); }

TEST(ProcessGroup, SumsNothing) {
  run_ranks("SumsNothing", 2);
  run_ranks("SumsNothing", 2, kApart);
}

TEST(ProcessGroup, IsNotEndedByTheChildOfAFork) { run_ranks("Forks", 2); }

TEST(ProcessGroup, ShardsInBlocks) { run_ranks("ShardsInBlocks", 4); }

TEST(ProcessGroup, HasTheBitsOfThreads) {
  for (const auto& variables : {Variables(), kApart}) {
    run_ranks("HasTheBitsOfThreads", 2, variables);
    run_ranks("HasTheBitsOfThreads", 3, variables);
  }
}

TEST(ProcessGroup, LeavesNotes) { run_ranks("LeavesNotes", 3); }

TEST(ProcessGroup, GathersAnyDtypeInPlaceAndNot) {
  run_ranks("GathersAnyDtypeInPlaceAndNot", 2);
  run_ranks("GathersAnyDtypeInPlaceAndNot", 2, kApart);
}

TEST(ProcessGroup, CanBeMadeAgain) { run_ranks("MakesSeveralGroups", 2); }

TEST(ProcessGroup, WrapsOneOfTorchs) { run_ranks("WrapsAProcessGroup", 2); }

TEST(ProcessGroup, UsesTheStoreOfTorchrunsAgent) {
  ::c10d::TCPStoreOptions options;
  options.port = 0;
  options.isServer = true;
  options.waitWorkers = false;
  const auto agent = c10::make_intrusive<::c10d::TCPStore>("127.0.0.1", options);
  Variables variables{{"TORCHELASTIC_USE_AGENT_STORE", "True"},
                      {"MASTER_PORT", std::to_string(agent->getPort())}};
  // A restart finds the keys of the attempt before in the store.
  for (const char* attempt : {"0", "1"}) {
    variables["TORCHELASTIC_RESTART_COUNT"] = attempt;
    run_ranks("MakesSeveralGroups", 2, variables);
  }
}

TEST(ProcessGroup, OfOneRankNeedsNothing) {
  const auto store = c10::make_intrusive<::c10d::HashStore>();
  const auto torchs = c10::make_intrusive<::c10d::ProcessGroup>(store, 0, 1);
  using Type = ::c10d::ProcessGroup::BackendType;
  torchs->setBackend(c10::kCPU, Type::GLOO,
                     make_gloo(store, 0, 1, "127.0.0.1", std::chrono::seconds(30)));
  const auto group = from_process_group(torchs, c10::kCPU);
  EXPECT_EQ(group->backend(), "gloo");
  EXPECT_TRUE(group->all_reduce(at::full({2}, 1, at::kFloat), "x").done());
}

}  // namespace
}  // namespace poise::comm

// The search: the batch is kept, budgets hold, more memory is never slower, and it is quick.
#include <gmock/gmock.h>

#include <chrono>

#include "poise/error.h"
#include "poise/plan.h"

namespace poise::plan {
namespace {

using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

constexpr double kGib = 1024.0 * 1024 * 1024;

Job job_of(const char* model, const char* machine) {
  Job job;
  job.model = known_transformer(model);
  job.machine = read_machine(machine);
  job.sequence = 2048;
  job.global_batch = 64;
  job.precision.dtype = job.precision.parameters = config::DType::bf16;
  return job;
}

TEST(Search, MoreMemoryIsNeverSlower) {
  auto job = job_of("llama-3.2-1b", "4xA100-80GB");
  double slowest = 1e30;
  int fitting = 0;
  for (int gib = 6; gib <= 160; gib += gib < 40 ? 4 : 20) {
    job.budget = static_cast<std::int64_t>(gib * kGib);
    const auto answer = search(job);
    if (!answer.fits) continue;
    ++fitting;
    EXPECT_LE(answer.best.memory.highest(), job.budget);
    EXPECT_LE(answer.best.time.total, slowest) << gib << " GiB";
    slowest = answer.best.time.total;
  }
  EXPECT_GT(fitting, 8);
}

TEST(Search, RanksReserveMemoryForSumsOnCpusOnly) {
  EXPECT_FALSE(search(job_of("llama-3.2-1b", "2xH100-80GB")).best.choice.ranks_reserve);
  EXPECT_TRUE(search(job_of("llama-3.2-1b", "2xCPU")).best.choice.ranks_reserve);
}

TEST(Search, TheGlobalBatchIsKeptAndTheFrontHasNoLosers) {
  const auto job = job_of("llama-3-8b", "8xH100-80GB");
  const auto answer = search(job);
  ASSERT_TRUE(answer.fits);
  ASSERT_GT(answer.front.size(), 3u);
  for (const auto& plan : answer.front) {
    EXPECT_EQ(plan.choice.micro_batch * plan.choice.accumulation * plan.choice.ranks, 64);
  }
  for (std::size_t i = 1; i < answer.front.size(); ++i) {
    EXPECT_LT(answer.front[i].memory.highest(), answer.front[i - 1].memory.highest());
    EXPECT_GE(answer.front[i].time.total, answer.front[i - 1].time.total);
  }
  ASSERT_TRUE(answer.has_runner_up);
  EXPECT_GE(answer.runner_up.time.total, answer.best.time.total);
  EXPECT_FALSE(answer.why.empty());
}

TEST(Search, NothingFasterThatFitsWasLeftOut) {
  // One rank and one micro-batch: every recomputation by hand.
  auto job = job_of("gpt2", "1xA100-40GB");
  job.micro_batch = 8;
  const auto widths = plan::widths(job.precision, job.optimizer);
  const auto made = chain(job.model, {8, job.sequence}, job.precision, Place::gpu);
  for (const double gib : {7.0, 9.0, 12.0, 30.0}) {
    job.budget = static_cast<std::int64_t>(gib * kGib);
    double fastest = 1e30;
    for (int count = 0; count <= 12; ++count) {
      Choice choice;
      choice.micro_batch = choice.accumulation = 8;
      choice.recompute = Recompute::whole;
      choice.recomputed.assign(12, false);
      std::fill_n(choice.recomputed.begin(), count, true);
      if (memory(made, choice, widths).highest() > job.budget) continue;
      fastest = std::min(
          fastest, time(made, choice, widths, job.precision, job.machine, 8 * job.sequence).total);
    }
    EXPECT_LE(search(job).best.time.total, fastest) << gib;
  }
}

TEST(Search, AnImpossibleBudgetNamesFloorAndCause) {
  auto job = job_of("llama-3-70b", "1xH100-80GB");
  auto answer = search(job);
  EXPECT_FALSE(answer.fits);
  EXPECT_EQ(answer.dominated_by, "optimizer");
  // The floor is the nearest budget that works.
  job.budget = answer.best.memory.highest();
  EXPECT_TRUE(search(job).fits);
  job.budget -= 1;
  EXPECT_FALSE(search(job).fits);
  EXPECT_THAT(search(job_of("llama-3-70b", "64xH100-80GB")).dominated_by, HasSubstr("is built"));
}

TEST(Search, BatchesThatCannotBeSplitShowTheNearest) {
  auto job = job_of("gpt2", "8xA100-80GB");
  job.global_batch = 60;
  EXPECT_THAT([&] { search(job); }, ThrowsMessage<Error>(HasSubstr("56 and 64")));
  job.global_batch = 64;
  job.micro_batch = 3;
  EXPECT_THAT([&] { search(job); }, ThrowsMessage<Error>(HasSubstr("1, 2, 4, 8")));
}

TEST(Search, GroupsOfANodeAreSearchedAndPayWhereTheNetworkIsSlow) {
  auto job = job_of("llama-3-8b", "64xA100-80GB");
  job.global_batch = 1024;
  job.micro_batch = 1;  // gathers in each of 16, sums across once
  job.stages = {3};
  job.machine.device.network_rate = 1e9;
  const auto free = search(job);
  ASSERT_TRUE(free.fits);
  EXPECT_EQ(shard_ranks(free.best.choice), 8);
  job.shard_ranks = {64};
  const auto all = search(job);
  EXPECT_LT(free.best.time.total, all.best.time.total);
  EXPECT_LT(all.best.memory.held[0], free.best.memory.held[0]);
  job.shard_ranks = {6};
  EXPECT_THAT([&] { search(job); }, ThrowsMessage<Error>(HasSubstr("groups of 6 ranks")));
}

TEST(Search, TrafficOfGroups) {
  Choice choice;
  choice.ranks = 16;
  choice.shard_ranks = 4;
  choice.stage = 3;
  choice.reduces_every = true;
  choice.accumulation = 2;
  const auto moved = traffic(1600, choice, {});
  EXPECT_DOUBLE_EQ(moved.gathers, 2 * 2 * 0.75 * 1600 * 4);
  EXPECT_DOUBLE_EQ(moved.reduces, 2 * 0.75 * 1600 * 4);
  EXPECT_DOUBLE_EQ(moved.across, 2 * 0.75 * 400 * 4);  // once, of a shard, among four
}

TEST(Search, ActivationsAreOffloadedWhereThatIsAllThatHelps) {
  auto job = job_of("llama-3.2-1b", "1xA100-40GB");
  job.sequence = 32768;
  job.global_batch = 1;
  job.searches_recompute = false;
  const auto without = search(job);
  job.offloads.resize(2);
  job.offloads[1].activations = config::Offload::host;
  const auto with = search(job);
  EXPECT_LT(with.floor, without.floor);
  job.budget = with.floor;
  const auto tight = search(job);
  ASSERT_TRUE(tight.fits);
  EXPECT_EQ(tight.best.choice.offload.activations, config::Offload::host);
  EXPECT_GT(tight.best.time.transfers, 0);
  EXPECT_THAT(settings(tight.best.choice), HasSubstr("\"activations\": \"host\""));
  auto some = tight.best.choice;
  some.activations_of = {false, true, true};
  EXPECT_THAT(settings(some), HasSubstr("\"activation_units\": [\"blocks.1\", \"blocks.2\"]"));
}

TEST(Search, WhatIsFixedStays) {
  auto job = job_of("gpt2", "4xA100-40GB");
  job.stages = {2};
  job.searches_recompute = false;
  job.recompute = Recompute::whole;
  job.recomputed.assign(12, false);
  job.recomputed[5] = true;
  job.searches_chunk = false;
  job.loss_chunk_tokens = 512;
  const auto answer = search(job);
  ASSERT_TRUE(answer.fits);
  for (const auto& plan : answer.front) {
    EXPECT_EQ(plan.choice.stage, 2);
    EXPECT_EQ(plan.choice.recomputed, job.recomputed);
    EXPECT_EQ(plan.choice.loss_chunk_tokens, 512);
  }
}

TEST(Search, OnTheCpuAPlanThatIsNoExactOneLeavesRoom) {
  auto job = job_of("gpt2", "1xCPU");
  job.sequence = 64;
  job.global_batch = 4;
  const auto lowest = search(job).floor;
  job.budget = lowest;
  const auto answer = search(job);
  ASSERT_TRUE(answer.fits);  // 16-bit: the activations may be 8% more
  EXPECT_LT(answer.best.memory.highest(), lowest);
  job.precision = {};
  job.budget = search(job).floor;
  EXPECT_EQ(search(job).best.memory.highest(), job.budget);
}

double seconds_of(const Job& job) {
  const auto start = std::chrono::steady_clock::now();
  search(job);
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

TEST(Search, IsQuick) {
  auto job = job_of("llama-3-8b", "8xH100-80GB");
  job.global_batch = 512;
  EXPECT_LT(seconds_of(job), 1.0);
  job = job_of("llama-3-8b", "1024xH100-80GB");
  job.model.layers = 100;
  job.global_batch = 8192;
  EXPECT_LT(seconds_of(job), 5.0);
}

TEST(Search, SettingsAreReadBackByConfig) {
  Choice choice;
  choice.micro_batch = 2;
  choice.accumulation = 4;
  choice.ranks = 8;
  choice.stage = 3;
  choice.shard_ranks = 4;
  choice.recompute = Recompute::whole;
  choice.recomputed = {true, true, false};
  choice.loss_chunk_tokens = 512;
  const auto config = Config::from_json(settings(choice));
  EXPECT_EQ(config.batch.micro_batch_size, 2);
  EXPECT_EQ(config.batch.accumulation, 4);
  EXPECT_EQ(config.zero.stage, 3);
  EXPECT_EQ(config.zero.shard_group_size, 4);
  EXPECT_EQ(config.checkpointing.policy, "first_m");
  EXPECT_EQ(config.checkpointing.n, 2);
  EXPECT_EQ(config.model.loss_chunk_tokens, 512);
}

TEST(Search, GroupsAreWrittenOnlyWhereSomeRanksReplicate) {
  Choice choice;
  choice.ranks = 8;
  choice.stage = 2;
  choice.shard_ranks = 8;
  EXPECT_EQ(Config::from_json(settings(choice)).zero.shard_group_size, 0);
  choice.shard_ranks = 2;
  EXPECT_EQ(Config::from_json(settings(choice)).zero.shard_group_size, 2);
  choice.stage = 0;
  EXPECT_EQ(Config::from_json(settings(choice)).zero.shard_group_size, 0);
}

}  // namespace
}  // namespace poise::plan

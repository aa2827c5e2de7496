// Offload, levers, and what plans cost.
#include <gmock/gmock.h>

#include "poise/error.h"
#include "poise/plan.h"

namespace poise::plan {
namespace {

using config::Offload;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

std::int64_t of(const Accounts& accounts, memory::Account account) {
  return accounts[static_cast<std::size_t>(account)];
}

Job job_of(const char* model, const char* machine) {
  Job job;
  job.model = known_transformer(model);
  job.machine = read_machine(machine);
  job.sequence = 2048;
  job.global_batch = 64;
  job.precision.dtype = job.precision.parameters = config::DType::bf16;
  return job;
}

TEST(Offload, WhatLiesAwayIsNotHeld) {
  const std::vector<Flat> flats{{"a", 512}, {"b", 1024}, {"rest", 256}};
  const Widths widths{.parameter = 2, .master = 4};
  Choice choice;
  choice.offload.optimizer = Offload::host;
  auto held = states(flats, choice, widths);
  EXPECT_EQ(of(held, memory::Account::optimizer), 0);
  EXPECT_EQ(of(held, memory::Account::parameters), 2 * 1792);
  // Half of 1792: the first two flats go, the second beyond the half with all of it.
  choice.offload.optimizer_fraction = 0.5;
  held = states(flats, choice, widths);
  EXPECT_EQ(of(held, memory::Account::optimizer), 12 * 256);
  choice.offload.gradients = Offload::host;
  choice.offload.parameters = Offload::file;
  held = states(flats, choice, widths);
  EXPECT_EQ(of(held, memory::Account::gradients), 0);
  EXPECT_EQ(of(held, memory::Account::parameters), 0);
}

TEST(Offload, ParametersComeUnitByUnit) {
  const auto job = job_of("gpt2", "1xA100-40GB");
  Choice choice;
  choice.offload.parameters = Offload::host;
  const auto made = chain(job, choice);
  const auto m = memory(made, choice, widths(job));
  const auto block = made.flats.front().elements, rest = made.flats.back().elements;
  EXPECT_EQ(of(m.held, memory::Account::parameters), 0);
  EXPECT_LE(of(m.at_peak, memory::Account::gathered), 2 * (rest + 2 * block));
  EXPECT_GE(of(m.at_peak, memory::Account::gathered), 2 * rest);
}

TEST(Offload, CostsTime) {
  const auto job = job_of("llama-3.2-1b", "1xA100-80GB");
  Choice choice;
  choice.accumulation = 64;
  const auto made = chain(job, choice);
  const auto time_of = [&](const Choice& c) {
    return time(made, c, widths(job), job.precision, job.machine, job.sequence);
  };
  const auto here = time_of(choice);
  EXPECT_EQ(here.transfers, 0);
  choice.offload.optimizer = Offload::host;
  const auto host = time_of(choice);
  EXPECT_GT(host.update, here.update);
  choice.offload.optimizer = Offload::file;
  const auto file = time_of(choice);
  // Masters and moments, there and back, at the file's rate.
  double elements = 0;
  for (const auto& flat : made.flats) elements += static_cast<double>(flat.elements);
  EXPECT_NEAR(file.update, 24 * elements / job.machine.device.file_rate, 1e-6);
  choice.offload.optimizer_fraction = 0.5;
  EXPECT_LT(time_of(choice).update, file.update);
  choice.offload.parameters = Offload::file;
  EXPECT_GT(time_of(choice).transfers, 0);
  EXPECT_NEAR(time_of(choice).total,
              time_of(choice).forward + time_of(choice).backward + time_of(choice).update +
                  time_of(choice).transfers,
              1e-9);
}

TEST(Offload, IsSearchedWhereItMayBeChosen) {
  auto job = job_of("llama-2-7b", "1xA100-80GB");
  EXPECT_FALSE(search(job).fits);
  config::OffloadPolicy away;
  away.optimizer = Offload::host;
  job.offloads = {{}, away};
  const auto answer = search(job);
  ASSERT_TRUE(answer.fits);
  EXPECT_EQ(answer.best.choice.offload.optimizer, Offload::host);
  EXPECT_THAT(settings(answer.best.choice), HasSubstr("\"offload\": {\"optimizer\": \"host\"}"));
  // Where all of it fits, nothing goes away for nothing.
  job.machine = read_machine("1xH200-141GB");
  EXPECT_EQ(search(job).best.choice.offload.optimizer, Offload::none);
}

TEST(Offload, ParametersNeedStage3OnSeveralRanks) {
  auto job = job_of("gpt2", "4xA100-40GB");
  config::OffloadPolicy away;
  away.parameters = Offload::host;
  job.offloads = {away};
  EXPECT_EQ(search(job).best.choice.stage, 3);
  job.stages = {1, 2};
  EXPECT_THAT([&] { search(job); }, ThrowsMessage<Error>(HasSubstr("allow stage 3")));
}

TEST(Levers, AreNamedWithTheirPeaksAndNeverPulled) {
  auto job = job_of("llama-2-7b", "1xA100-80GB");
  const auto before = search(job);
  ASSERT_FALSE(before.fits);
  const auto all = levers(job);
  int same = 0, other = 0;
  for (const auto& lever : all) {
    EXPECT_FALSE(lever.name.empty());
    EXPECT_LT(lever.plan.memory.highest(), before.best.memory.highest()) << lever.name;
    EXPECT_EQ(lever.fits, lever.plan.memory.highest() <= before.budget) << lever.name;
    ++(lever.changes_numbers ? other : same);
  }
  EXPECT_GE(same, 3);
  EXPECT_GE(other, 4);
  EXPECT_EQ(search(job).best.memory.highest(), before.best.memory.highest());
}

TEST(Levers, MoreRanksShardOverAllOfThem) {
  auto job = job_of("gpt2", "1xA100-40GB");
  const auto with_more = [&] {
    for (const auto& lever : levers(job)) {
      if (lever.name == "twice the ranks") return lever.plan.memory.highest();
    }
    return std::int64_t{0};
  };
  job.budget = std::int64_t{1} << 30;
  const auto open = with_more();
  EXPECT_GT(open, 0);
  job.stages = {0};  // as a run on one rank says it
  job.shard_ranks = {1};
  EXPECT_EQ(with_more(), open);
}

TEST(Levers, KeepAGivenMicroBatch) {
  auto job = job_of("gpt2", "4xA100-40GB");  // 64 sequences
  const auto more_ranks = [&] {
    const auto all = levers(job);
    return std::any_of(all.begin(), all.end(),
                       [](const Lever& lever) { return lever.name == "twice the ranks"; });
  };
  job.micro_batch = 8;
  EXPECT_TRUE(more_ranks());
  job.micro_batch = 16;  // 8 ranks have 8 each
  EXPECT_FALSE(more_ranks());
}

TEST(Levers, AdaptersHoldTheirOwnStates) {
  // 7B in 16 bits: 13.5e9 bytes and adapters of 40 million parameters at 16 bytes each.
  const auto all = levers(job_of("llama-2-7b", "1xA100-80GB"));
  const auto lora = std::find_if(all.begin(), all.end(), [](const Lever& lever) {
    return lever.name.find("LoRA") != std::string::npos;
  });
  ASSERT_NE(lora, all.end());
  EXPECT_TRUE(lora->fits);
  const auto held = static_cast<double>(total(lora->plan.memory.held));
  EXPECT_NEAR(held, 2 * 6738415616.0 + 16 * 39976960.0, 1e6);
}

TEST(Cost, IsTheHoursOfAllDevices) {
  Plan plan;
  plan.choice.ranks = 8;
  plan.time.total = 2;  // seconds of a million tokens
  const auto paid = cost(plan, 1e6, {.gpu_hour = 3, .utilisation = 0.5});
  EXPECT_DOUBLE_EQ(paid.month, 8 * 3 * 730.0);
  // A billion tokens: 2,000 seconds at full use, twice that at half.
  EXPECT_DOUBLE_EQ(paid.billion_tokens, 4000.0 / 3600 * 24);
  EXPECT_THAT([&] { cost(plan, 1e6, {.gpu_hour = -1}); }, ThrowsMessage<Error>(HasSubstr("price")));
  EXPECT_THAT([&] { cost(plan, 1e6, {.gpu_hour = 1, .utilisation = 0}); },
              ThrowsMessage<Error>(HasSubstr("utilisation")));
}

}  // namespace
}  // namespace poise::plan

// The composition of a peak, against chains small enough to add up by hand.
#include <gmock/gmock.h>

#include "poise/error.h"
#include "poise/plan.h"

namespace poise::plan {
namespace {

using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

std::int64_t of(const Accounts& accounts, memory::Account account) {
  return accounts[static_cast<std::size_t>(account)];
}

Pass pass(std::int64_t saved, std::int64_t forward, std::int64_t backward) {
  return {.saved = saved, .forward_peak = forward, .backward_peak = backward};
}

// Three blocks and a head. Kept, a block saves 100; recomputed, 10.
Chain toy() {
  Chain chain;
  for (int i = 0; i < 3; ++i) {
    Link link;
    link.name = join("block ", i);
    link.flat = i;
    link.block = true;
    link.passes = {pass(100, 120, 150), pass(10, 60, 170), pass(40, 80, 180)};
    chain.links.push_back(link);
    chain.flats.push_back({link.name, 256 * (i + 1)});
  }
  Link head;
  head.name = "the head";
  head.passes.fill(pass(30, 70, 90));
  head.held_gradient = 7;
  chain.links.push_back(head);
  chain.flats.push_back({"rest", 512});
  chain.rest = 3;
  return chain;
}

constexpr Widths kFp32{};
constexpr std::int64_t kElements = 256 + 512 + 768 + 512;

TEST(Memory, OneRankHoldsAllAndThePeakIsWhereTheSumIsHighest) {
  Choice choice;
  const auto m = memory(toy(), choice, kFp32);
  EXPECT_EQ(of(m.held, memory::Account::parameters), 4 * kElements);
  EXPECT_EQ(of(m.held, memory::Account::optimizer), 8 * kElements);
  EXPECT_EQ(of(m.held, memory::Account::gradients), 4 * kElements);
  EXPECT_EQ(of(m.held, memory::Account::communication), 0);
  // Backward of the head: 3 x 100 + 90. Of the last block: 2 x 100 + 7 + 150.
  EXPECT_EQ(of(m.at_peak, memory::Account::activations), 390);
  EXPECT_EQ(m.moment, "backward of the head");
  EXPECT_EQ(m.peak, 16 * kElements + 390);
}

TEST(Memory, RecomputedBlocksKeepTheirInput) {
  Choice choice;
  choice.recompute = Recompute::whole;
  choice.recomputed = {true, true, true};
  const auto m = memory(toy(), choice, kFp32);
  // The last block's backward: 2 x 10 + 7 + 170.
  EXPECT_EQ(of(m.at_peak, memory::Account::activations), 197);
  EXPECT_EQ(m.moment, "backward of block 2");
  choice.recomputed = {true, false, false};
  // The head again: 10 + 2 x 100 + 90.
  EXPECT_EQ(of(memory(toy(), choice, kFp32).at_peak, memory::Account::activations), 300);
}

TEST(Memory, AutocastsCopiesOfWeightsCountUnlessRecomputed) {
  auto chain = toy();
  for (auto& link : chain.links) link.casts = link.block ? 1000 : 0;
  Choice choice;
  EXPECT_EQ(of(memory(chain, choice, kFp32).at_peak, memory::Account::activations), 3390);
  choice.recompute = Recompute::whole;
  choice.recomputed = {true, true, true};
  EXPECT_EQ(of(memory(chain, choice, kFp32).at_peak, memory::Account::activations), 1197);
}

TEST(Memory, StagesSplitWhatTheySay) {
  Choice choice;
  choice.ranks = 2;
  const std::int64_t shards = 256 + 256 + 512 + 256;  // whole rows of 256
  const std::int64_t wholes = 2 * shards;
  for (int stage = 0; stage <= 3; ++stage) {
    choice.stage = stage;
    choice.reduces_every = stage >= 2;
    const auto held = memory(toy(), choice, kFp32).held;
    EXPECT_EQ(of(held, memory::Account::parameters), 4 * (stage >= 3 ? shards : wholes));
    EXPECT_EQ(of(held, memory::Account::optimizer), 8 * (stage >= 1 ? shards : wholes));
    EXPECT_EQ(of(held, memory::Account::gradients), 4 * (stage >= 2 ? shards : wholes));
    // All of these flats share one collective, but at stage 3: scratch of the largest, and two
    // buckets of what becomes whole.
    EXPECT_EQ(of(held, memory::Account::communication), stage >= 3 ? 4 * 1024 : 3 * 4 * wholes);
  }
}

TEST(Memory, Stage3GathersTheLinkTheNextAndTheRest) {
  Choice choice;
  choice.ranks = 2;
  choice.stage = 3;
  choice.reduces_every = true;
  auto chain = toy();
  for (auto& link : chain.links) {
    if (link.block) link.passes[0].backward_peak = 5000;  // the peak is in a block's backward
  }
  const auto m = memory(chain, choice, kFp32);
  EXPECT_EQ(m.moment, "backward of block 2");
  EXPECT_EQ(of(m.at_peak, memory::Account::gathered), 4 * (512 + 1024 + 512));
  // Whole gradients of the rest wait, the block's fill; scratch is there anyway.
  EXPECT_EQ(of(m.at_peak, memory::Account::communication), 4 * 1024 + 4 * (512 + 1024));
  choice.keep_gathered = true;
  EXPECT_EQ(of(memory(chain, choice, kFp32).at_peak, memory::Account::gathered),
            4 * (512 + 512 + 1024 + 512));
}

TEST(Memory, GroupsShardAmongThemselves) {
  Choice choice;
  choice.ranks = 8;
  choice.shard_ranks = 2;
  choice.stage = 3;
  choice.reduces_every = true;
  auto two = choice;
  two.ranks = 2;
  two.shard_ranks = 0;
  const auto groups = memory(toy(), choice, kFp32), alone = memory(toy(), two, kFp32);
  for (const auto account :
       {memory::Account::parameters, memory::Account::optimizer, memory::Account::gradients}) {
    EXPECT_EQ(of(groups.held, account), of(alone.held, account));
  }
  EXPECT_EQ(of(groups.at_peak, memory::Account::gathered),
            of(alone.at_peak, memory::Account::gathered));
  // Sums of a shard go to all four replicas in one round; larger ones by segments.
  EXPECT_EQ(of(groups.held, memory::Account::communication), 4 * 1024 + 4 * 4 * 512);
  auto large = toy();
  large.flats[0].elements = 1 << 20;
  EXPECT_EQ(of(memory(large, choice, kFp32).held, memory::Account::communication),
            (4 << 20) + (2 << 20) + 4 * 8);
}

// Two ranks; blocks of 100, 100, 60 and 60 KiB and a rest of 200 KiB, all of them in fp32.
// Gradients go backwards: 60, 60 and 100 in a bucket, 100 alone, since the rest would make it too
// large.
Chain of_neighbours() {
  Chain chain;
  int place = 0;
  for (const int kib : {100, 100, 60, 60}) {
    Link link;
    link.name = join("block ", place);
    link.flat = place++;
    link.block = true;
    link.passes.fill(pass(1, 1, 1));
    chain.links.push_back(link);
    chain.flats.push_back({link.name, 256 * kib});
  }
  chain.flats.push_back({"rest", 256 * 200});
  chain.rest = place;
  return chain;
}

TEST(Memory, SmallNeighboursShareABucket) {
  constexpr std::int64_t kKiB = 1024;
  const auto chain = of_neighbours();
  Choice choice;
  choice.ranks = 2;
  const auto at = [&](const char* name) {
    for (const auto& moment : moments(chain, choice, kFp32)) {
      if (moment.name == name) return of(moment.accounts, memory::Account::communication);
    }
    return std::int64_t{-1};
  };
  // Forwards 100 and 100 share one, 60 and 60 the next: 200 KiB, twice, and 220 for the sums.
  const auto held = of(memory(chain, choice, kFp32).held, memory::Account::communication);
  EXPECT_EQ(held, (2 * 200 + 220) * kKiB);
  choice.stage = 1;
  EXPECT_EQ(at("forward of block 3"), held);
  EXPECT_EQ(at("backward of block 3"), held);
  EXPECT_EQ(at("backward of block 2"), held + 220 * kKiB) << "filled by block 3";
  EXPECT_EQ(at("backward of block 1"), held + 220 * kKiB);
  EXPECT_EQ(at("backward of block 0"), held + 220 * kKiB) << "travels";
  EXPECT_EQ(at("end of the backward"), held + 220 * kKiB) << "sums of the others are in place";
  // Sums of each micro-batch have memory of their own; the rest's fills all the time.
  choice.stage = 2;
  choice.reduces_every = true;
  EXPECT_EQ(at("backward of block 3"), held + (200 + 60) * kKiB);
  EXPECT_EQ(at("backward of block 2"), held + (200 + 60 + 220) * kKiB);
  EXPECT_EQ(at("backward of block 1"), held + (200 + 100 + 220) * kKiB);
  EXPECT_EQ(at("backward of block 0"), held + (200 + 100 + 220) * kKiB);
  choice.overlap = false;
  EXPECT_EQ(at("backward of block 0"), held + (200 + 60 + 60 + 100 + 100) * kKiB) << "all wait";
}

// NCCL adds in memory of its own, which is not torch's: reserve() of a GPU stands for it.
TEST(Memory, RanksOnGpusReserveNothingForSums) {
  constexpr std::int64_t kKiB = 1024;
  Choice choice;
  choice.ranks = 4;
  choice.shard_ranks = 2;
  choice.ranks_reserve = false;
  EXPECT_EQ(of(states(of_neighbours().flats, choice, kFp32, 4), memory::Account::communication),
            2 * 200 * kKiB);
}

TEST(Time, CollectivesAreCountedAsTheyTravel) {
  Chain chain;
  for (int i = 0; i < 96; ++i) {  // 8 KiB each: 32 in a bucket
    chain.flats.push_back({join("block ", i), 2048});
    Link link;
    link.flat = i;
    chain.links.push_back(link);
  }
  const auto machine = read_machine("2xCPU");
  const double latency = 11e-6, rate = 0.8 * machine.device.node_rate;  // of two ranks
  Choice choice;
  choice.ranks = 2;
  choice.stage = 1;
  const auto moved = traffic(96 * 2048, choice, kFp32);
  const double reduces = moved.reduces / rate + 3 * latency;
  const double gathers = moved.gathers / rate + 3 * latency;
  EXPECT_NEAR(time(chain, choice, kFp32, {}, machine, 1).exposed, reduces + reduces / 3 + gathers,
              1e-9);
  choice.stage = 3;  // each by itself: gathered twice, joined once
  EXPECT_GT(time(chain, choice, kFp32, {}, machine, 1).exposed, 3 * 96 * latency);
}

TEST(Memory, WhatIsOffloadedOfActivationsIsNotKept) {
  auto chain = toy();
  for (auto& link : chain.links) link.away.fill(pass(5, 60, 80));
  Choice choice;
  choice.offload.activations = config::Offload::host;
  // Backward of the last block: 2 x 5 + 7 + 80.
  EXPECT_EQ(of(memory(chain, choice, kFp32).at_peak, memory::Account::activations), 97);
  choice.activations_of = {true, false, false};
  // That of two blocks stays, and the head's: 5 + 2 x 100 + 90.
  EXPECT_EQ(of(memory(chain, choice, kFp32).at_peak, memory::Account::activations), 295);
}

TEST(Memory, FactoredMomentsAreWholeOnEveryRank) {
  config::OptimizerPolicy adafactor;
  adafactor.type = "adafactor";
  const auto w = widths({}, adafactor);
  const std::vector<Flat> flats{{"a", 512, 0, 48}, {"rest", 256, 0, 32}};
  Choice choice;
  EXPECT_EQ(of(states(flats, choice, w), memory::Account::optimizer), 4 * 80);
  choice.ranks = 2;
  choice.stage = 1;
  EXPECT_EQ(of(states(flats, choice, w), memory::Account::optimizer), 4 * 80);
  EXPECT_EQ(of(states(flats, choice, kFp32), memory::Account::optimizer), 8 * (256 + 256));
  EXPECT_FALSE(may_offload(adafactor));
  EXPECT_TRUE(may_offload({}));
}

TEST(Memory, WidthsFollowThePrecision) {
  config::PrecisionPolicy precision;
  config::OptimizerPolicy optimizer;
  EXPECT_EQ(widths(precision, optimizer).master, 0);
  precision.dtype = precision.parameters = config::DType::bf16;
  EXPECT_EQ(widths(precision, optimizer).parameter, 2);
  EXPECT_EQ(widths(precision, optimizer).master, 4);
  EXPECT_EQ(widths(precision, optimizer).accumulator, 4);
  precision.fp32_accumulation = false;
  EXPECT_EQ(widths(precision, optimizer).accumulator, 2);
  optimizer.moments = "bf16";
  EXPECT_EQ(widths(precision, optimizer).moments, 4);
  optimizer.moments = "8bit";
  EXPECT_EQ(256 * widths(precision, optimizer).moments, 2 * (256 + 4));
  optimizer = {};
  optimizer.type = "lion";
  EXPECT_EQ(widths(precision, optimizer).moments, 4);
  optimizer.type = "sgd";
  EXPECT_EQ(widths(precision, optimizer).moments, 0);
  optimizer.momentum = 0.9;
  EXPECT_EQ(widths(precision, optimizer).moments, 4);
}

TEST(Memory, BadModelsAreNamed) {
  auto model = known_transformer("llama-3-8b");
  model.heads = 30;
  EXPECT_THAT([&] { parameters(model); }, ThrowsMessage<Error>(HasSubstr("4096 is no multiple")));
  model = known_transformer("llama-3-8b");
  model.layers = 0;
  EXPECT_THAT([&] { parameters(model); }, ThrowsMessage<Error>(HasSubstr("layers is 0")));
  EXPECT_THAT([] { known_transformer("lama"); }, ThrowsMessage<Error>(HasSubstr("llama-3-8b")));
  EXPECT_THAT([] { read_machine("8xH900"); }, ThrowsMessage<Error>(HasSubstr("H100-80GB")));
  EXPECT_THAT([] { read_machine("0xH100-80GB"); }, ThrowsMessage<Error>(HasSubstr("give 1 to")));
}

TEST(Machine, APartOfANameIsCompleted) {
  const auto device_of = [](const char* text) { return read_machine(text).device.name; };
  EXPECT_EQ(device_of("8xH100"), "H100-80GB");  // what people mean by it; there is one of 96 GB
  EXPECT_EQ(device_of("8xh100-96"), "H100-96GB");
  EXPECT_EQ(device_of("L4"), "L4-24GB");  // no L40S
  EXPECT_EQ(device_of("2xl40s"), "L40S-48GB");
  EXPECT_EQ(device_of("4090"), "RTX-4090-24GB");
  EXPECT_EQ(device_of("B200"), "B200-180GB");
  const auto refused = [](const char* text, const char* words) {
    EXPECT_THAT([text] { read_machine(text); }, ThrowsMessage<Error>(HasSubstr(words)));
  };
  refused("8xA100", "\"A100\" may be A100-80GB or A100-40GB; give one of them");
  refused("8xV100", "V100-32GB or V100-16GB");
  refused("8xRTX", "RTX-A6000-48GB or RTX-4090-24GB");
  refused("8x", "unknown device \"\"");
  refused("8x100", "unknown device \"100\"");
}

}  // namespace
}  // namespace poise::plan

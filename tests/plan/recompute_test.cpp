// Which blocks are recomputed: against every choice there is.
#include <gtest/gtest.h>

#include <random>

#include "poise/error.h"
#include "poise/plan.h"

namespace poise::plan {
namespace {

// Blocks that differ in everything, with something before and after them.
Chain uneven(int blocks, std::mt19937& generator) {
  const auto number = [&](int low, int high) {
    return std::int64_t{std::uniform_int_distribution<int>(low, high)(generator)};
  };
  Chain chain;
  for (int i = 0; i < blocks + 2; ++i) {
    Link link;
    link.name = join("link ", i);
    link.block = i > 0 && i <= blocks;
    const auto saved = number(20, 200);
    auto& none = link.passes[0];
    none = {.saved = saved, .forward_peak = saved + number(0, 50)};
    none.backward_peak = saved + number(0, 80);
    link.passes[1] = link.passes[2] = none;
    if (link.block) {
      const auto input = number(1, 40);
      link.passes[1] = {.saved = input,
                        .forward_peak = input + number(0, 60),
                        .backward_peak = input + saved + number(0, 90),
                        .again_flops = static_cast<double>(number(1, 100))};
      link.flat = i - 1;
      link.casts = number(0, 1) * number(0, 30);
      chain.flats.push_back({link.name, 256});
    }
    if (i == blocks + 1) {
      link.held_gradient = number(0, 20);
      // Where a block is recomputed, what its input was stays.
      const auto more = number(0, 30);
      for (auto* pass : {&link.passes[1], &link.passes[2]}) {
        pass->saved += more;
        pass->forward_peak += more;
        pass->backward_peak += more;
      }
    }
    chain.links.push_back(link);
  }
  chain.flats.push_back({"rest", 256});
  chain.rest = blocks;
  return chain;
}

struct Best {
  bool fits = false;
  double again = 0;
};

double again_of(const Chain& chain, const std::vector<bool>& recomputed) {
  double again = 0;
  for (std::size_t b = 0; b < recomputed.size(); ++b) {
    if (recomputed[b]) again += chain.links[b + 1].passes[1].again_flops;
  }
  return again;
}

Best of_every_choice(const Chain& chain, Choice choice, const Widths& widths, std::int64_t budget) {
  const auto blocks = chain.links.size() - 2;
  Best best;
  for (unsigned bits = 0; bits < 1u << blocks; ++bits) {
    for (std::size_t b = 0; b < blocks; ++b) choice.recomputed[b] = (bits >> b & 1) != 0;
    if (memory(chain, choice, widths).highest() > budget) continue;
    const double again = again_of(chain, choice.recomputed);
    if (!best.fits || again < best.again) best = {true, again};
  }
  return best;
}

TEST(Recompute, TheProgrammeFindsWhatTryingAllFinds) {
  std::mt19937 generator(7);
  const Widths widths;
  int fitting = 0, between = 0;
  for (int blocks = 1; blocks <= 8; ++blocks) {
    for (int round = 0; round < 12; ++round) {
      const auto chain = uneven(blocks, generator);
      Choice choice;
      choice.recompute = Recompute::whole;
      choice.recomputed.assign(static_cast<std::size_t>(blocks), false);
      choice.ranks = 1 + round % 3;
      choice.stage = choice.ranks > 1 ? round % 4 : 0;
      choice.reduces_every = choice.stage >= 2;
      const auto most = memory(chain, choice, widths).highest();
      // From what all kept blocks take down to less than any choice does.
      for (std::int64_t less = 0; less < 60 * (blocks + 2); less += 25) {
        const auto budget = most - less;
        const auto expected = of_every_choice(chain, choice, widths, budget);
        const auto found = cheapest_recompute(chain, choice, widths, budget);
        ASSERT_EQ(found.has_value(), expected.fits) << blocks << " blocks, " << less << " less";
        if (!found) continue;
        ++fitting;
        auto ours = choice;
        ours.recomputed = *found;
        EXPECT_LE(memory(chain, ours, widths).highest(), budget);
        EXPECT_EQ(again_of(chain, *found), expected.again);
        if (expected.again > 0) ++between;
      }
    }
  }
  EXPECT_GT(fitting, 200);
  EXPECT_GT(between, 50);
}

TEST(Recompute, TheLeastBudgetIsTheLeastOfAllChoices) {
  std::mt19937 generator(11);
  const Widths widths;
  for (int blocks = 2; blocks <= 8; ++blocks) {
    const auto chain = uneven(blocks, generator);
    Choice choice;
    choice.recompute = Recompute::whole;
    choice.recomputed.assign(static_cast<std::size_t>(blocks), false);
    const auto least = least_budget(chain, choice, widths);
    EXPECT_TRUE(of_every_choice(chain, choice, widths, least).fits);
    EXPECT_FALSE(of_every_choice(chain, choice, widths, least - 1).fits);
  }
}

TEST(Recompute, ManyUnevenBlocksAreQuickAndFit) {
  std::mt19937 generator(3);
  auto chain = uneven(100, generator);
  for (auto& link : chain.links) {  // sizes as of real blocks, so that sums hardly meet
    for (auto& pass : link.passes) {
      pass.saved = pass.saved * 1000003 + 7 * pass.saved * pass.saved;
      pass.forward_peak += pass.saved;
      pass.backward_peak += pass.saved;
    }
  }
  Choice choice;
  choice.recompute = Recompute::whole;
  choice.recomputed.assign(100, false);
  const Widths widths;
  const auto budget = memory(chain, choice, widths).highest() / 2;
  const auto found = cheapest_recompute(chain, choice, widths, budget);
  ASSERT_TRUE(found);
  choice.recomputed = *found;
  EXPECT_LE(memory(chain, choice, widths).highest(), budget);
}

Job traced_job(std::mt19937& generator) {
  Job job;
  job.traced = Traced{{1, 2}, {uneven(6, generator), {}}};
  job.traced->chains[1] = job.traced->chains[0];
  for (auto& link : job.traced->chains[1].links) {
    for (auto& pass : link.passes) {
      pass.saved *= 2;
      pass.forward_peak *= 2;
      pass.backward_peak *= 2;
      pass.again_flops *= 2;
    }
    link.flops = 300;
  }
  for (auto& link : job.traced->chains[0].links) link.flops = 150;
  job.model.name = "traced";
  job.machine = read_machine("1xCPU");
  job.sequence = 1;
  job.global_batch = 4;
  return job;
}

TEST(Recompute, MoreMemoryIsNeverSlowerWhereBlocksDiffer) {
  std::mt19937 generator(5);
  for (int round = 0; round < 5; ++round) {
    auto job = traced_job(generator);
    job.budget = 1;
    const auto floor = search(job).floor;
    double slowest = 1e30;
    for (std::int64_t budget = floor; budget < floor + 2000; budget += 23) {
      job.budget = budget;
      const auto answer = search(job);
      ASSERT_TRUE(answer.fits) << budget << " of " << floor;
      EXPECT_LE(answer.best.memory.highest(), budget);
      EXPECT_LE(answer.best.time.total, slowest);
      slowest = answer.best.time.total;
    }
    job.budget = floor - 1;
    EXPECT_FALSE(search(job).fits);
  }
}

TEST(Recompute, ATracedChainLiesOnTheLineThroughBoth) {
  std::mt19937 generator(2);
  const auto job = traced_job(generator);
  const auto at3 = chain(*job.traced, 3), at1 = chain(*job.traced, 1);
  for (std::size_t i = 0; i < at3.links.size(); ++i) {
    EXPECT_EQ(at3.links[i].passes[0].saved, 3 * at1.links[i].passes[0].saved);
    EXPECT_EQ(at3.links[i].flops, 450);
  }
  // Beyond more than two of them the nearest count.
  auto bent = *job.traced;
  bent.micro_batches.push_back(4);
  bent.chains.push_back(bent.chains[1]);
  EXPECT_EQ(chain(bent, 2).links[1].passes[0].saved, 2 * at1.links[1].passes[0].saved);
  EXPECT_EQ(chain(bent, 3).links[1].passes[0].saved, 2 * at1.links[1].passes[0].saved);
  auto broken = *job.traced;
  broken.chains[1].links.pop_back();
  EXPECT_THROW(chain(broken, 3), Error);
}

TEST(Recompute, SettingsNameTheBlocksThatAreNoFirstOnes) {
  Choice choice;
  choice.recompute = Recompute::whole;
  choice.recomputed = {false, true, true};
  auto config = Config::from_json(settings(choice, {"net.0", "net.1", "net.2"}));
  EXPECT_EQ(config.checkpointing.policy, "list");
  EXPECT_EQ(config.checkpointing.units, (std::vector<std::string>{"net.1", "net.2"}));
  choice.offload.optimizer = config::Offload::host;
  choice.offload.gradients = config::Offload::host;
  config = Config::from_json(settings(choice));
  EXPECT_EQ(config.checkpointing.units, (std::vector<std::string>{"blocks.1", "blocks.2"}));
  EXPECT_EQ(config.offload.optimizer, config::Offload::host);
  EXPECT_EQ(config.offload.gradients, config::Offload::host);
}

}  // namespace
}  // namespace poise::plan

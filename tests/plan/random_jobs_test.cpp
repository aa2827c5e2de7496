// Jobs drawn at random: whatever they are, the batch is kept, budgets hold, the floor is the floor,
// and more memory is never slower.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "poise/error.h"
#include "poise/plan.h"

namespace poise::plan {
namespace {

class Draw {
 public:
  explicit Draw(std::uint64_t seed) : generator_(seed) {}
  std::int64_t number(std::int64_t low, std::int64_t high) {
    return std::uniform_int_distribution<std::int64_t>(low, high)(generator_);
  }
  bool coin() { return number(0, 1) == 1; }

 private:
  std::mt19937_64 generator_;
};

Job described(Draw& draw) {
  constexpr const char* kDevices[] = {"CPU", "A100-80GB", "H100-80GB", "V100-16GB"};
  constexpr int kRanks[] = {1, 1, 2, 3, 4, 8, 16};
  Job job;
  auto& m = job.model;
  m.name = "drawn";
  m.layers = draw.number(1, 12);
  m.heads = draw.number(1, 32);
  m.width = m.heads * (std::int64_t{16} << draw.number(0, 3));
  m.kv_heads = draw.coin() ? 0 : 1;
  m.ffn = draw.number(1, 4) * m.width;
  m.vocabulary = draw.number(100, 130000);
  m.mlp = draw.coin() ? Mlp::gelu : Mlp::gated;
  m.tied = draw.coin();
  m.biases = draw.coin();
  m.positions = draw.coin() ? 4096 : 0;
  job.machine = read_machine(join(kRanks[draw.number(0, 6)], "x", kDevices[draw.number(0, 3)]));
  job.sequence = draw.number(1, 3000);
  job.global_batch = job.machine.ranks * draw.number(1, 24);
  if (draw.coin()) job.precision.dtype = config::DType::bf16;
  if (job.precision.dtype == config::DType::bf16 && draw.coin()) {
    job.precision.parameters = config::DType::bf16;
  }
  if (draw.coin()) {
    job.offloads.push_back({});
    job.offloads.back().optimizer = config::Offload::host;
  }
  return job;
}

// Blocks that differ, with bytes of real ones, so that sums hardly ever meet.
Job traced(Draw& draw) {
  Job job;
  job.model.name = "drawn";
  job.machine = read_machine(draw.coin() ? "1xCPU" : "2xA100-80GB");
  job.sequence = 1;
  job.global_batch = job.machine.ranks * draw.number(1, 24);
  const auto blocks = draw.number(2, 30);
  const auto bytes = [&](std::int64_t low, std::int64_t high) {
    return draw.number(low * 1'000'000, high * 1'000'000);
  };
  Chain one;
  for (std::int64_t i = 0; i < blocks + 2; ++i) {
    Link link;
    link.name = join("link ", i);
    link.block = i > 0 && i <= blocks;
    link.flops = static_cast<double>(draw.number(1, 1000)) * 1e9;
    const auto saved = bytes(20, 200);
    link.passes.fill({.saved = saved,
                      .forward_peak = saved + bytes(0, 50),
                      .backward_peak = saved + bytes(0, 80)});
    if (link.block) {
      const auto input = bytes(1, 40);
      link.passes[1] = {.saved = input,
                        .forward_peak = input + bytes(0, 60),
                        .backward_peak = input + saved + bytes(0, 90),
                        .again_flops = link.flops};
      link.flat = static_cast<int>(i - 1);
      one.flats.push_back({link.name, draw.number(1, 100) * 256});
    }
    one.links.push_back(link);
  }
  one.flats.push_back({"rest", 256});
  one.rest = static_cast<int>(blocks);
  auto two = one;
  for (auto& link : two.links) {
    for (auto& pass : link.passes) {
      pass.saved *= 2;
      pass.forward_peak *= 2;
      pass.backward_peak *= 2;
      pass.again_flops *= 2;
    }
    link.flops *= 2;
  }
  job.traced = Traced{{1, 2}, {one, two}};
  return job;
}

void expect_kept(const Job& job, const Plan& plan) {
  const auto& c = plan.choice;
  EXPECT_EQ(c.micro_batch * c.accumulation * c.ranks, job.global_batch);
}

void expect_floor(Job job, std::int64_t floor) {
  job.budget = floor;
  EXPECT_TRUE(search(job).fits) << "the floor, " << floor;
  job.budget = floor - 1;
  EXPECT_FALSE(search(job).fits) << "a byte below the floor, " << floor;
}

void expect_what_holds_of_all(Job job, Draw& draw) {
  job.budget = 1;
  const auto floor = search(job).floor;
  expect_floor(job, floor);
  job.budget = std::int64_t{1} << 60;
  const auto room = search(job).best.memory.highest();
  std::vector<std::int64_t> budgets;
  for (int i = 0; i < 8; ++i) {
    budgets.push_back(floor + draw.number(0, std::max<std::int64_t>(1, room + room / 5 - floor)));
  }
  std::sort(budgets.begin(), budgets.end());
  double slowest = 1e300;
  for (const auto budget : budgets) {
    job.budget = budget;
    const auto answer = search(job);
    ASSERT_TRUE(answer.fits) << budget << " above the floor, " << floor;
    EXPECT_LE(answer.best.memory.highest(), budget);
    EXPECT_LE(answer.best.time.total, slowest) << budget;
    slowest = answer.best.time.total;
    expect_kept(job, answer.best);
    for (const auto& plan : answer.front) expect_kept(job, plan);
    if (answer.has_runner_up) expect_kept(job, answer.runner_up);
  }
}

TEST(RandomJobs, OfDescribedTransformers) {
  for (std::uint64_t seed = 0; seed < 100; ++seed) {
    SCOPED_TRACE(seed);
    Draw draw(seed);
    expect_what_holds_of_all(described(draw), draw);
  }
}

TEST(RandomJobs, OfTracedModels) {
  for (std::uint64_t seed = 0; seed < 40; ++seed) {
    SCOPED_TRACE(seed);
    Draw draw(seed);
    expect_what_holds_of_all(traced(draw), draw);
  }
}

}  // namespace
}  // namespace poise::plan

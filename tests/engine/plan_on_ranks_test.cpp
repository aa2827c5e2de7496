// What the planner says that several ranks hold, against their ledgers, account by account.
#include <ATen/ops/gelu.h>
#include <ATen/ops/linear.h>
#include <ATen/Parallel.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <map>
#include <ostream>

#include "poise/engine.h"
#include "poise/module_plan.h"
#include "support/ranks.h"
#include "support/tiny_model.h"

namespace poise {
namespace {

using memory::Account;
using ::testing::Contains;

constexpr std::int64_t kRows = 32;
constexpr int kMicroBatches = 2;
constexpr std::int64_t kScalars = 16;  // bytes of the loss, which no block holds

constexpr std::size_t index(Account account) { return static_cast<std::size_t>(account); }

// Blocks of a width that is given, each of two matrices.
struct Net {
  static constexpr std::int64_t kIn = 8;
  std::vector<at::Tensor> down, up;
  at::Tensor first, last;
  std::vector<zero::Unit> units;
  bool has_rest;  // the matrices before and after them, in no unit

  Net(std::int64_t width, const std::vector<std::int64_t>& inner, bool has_rest)
      : units(inner.size()), has_rest(has_rest) {
    const auto made = [](std::int64_t rows, std::int64_t columns, std::size_t seed) {
      return test::normal({rows, columns}, seed, 0.1).requires_grad_();
    };
    first = made(width, kIn, 1);
    last = made(kIn, width, 2);
    for (std::size_t i = 0; i < inner.size(); ++i) {
      down.push_back(made(inner[i], width, 10 + i));
      up.push_back(made(width, inner[i], 500 + i));
    }
  }
  ModelView view() const {
    ModelView made;
    if (has_rest) made.parameters = {{"first", first}, {"last", last}};
    for (std::size_t i = 0; i < units.size(); ++i) {
      const auto name = join("block", i);
      made.parameters.push_back({name + ".down", down[i]});
      made.parameters.push_back({name + ".up", up[i]});
      made.units.push_back({name, {name + ".down", name + ".up"}});
    }
    return made;
  }
  void bind(const Engine& engine) {
    for (std::size_t i = 0; i < units.size(); ++i) units[i] = engine.unit(join("block", i));
  }
  Loss loss(std::int64_t rows) const {
    auto x = test::normal({rows, has_rest ? kIn : first.size(0)}, 3).to(down[0].scalar_type());
    x = has_rest ? at::linear(x, first) : x.requires_grad_();
    for (std::size_t i = 0; i < units.size(); ++i) {
      const auto block = [&](const at::Tensor& y) {
        return y + at::linear(at::gelu(at::linear(y, down[i])), up[i]);
      };
      x = units[i](block, x);
    }
    const auto out = (has_rest ? at::linear(x, last) : x).to(at::kFloat);
    return Loss::mean(out.pow(2).mean(), static_cast<double>(rows));
  }
};

struct Kind {
  const char* name;
  std::int64_t width;
  std::vector<std::int64_t> inner;  // of each block
  // Bytes that a group of processes reserves for its reductions, which threads do not: those of the
  // largest collective at stages 0 to 2, and at stage 3, where each block travels by itself.
  std::int64_t reserve, reserve_at_3;
  bool has_rest = true;

  std::int64_t largest_gradient() const {  // of a matrix, in fp32
    return 4 * width * *std::max_element(inner.begin(), inner.end());
  }
};

void PrintTo(const Kind& kind, std::ostream* out) { *out << kind.name; }

// Sixteen of the small blocks (2 x 32 x 64 elements) fill a bucket.
const Kind kSmall{"small", 32, std::vector<std::int64_t>(35, 64), 256 << 10, 16 << 10};
const Kind kLarge{"large", 64, std::vector<std::int64_t>(4, 640), 4 * 2 * 64 * 640,
                  4 * 2 * 64 * 640};
// Small ones before, between and after two large ones that are neighbours and one that is alone.
const Kind kMixed{"mixed",
                  32,
                  {64, 64, 1200, 1100, 64, 64, 64, 64, 64, 64,   64, 64, 64,
                   64, 64, 64,   64,   64, 64, 64, 64, 64, 1050, 64, 64},
                  4 * 2 * 32 * 1200,
                  4 * 2 * 32 * 1200};

struct Way {
  const char* name;
  config::DType dtype = config::DType::fp32;  // of the model
  config::DType wire = config::DType::fp32;   // of gradients that travel
  bool overlap = true;
  config::Reduce at_3 = config::Reduce::automatic;
};

void PrintTo(const Way& way, std::ostream* out) { *out << way.name; }

const Way kFp32{"fp32"};
const Way kBf16{"bf16", config::DType::bf16};
const Way kFp16{"fp16", config::DType::fp16};
const Way kHalfWire{"half_wire", config::DType::fp32, config::DType::bf16};
const Way kBehind{"behind", config::DType::bf16, config::DType::bf16, false};
const Way kLast{"last", config::DType::fp32, config::DType::bf16, true, config::Reduce::last};

Config config_of(const Way& way, int stage) {
  Config config;
  config.precision.dtype = config.precision.parameters = way.dtype;
  config.batch.accumulation = kMicroBatches;
  config.zero.stage = stage;
  if (stage == 3) config.zero.reduce = way.at_3;
  config.zero.overlap = way.overlap;
  config.zero.gradient_dtype = way.wire;
  return config;
}

plan::Choice choice_of(const Config& config, int ranks) {
  plan::Choice choice;
  choice.micro_batch = kRows;
  choice.accumulation = kMicroBatches;
  choice.ranks = ranks;
  choice.stage = static_cast<int>(config.zero.stage);
  choice.reduces_every = config::reduces_every_micro_batch(config.zero);
  choice.overlap = config.zero.overlap;
  choice.gradient_dtype = config.zero.gradient_dtype;
  return choice;
}

struct Books {
  memory::Snapshot built, trained;  // trained: in the second window, which gathers ahead
};

// Of rank 0.
Books measured(const Kind& kind, const Config& config, int ranks) {
  Books books;
  testing::on_ranks(ranks, [&](std::shared_ptr<comm::Group> group) {
    at::set_num_threads(1);
    Net net(kind.width, kind.inner, kind.has_rest);
    Engine engine(net.view(), config, group);
    net.bind(engine);
    const auto built = engine.ledger().snapshot();
    for (int update = 0; update < 2; ++update) {
      engine.step(std::size_t{kMicroBatches}, [&](std::size_t) { return net.loss(kRows); });
    }
    if (group->rank() == 0) books = {built, engine.ledger().snapshot()};
  });
  return books;
}

struct Said {
  plan::Memory memory;
  std::vector<plan::Moment> moments;
  std::int64_t most;  // bytes of communication, at any moment
};

Said said(const Kind& kind, const Config& config, int ranks) {
  at::set_num_threads(1);
  static std::map<std::pair<std::string, config::DType>, plan::Chain> chains;
  const auto key = std::pair(std::string(kind.name), config.precision.dtype);
  if (chains.count(key) == 0) {
    const Net net(kind.width, kind.inner, kind.has_rest);
    const auto loss = [&](std::int64_t rows) { return net.loss(rows); };
    chains[key] = plan::chain(trace(net.view(), loss, config.precision, {kRows}), kRows);
  }
  const auto choice = choice_of(config, ranks);
  const auto widths = plan::widths(config.precision, config.optimizer, choice.gradient_dtype);
  Said made{plan::memory(chains[key], choice, widths), plan::moments(chains[key], choice, widths),
            0};
  for (const auto& moment : made.moments) {
    made.most = std::max(made.most, moment.accounts[index(Account::communication)]);
  }
  return made;
}

std::int64_t own_peak(const memory::Snapshot& books, Account account) {
  return books.own_peak[index(account)];
}

// Every account to the byte, but for the activations.
MATCHER_P2(IsAsMeasured, peak, slack, join("holds ", ::testing::PrintToString(peak))) {
  auto rest = arg.accounts;
  const auto more = rest[index(Account::activations)] - peak[index(Account::activations)];
  rest[index(Account::activations)] -= more;
  return rest == peak && more >= -kScalars && more <= slack;
}

class PlanOnRanks : public ::testing::TestWithParam<std::tuple<int, Kind, Way>> {};

TEST_P(PlanOnRanks, EveryAccountIsAsPredicted) {
  const auto& [ranks, kind, way] = GetParam();
  for (int stage = 0; stage <= 3; ++stage) {
    SCOPED_TRACE(join("stage ", stage));
    const auto config = config_of(way, stage);
    const auto predicted = said(kind, config, ranks);
    const auto books = measured(kind, config, ranks);
    const auto reserve = stage == 3 ? kind.reserve_at_3 : kind.reserve;
    // Where a gradient goes to memory that is made for it, the two need not be there at once.
    const auto slack = choice_of(config, ranks).reduces_every ? kind.largest_gradient() : 0;
    auto peak = books.trained.at_peak;
    peak[index(Account::communication)] += reserve;
    for (std::size_t i = 0; i < memory::kAccounts; ++i) {
      const auto account = static_cast<Account>(i);
      SCOPED_TRACE(memory::name_of(account));
      const auto more = account == Account::communication ? reserve : 0;
      EXPECT_EQ(predicted.memory.held[i], books.built.current[i] + more);
    }
    EXPECT_GE(predicted.memory.peak, books.trained.peak_bytes + reserve - kScalars);
    EXPECT_LE(predicted.memory.peak, books.trained.peak_bytes + reserve + slack);
    // With that slack another moment may be said to be the highest.
    EXPECT_THAT(predicted.moments, Contains(IsAsMeasured(peak, slack)))
        << "highest: " << predicted.memory.moment;
    EXPECT_EQ(predicted.most, own_peak(books.trained, Account::communication) + reserve);
  }
}

// The flat of the first block then waits for the end, as that of the rest does.
TEST(PlanOnRanksWithoutRest, CommunicationIsAsPredicted) {
  const Kind kind{"no_rest", 32, std::vector<std::int64_t>(20, 64), 256 << 10, 16 << 10, false};
  for (const auto& way : {kFp32, kBehind}) {
    for (int stage = 0; stage <= 3; ++stage) {
      SCOPED_TRACE(join(way.name, ", stage ", stage));
      const auto config = config_of(way, stage);
      const auto predicted = said(kind, config, 2);
      const auto books = measured(kind, config, 2);
      const auto reserve = stage == 3 ? kind.reserve_at_3 : kind.reserve;
      EXPECT_EQ(predicted.most, own_peak(books.trained, Account::communication) + reserve);
    }
  }
}

const auto kNames = [](const auto& info) {
  return join("w", std::get<0>(info.param), '_', std::get<1>(info.param).name, '_',
              std::get<2>(info.param).name);
};
INSTANTIATE_TEST_SUITE_P(
    Two, PlanOnRanks,
    ::testing::Combine(::testing::Values(2), ::testing::Values(kSmall, kLarge, kMixed),
                       ::testing::Values(kFp32, kBf16, kHalfWire, kBehind, kLast)),
    kNames);
INSTANTIATE_TEST_SUITE_P(Fp16, PlanOnRanks,
                         ::testing::Combine(::testing::Values(2), ::testing::Values(kSmall),
                                            ::testing::Values(kFp16)),
                         kNames);
INSTANTIATE_TEST_SUITE_P(Four, PlanOnRanks,
                         ::testing::Combine(::testing::Values(4),
                                            ::testing::Values(kSmall, kLarge, kMixed),
                                            ::testing::Values(kFp32, kBf16)),
                         kNames);

}  // namespace
}  // namespace poise

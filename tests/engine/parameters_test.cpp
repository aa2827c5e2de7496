// Parameters of every kind survive being re-homed: tied, frozen, 0-dim, empty, transposed, unused,
// mixed.
#include <ATen/ops/arange.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/scalar_tensor.h>
#include <gtest/gtest.h>

#include "poise/log.h"
#include "support/tiny_model.h"

namespace poise {
namespace {

using test::normal;

// An odd model: `used` is tied under two names, transposed strides, a 0-dim scale, an empty one.
struct OddModel {
  at::Tensor tied = normal({4, 4}, 1);
  at::Tensor transposed = normal({3, 4}, 2).t();  // [4, 3], strides [1, 4]
  at::Tensor scale = at::scalar_tensor(1.5);
  at::Tensor empty = at::empty({0, 7});
  at::Tensor unused = normal({5}, 3);
  at::Tensor frozen = normal({4}, 4);

  OddModel() {
    for (auto* p : {&tied, &transposed, &scale, &empty, &unused}) p->requires_grad_();
  }
  ModelView view() const {
    return {{{"in.weight", tied},
             {"mid", transposed},
             {"scale", scale},
             {"none", empty},
             {"unused", unused},
             {"frozen", frozen},
             {"out.weight", tied}},
            {},
            {}};
  }
  at::Tensor loss(const at::Tensor& x) const {
    const auto h = (x.matmul(tied) + frozen).matmul(tied).matmul(transposed) * scale;
    return h.pow(2).mean();
  }
};

TEST(Parameters, IdentityShapesAndStridesStayAndTrainingIsRight) {
  OddModel model, plain;
  const auto* impl = model.transposed.unsafeGetTensorImpl();
  Config config;
  config.optimizer.lr = 0.1;
  config.optimizer.type = "sgd";
  config.optimizer.max_grad_norm = 0;
  Engine engine(model.view(), config);
  EXPECT_EQ(model.transposed.unsafeGetTensorImpl(), impl);
  EXPECT_EQ(model.transposed.strides(), plain.transposed.strides());
  EXPECT_TRUE(model.transposed.equal(plain.transposed));
  EXPECT_EQ(engine.table().entries().size(), 6u);
  EXPECT_EQ(
      engine.table().entries()[static_cast<std::size_t>(engine.table().find("out.weight"))].name,
      "in.weight");
  const auto x = normal({8, 4}, 9);
  engine.step(1, [&](std::size_t) { return Loss::mean(model.loss(x), 1); });
  torch::autograd::backward({plain.loss(x)}, {});
  const auto expect_stepped = [](const at::Tensor& got, const at::Tensor& start) {
    EXPECT_TRUE(got.allclose(start.detach() - 0.1 * start.grad(), 1e-5, 1e-6));
    EXPECT_FALSE(got.grad().defined()) << ".grad never exists";
  };
  expect_stepped(model.tied, plain.tied);
  expect_stepped(model.transposed, plain.transposed);
  expect_stepped(model.scale, plain.scale);
  EXPECT_TRUE(model.unused.equal(plain.unused)) << "no gradient, no decay: stays";
  EXPECT_TRUE(model.frozen.equal(plain.frozen));
}

TEST(Parameters, MastersComeFromTheValuesBeforeTheCast) {
  OddModel model, plain;
  Config config;
  config.precision.dtype = config.precision.parameters = config::DType::bf16;
  Engine engine(model.view(), config);
  EXPECT_EQ(model.tied.scalar_type(), at::kBFloat16);
  EXPECT_EQ(model.frozen.scalar_type(), at::kBFloat16);
  EXPECT_TRUE(engine.master("in.weight").equal(plain.tied));
  EXPECT_TRUE(model.tied.equal(plain.tied.to(at::kBFloat16)));
}

TEST(Parameters, BadModelsAreRefused) {
  const auto build = [](std::vector<NamedTensor> parameters) {
    for (auto& p : parameters) p.tensor.requires_grad_();
    Engine engine(ModelView{std::move(parameters), {}, {}}, Config{});
  };
  EXPECT_THROW(build({}), Error);
  const auto base = normal({8, 8}, 1);
  EXPECT_THROW(build({{"a", base.narrow(0, 0, 5)}, {"b", base.narrow(0, 4, 4)}}), Error)
      << "overlap";
  EXPECT_NO_THROW(build({{"a", base.narrow(0, 0, 4)}, {"b", base.narrow(0, 4, 4)}}));
  EXPECT_THROW(build({{"a", normal({8, 8}, 1).narrow(1, 0, 3)}}), Error) << "gaps";
  EXPECT_THROW(build({{"a", normal({8}, 1).expand({3, 8})}}), Error) << "repeats";
  EXPECT_THROW(build({{"a", normal({2}, 1)}, {"a", normal({2}, 2)}}), Error) << "one name twice";
  EXPECT_THROW(build({{"a", normal({2}, 1)}, {"b", at::empty({2}, at::kMeta)}}), Error)
      << "several devices";
  ModelView frozen{{{"a", normal({2}, 1)}}, {}, {}};
  EXPECT_THROW(Engine(frozen, Config{}), Error) << "nothing to train";
  Config config;
  config.optimizer.groups.push_back({"no.such.*", 1, 0});
  ModelView one{{{"a", normal({2}, 1).requires_grad_()}}, {}, {}};
  EXPECT_THROW(Engine(one, config), Error) << "a group that matches nothing";
}

// Of an embedding that asks for sparse gradients.
TEST(Parameters, SparseGradientsAreSummedAsDenseOnesAndSaidOnce) {
  std::vector<std::string> lines;
  const auto old =
      log::set_sink([&](log::Level, const std::string& line) { lines.push_back(line); });
  const auto trained = [](bool sparse) {
    auto table = normal({20, 4}, 1).requires_grad_();
    Engine engine(ModelView{{{"table", table}}, {}, {}}, Config{});
    for (int update = 0; update < 2; ++update) {
      engine.step(2, [&](std::size_t i) {
        const auto ids = at::arange(6) + static_cast<std::int64_t>(3 * i);  // 3 rows of both
        return Loss::mean(at::embedding(table, ids, -1, false, sparse).pow(2).mean(), 6);
      });
    }
    return table.detach().clone();
  };
  const auto dense = trained(false);
  EXPECT_TRUE(lines.empty());
  EXPECT_TRUE(trained(true).equal(dense));
  log::set_sink(old);
  ASSERT_EQ(lines.size(), 1u);
  EXPECT_NE(lines[0].find("'table' is sparse; sparse gradients are made dense"), std::string::npos)
      << lines[0];
}

TEST(Parameters, GroupsChooseRateAndDecay) {
  const auto make = [] { return normal({4, 4}, 1).requires_grad_(); };
  auto slow = make(), fast = make();
  Config config;
  config.optimizer.type = "sgd";
  config.optimizer.lr = 0.1;
  config.optimizer.max_grad_norm = 0;
  config.optimizer.weight_decay = 0.5;
  config.optimizer.groups.push_back({"slow*", 0.1, 0.0});
  Engine engine(ModelView{{{"slow.w", slow}, {"fast.w", fast}}, {}, {}}, config);
  engine.step(1, [&](std::size_t) { return Loss::mean(slow.sum() + fast.sum(), 1); });
  const auto start = make();
  EXPECT_TRUE(slow.allclose(start - 0.01));
  EXPECT_TRUE(fast.allclose(start - 0.1 * (1 + 0.5 * start)));
}

TEST(Parameters, MovedAfterBuildIsAnError) {
  OddModel model;
  Engine engine(model.view(), Config{});
  model.tied.set_data(model.tied.detach().clone());
  EXPECT_THROW(engine.step(1,
                           [&](std::size_t) {
                             return Loss::mean(model.loss(normal({2, 4}, 1)), 1);
                           }),
               Error);
}

TEST(Parameters, AModelOutlivesItsEngines) {
  OddModel model;
  const auto x = normal({8, 4}, 9);
  for (int i = 0; i < 3; ++i) {
    Engine engine(model.view(), Config{});
    engine.step(1, [&](std::size_t) { return Loss::mean(model.loss(x), 1); });
  }
  torch::autograd::backward({model.loss(x)}, {});  // the dropped engines' hooks let it pass
  EXPECT_TRUE(model.tied.grad().defined());
}

}  // namespace
}  // namespace poise
